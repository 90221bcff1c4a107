"""The snapshot store's settings, from the environment only; read in `app.py` and nowhere below."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from torpor_chunks.locations import default_key_file, default_url


class SnapshotStoreSettings(BaseSettings):
    """`TORPOR_CHUNKS_URL` is where checkpoints are kept (`file:///directory`, `s3://bucket/prefix`).

    Left out, it is `chunks` below `TORPOR_DATA_DIR`; `TORPOR_CHUNKS_KEY_FILE`, the master keys, `keys/chunks.key`.
    Times in seconds: `finish_every_s` between looks for broken-off frees; `sweep_every_s` between sweeps of a part of
    the store; `sweep_grace_s` is how old a pack must be that nothing refers to, and no suspend may last half as long.
    """

    model_config = SettingsConfigDict(env_prefix="TORPOR_SNAPSHOT_STORE_", frozen=True, populate_by_name=True)

    data_dir: Path = Field(default=Path("torpor-data"), validation_alias="TORPOR_DATA_DIR")
    chunks_url: str | None = Field(default=None, validation_alias="TORPOR_CHUNKS_URL")
    chunks_key_file: Path | None = Field(default=None, validation_alias="TORPOR_CHUNKS_KEY_FILE")
    finish_every_s: float = Field(default=30.0, gt=0)
    sweep_every_s: float = Field(default=60.0, gt=0)
    sweep_grace_s: float = Field(default=6 * 3600.0, gt=0)

    def store_url(self) -> str:
        """Where checkpoints are kept."""
        return self.chunks_url or default_url(self.data_dir)

    def key_file(self) -> Path:
        """The master keys of the chunk store."""
        return self.chunks_key_file or default_key_file(self.data_dir)
