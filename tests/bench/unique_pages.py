"""The floor of what checkpoints take: each distinct page once, those of one checkpoint compressed in one stream."""

import hashlib
from pathlib import Path
from typing import Final

from torpor_chunks.compression import compressed

PAGE: Final = 4096
ZEROS: Final = bytes(PAGE)


class UniquePages:
    """Counts pages that no checkpoint before had. No store does better but by comparing pages that are merely alike."""

    def __init__(self) -> None:
        self.compressed_bytes = 0
        self._seen: set[bytes] = set()
        self._new: list[bytes] = []

    def add(self, file: Path, head_bytes: int) -> None:
        """Count the pages of a part; tables at its beginning are not counted."""
        data = file.read_bytes()
        for at in range(head_bytes, len(data), PAGE):
            page = data[at : at + PAGE]
            name = hashlib.sha256(page).digest()
            if page != ZEROS and name not in self._seen:
                self._seen.add(name)
                self._new.append(page)

    def close_checkpoint(self) -> None:
        """All parts of a checkpoint were added."""
        self.compressed_bytes += len(compressed(b"".join(self._new)))
        self._new.clear()
