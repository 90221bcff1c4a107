"""The names of images built from recipes outside the checkout: each names the image that was built last under it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """What a name stands for: `folder` in the cache, and the recipe file it was built from."""

    folder: str
    recipe: str


class Names:
    """One small file for each name, in `place`."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in self._place.glob("*.json")))

    def get(self, name: str) -> Named | None:
        """What the name stands for, if it is one."""
        try:
            return msgspec.json.decode((self._place / f"{name}.json").read_bytes(), type=Named)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def give(self, name: str, named: Named) -> None:
        """Let the name stand for this from now on."""
        if self.get(name) == named:
            return
        self._place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._place, delete=False) as fresh:
            fresh.write(msgspec.json.encode(named))
        Path(fresh.name).chmod(0o644)
        Path(fresh.name).replace(self._place / f"{name}.json")

    def version(self, name: str) -> int:
        """Changes whenever the name comes to stand for something else; cheap."""
        try:
            return (self._place / f"{name}.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0
