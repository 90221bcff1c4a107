"""Signs the log's head when it has grown, never one that does not continue the last, and keeps signed heads in a file.

A signed head that is kept where the database's owner cannot change it is what shows, later, that the log lost its tail
or was rewritten.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import TorporError
from torpor_eventlog.merkle import EMPTY_ROOT, consistency_holds
from torpor_eventlog.notes import SignedSizeAndRoot
from torpor_eventlog.port import EventLog, Head

Sign = Callable[[Head], str]
"""Signs a head: the text of a signed note."""

Sink = Callable[[str], Awaitable[None]]
"""Keeps a note durably, outside the log's database."""

_NEWEST_BYTES: Final = 64 * 1024
_SIGNED: Final = re.compile(rb"\\n\\n(?:(?!\\n).)*\\n.$", re.DOTALL)
"""The signature of a note as it stands in a line, and the one byte behind it."""


class LogRewritten(TorporError):  # noqa: N818  (a finding, as the errors of `torpor_contracts` are named)
    """The log is not a continuation of what was signed last; an operator must find out why. Nothing was signed."""

    def __init__(self, signed: int, now: int) -> None:
        super().__init__(
            f"the log of {now} rows does not continue the {signed} rows whose head was signed last; "
            "stop appending and run `torpor audit verify`, which names the first bad position"
        )
        self.signed = signed
        self.now = now


class HeadSigner:
    """Signs heads, one after the other; `sign` is `SigningKey.sign_checkpoint`.

    `last` is what was signed before this process, as the sinks remember it.
    """

    def __init__(self, log: EventLog, sign: Sign, sinks: Sequence[Sink], last: SignedSizeAndRoot | None = None) -> None:
        self._log = log
        self._sign = sign
        self._sinks = sinks
        self.last = last or SignedSizeAndRoot(0, EMPTY_ROOT)

    async def sign_if_grown(self) -> str | None:
        """The note that was signed and kept in every sink; None when the log has not grown since the last.

        Raises `LogRewritten` when it cannot be signed, `Transient` when it could not be kept: then it is signed again.
        """
        head = await self._log.head()
        if (head.position, head.root) == (self.last.size, self.last.root):
            return None
        if not await self._continues(head):
            raise LogRewritten(self.last.size, head.position)
        note = self._sign(head)
        for keep in self._sinks:
            await keep(note)
        self.last = SignedSizeAndRoot(head.position, head.root)
        return note

    async def _continues(self, head: Head) -> bool:
        if head.position < self.last.size:
            return False
        proof = await self._log.consistency_proof(self.last.size, head.position)
        return consistency_holds(self.last.size, head.position, proof, self.last.root, head.root)


class HeadsFile:
    """Notes in a file, one JSON text a line, each flushed to the disk; a line torn by a crash is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def keep(self, note: str) -> None:
        """Add a note; raises `OSError` when the disk does not take it."""
        await asyncio.to_thread(self._keep, note)

    async def newest(self) -> str | None:
        """The note kept last, None when there is none."""
        notes = _notes_in(await asyncio.to_thread(self._tail, _NEWEST_BYTES))
        return notes[-1] if notes else None

    async def all(self) -> list[str]:
        """Every note, in order; a line that was damaged since it was written is given as it stands, to be seen."""
        return _notes_in(await asyncio.to_thread(self._tail, None), damaged=True)

    def _keep(self, note: str) -> None:
        with self._path.open("ab") as file:
            # After a line torn by a crash: the note must not become part of it.
            start = b"" if self._tail(1) in (b"", b"\n") else b"\n"
            file.write(start + msgspec.json.encode(note) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _tail(self, size: int | None) -> bytes:
        """The last `size` bytes, or all of them."""
        try:
            with self._path.open("rb") as file:
                if size is not None:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                return file.read()
        except FileNotFoundError:
            return b""


def _notes_in(content: bytes, *, damaged: bool = False) -> list[str]:
    notes: list[str] = []
    for line in content.split(b"\n"):
        try:
            notes.append(msgspec.json.decode(line, type=str))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if damaged and not _is_torn(line):
                notes.append(line.decode(errors="replace"))
    return notes


def _is_torn(line: bytes) -> bool:
    """Whether the line is but the beginning of one: a whole one ends after the signature, whatever its last byte is."""
    ends = len(line) > 1 and line.endswith(b'"')  # no note has a quotation mark in it
    return not ends and _SIGNED.search(line) is None
