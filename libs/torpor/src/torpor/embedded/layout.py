"""Where everything of one embedded whole lives: one data directory, so that several run side by side."""

import os
from dataclasses import dataclass
from pathlib import Path

DATA_DIR_VARIABLE = "TORPOR_DATA_DIR"


def default_data_dir() -> Path:
    """`TORPOR_DATA_DIR`, else `torpor` under the XDG state directory (`~/.local/state`)."""
    chosen = os.environ.get(DATA_DIR_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    # The XDG specification: a relative path is invalid and must be ignored.
    home = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return home / "torpor"


@dataclass(frozen=True)
class DataDir:
    """The paths of one whole."""

    root: Path

    @classmethod
    def choose(cls, given: Path | str | None) -> "DataDir":
        """The data directory given, or the default one; absolute, not yet made."""
        return cls(Path(os.path.abspath(Path(given).expanduser() if given else default_data_dir())))  # noqa: PTH100  (symlinks stay)

    @property
    def lock(self) -> Path:
        """Held (flock) by the one supervisor of this directory."""
        return self.root / "lock"

    @property
    def run_file(self) -> Path:
        """What runs where; there while the whole is up, or was killed."""
        return self.root / "run.json"

    @property
    def interrupted(self) -> Path:
        """The sessions whose programs an orderly stop has interrupted; the next start wakes them."""
        return self.root / "interrupted.json"

    @property
    def restarts(self) -> Path:
        """A record of every process that ended by itself, one JSON object a line."""
        return self.root / "restarts.jsonl"

    @property
    def logs(self) -> Path:
        """One log file for each process, bounded."""
        return self.root / "logs"

    @property
    def log_database(self) -> Path:
        """The event log: the truth."""
        return self.root / "log.db"

    @property
    def views(self) -> Path:
        """One view database for each service; derived, may be dropped."""
        return self.root / "views"

    @property
    def nats(self) -> Path:
        """nats-server's configuration, keys and streams."""
        return self.root / "nats"

    @property
    def keys(self) -> Path:
        """Seeds: of the NATS users, and of the key that signs the log's heads."""
        return self.root / "keys"

    @property
    def heads_file(self) -> Path:
        """Signed heads of the log, outside its database, one a line."""
        return self.root / "heads" / "heads.jsonl"

    @property
    def signing_key(self) -> Path:
        """The private key that the heads are signed with."""
        return self.keys / "log-signing.key"

    @property
    def chunks(self) -> Path:
        """Where the parts of checkpoints are kept."""
        return self.root / "chunks"
