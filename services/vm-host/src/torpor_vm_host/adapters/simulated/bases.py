"""What the checkpoints of simulated machines build on, for who wants them to: one small file, another on each host.

A real machine's checkpoint is nothing without its template. A simulated one says which file it builds on, and is
refused where that is not, so that what hosts do about it can be shown without a real machine.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from torpor_chunks.os_errors import typed
from torpor_vm_host.ports import Base, DriverError

FILE: Final = "template"


class HostBases:
    """The bases that one host has, each a directory below `root`; its own is made when it is first asked for."""

    def __init__(self, root: Path, content: bytes) -> None:
        """`content`: what makes this host's own base another than those of other hosts."""
        self._root = root
        self._content = content
        self.own: Final = hashlib.sha256(content).hexdigest()

    def get(self, name: str) -> Base | None:
        """A base that is here."""
        if name == self.own:
            self._make()
        path = self._root / name / FILE
        return Base(name=name, files={FILE: path}) if path.is_file() else None

    def receive(self, name: str, directory: Path) -> None:
        """Have this base, whose file is in `directory`, from now on; raises `DriverError("template-corrupt")`."""
        with typed(directory):
            try:
                found = hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
            except FileNotFoundError:
                found = "nothing"
            if found != name:
                raise DriverError("template-corrupt", f"it is {found}, not {name}", retryable=False)
            if not (self._root / name).exists():
                self._root.mkdir(parents=True, exist_ok=True)
                directory.rename(self._root / name)

    def _make(self) -> None:
        place = self._root / self.own
        if place.exists():
            return
        aside = self._root / f"{self.own}.{os.getpid()}"
        with typed(place):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / FILE).write_bytes(self._content)
            aside.rename(place)
