"""Where the chunk store and its master keys are when nobody says otherwise: below the data directory."""

from pathlib import Path


def default_url(data_dir: Path) -> str:
    """The URL of the store in a data directory."""
    return (data_dir.absolute() / "chunks").as_uri()


def default_key_file(data_dir: Path) -> Path:
    """The file of master keys in a data directory."""
    return data_dir / "keys" / "chunks.key"
