"""The log-relay's settings, from the environment only: `TORPOR_LOG_RELAY_…` and `TORPOR_DATA_DIR`."""

from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class LogRelaySettings(BaseSettings):
    """Where the signed heads and the signing key are: by default in the data directory.

    Both must be kept where the database's owner does not reach them, or they prove nothing. `log_name` becomes the
    log's origin in every signed head, when the key is made.
    """

    model_config = SettingsConfigDict(env_prefix="TORPOR_LOG_RELAY_", frozen=True, populate_by_name=True)

    data_dir: Path = Field(validation_alias=AliasChoices("TORPOR_LOG_RELAY_DATA_DIR", "TORPOR_DATA_DIR"))
    heads_file_path: Path | None = Field(default=None, validation_alias="TORPOR_LOG_RELAY_HEADS_FILE")
    signing_key_path: Path | None = Field(default=None, validation_alias="TORPOR_LOG_RELAY_SIGNING_KEY_FILE")
    log_name: str = Field(default="torpor-log", pattern=r"^[a-z0-9][a-z0-9./-]{0,99}$")
    sign_every_s: float = Field(default=5.0, gt=0)
    poll_s: float = Field(default=0.25, gt=0)

    @property
    def heads_file(self) -> Path:
        """Where signed heads are kept, one a line."""
        return self.heads_file_path or self.data_dir / "heads" / "heads.jsonl"

    @property
    def signing_key(self) -> Path:
        """The private key; made, for its owner's eyes only, when there is none."""
        return self.signing_key_path or self.data_dir / "keys" / "log-signing.key"
