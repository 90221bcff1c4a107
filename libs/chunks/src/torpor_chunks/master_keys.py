"""The keys that all others are wrapped under: one file, not in the store, the same for every host that shares it."""

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from torpor_chunks.os_errors import typed
from torpor_chunks.port import KeyUnusable
from torpor_chunks.sealing import KEY_BYTES

_LINE: Final = re.compile(r"([1-9]\d{0,8}) ([0-9a-f]{64})")
ADVICE: Final = 'make one: (umask 077; echo "1 $(openssl rand -hex 32)" > FILE)'


class MasterKeys:
    """Master keys by their version; what is wrapped anew is wrapped under the newest."""

    def __init__(self, keys: dict[int, bytes]) -> None:
        self._keys = keys
        self.newest = max(keys)

    def key(self, version: int) -> bytes:
        """The key of a version; raises `KeyUnusable`."""
        try:
            return self._keys[version]
        except KeyError:
            known = ", ".join(map(str, sorted(self._keys)))
            raise KeyUnusable(
                f"master key {version} is needed and is not in the key file, which has {known}; add it again"
            ) from None


def read_master_keys(file: Path) -> MasterKeys:
    """The keys of a file: one a line, `<version> <64 hex digits>`, the highest version in use; `#` begins a remark."""
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyUnusable(f"the key file {file} cannot be read ({error}); {ADVICE}") from error
    keys: dict[int, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or int(match[1]) in keys:
            raise KeyUnusable(f"line {number} of {file} is no `<version> <64 hex digits>` of a new version; {ADVICE}")
        keys[int(match[1])] = bytes.fromhex(match[2])
    if not keys:
        raise KeyUnusable(f"the key file {file} has no key; {ADVICE}")
    return MasterKeys(keys)


def make_master_keys(file: Path) -> MasterKeys:
    """The keys of a file; when there is no such file, one that nobody else can read is made, with one new key."""
    if not file.exists():
        with typed(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=file.parent, prefix=".key-")
            try:
                with os.fdopen(number, "w", encoding="ascii") as new:
                    new.write(f"1 {os.urandom(KEY_BYTES).hex()}\n")
                    new.flush()
                    os.fsync(new.fileno())
                # A link does not replace: of two processes that make a key, one wins and both read it.
                with contextlib.suppress(FileExistsError):
                    os.link(name, file)
            finally:
                Path(name).unlink(missing_ok=True)
    return read_master_keys(file)
