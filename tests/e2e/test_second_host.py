"""A second host that has nothing of the first but the store: real sessions go on there, memory and all."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_machines import RealWhole, eventually
from torpor_vm_host.images.library import cache_home

pytestmark = pytest.mark.e2e

SECOND = "host-second"
NO_SLOTS = {"TORPOR_VM_HOST_SLOTS_WARM": "0", "TORPOR_VM_HOST_SLOTS_BLANK": "0"}


class SecondHost:
    """A vm-host process beside a whole: its data, views and templates are its own, the store and the log not."""

    def __init__(self, whole: RealWhole, place: Path) -> None:
        self.place = place
        cache = place / "cache"
        cache.mkdir(parents=True)
        (cache / "images").symlink_to(cache_home() / "images")
        self.log = place / "vm-host.log"
        first = Path(f"/proc/{whole.process_named('vm-host').pid}/environ").read_bytes()
        environment = dict(one.split("=", 1) for one in first.decode().split("\0") if "=" in one)
        environment |= {
            "TORPOR_DATA_DIR": str(place / "data"),
            "TORPOR_VIEWS_DSN": f"sqlite:///{place}/views.db",
            "TORPOR_VM_HOST_HOST_ID": SECOND,
            "TORPOR_CACHE_DIR": str(cache),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torpor_vm_host"], env=environment, stdout=log, stderr=log
            )

    @property
    def templates(self) -> set[str]:
        """The templates it has, by the beginnings of their names."""
        return {path.name for path in (self.place / "data" / "vm-host" / SECOND / "templates").glob("[0-9a-f]*")}

    def close(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[RealWhole]:
    """A whole whose checkpoints lie in a directory that is no host's, sealed with keys that all share."""
    keys = tmp_path / "chunks.key"
    keys.write_text(f"1 {os.urandom(32).hex()}\n")
    keys.chmod(0o600)
    environment = NO_SLOTS | {
        "TORPOR_CHUNKS_URL": (tmp_path / "store").as_uri(),
        "TORPOR_CHUNKS_KEY_FILE": str(keys),
        "TORPOR_VM_HOST_KEEP_TEMPLATES": "always",
    }
    running = RealWhole(tmp_path / "first", env=environment)
    try:
        running.until("ready")
        yield running
    finally:
        running.close()


@pytest.fixture
def session(whole: RealWhole) -> str:
    """A session that was made while there was one host."""
    made: str = whole.call("session", "create", "ses-moves")["session_id"]
    return made


@pytest.fixture
def second(whole: RealWhole, session: str, tmp_path: Path) -> Iterator[SecondHost]:
    assert session
    host = SecondHost(whole, tmp_path / "second")
    yield host
    host.close()


def test_a_session_goes_on_where_only_the_store_is(whole: RealWhole, session: str, second: SecondHost) -> None:
    whole.run_in(session, "sh", "-c", "echo in memory > /dev/shm/note; echo on disk > /root/note; sync")
    boot = whole.run_in(session, "cat", "/proc/sys/kernel/random/boot_id")
    eventually(
        lambda: any(host["host_id"] == SECOND for host in whole.call("host", "list")),
        f"the second host is there; it says {second.log.read_text()[-2000:]}",
        60,
    )
    whole.call("host", "drain", "host-local")
    eventually(lambda: not whole.machines(), "the first host is empty", 60)
    before = eventually(lambda: second.templates, "the second host made a template of its own")
    said = whole.run_in(session, "cat", "/dev/shm/note", "/root/note", "/proc/sys/kernel/random/boot_id")
    assert said == f"in memory\non disk\n{boot}"
    shown = whole.call("session", "show", session)
    assert (shown["state"], shown["incarnation"]) == ("running", 2)
    assert whole.machines() == {}
    assert len(second.templates - before) == 1, "what the checkpoint builds on came from the store"
    assert whole.call("checkpoint", "verify")["ok"]
    whole.call("session", "terminate", session)
