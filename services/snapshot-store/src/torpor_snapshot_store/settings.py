"""The snapshot store's settings, from the environment only; read in `app.py` and nowhere below."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class SnapshotStoreSettings(BaseSettings):
    """`TORPOR_CHUNKS_DIRECTORY` is where parts of checkpoints are kept; left out, `chunks` below `TORPOR_DATA_DIR`.

    `TORPOR_SNAPSHOT_STORE_FINISH_EVERY_S`: how often broken-off frees are looked for, seconds.
    """

    model_config = SettingsConfigDict(env_prefix="TORPOR_SNAPSHOT_STORE_", frozen=True, populate_by_name=True)

    data_dir: Path = Field(default=Path("torpor-data"), validation_alias="TORPOR_DATA_DIR")
    chunks_directory: Path | None = Field(default=None, validation_alias="TORPOR_CHUNKS_DIRECTORY")
    finish_every_s: float = Field(default=30.0, gt=0)

    def chunks_root(self) -> Path:
        """Where parts of checkpoints are kept."""
        return self.chunks_directory or self.data_dir / "chunks"
