"""Signs the log's head whenever it has grown, and keeps what is signed in a file and in the stream HEADS."""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected, TorporError, Transient
from torpor_contracts.log_heads import HeadAnswer
from torpor_eventlog.heads import HeadsFile, HeadSigner
from torpor_eventlog.notes import NoteRefused, SignedSizeAndRoot, SigningKey
from torpor_eventlog.port import EventLog
from torpor_messaging import subjects
from torpor_messaging.ports import Bus

ReadNewest = Callable[[], Awaitable[str | None]]
"""The note kept last in some place, None when it keeps none."""

_log: Final = logging.getLogger(__name__)


class Signing:
    """The one signer of a log. What it signed before is read back first: it never signs less, nor something else."""

    def __init__(self, log: EventLog, bus: Bus, key_file: Path, log_name: str, heads_file: Path) -> None:
        self._log = log
        self._bus = bus
        self._key_file = key_file
        self._log_name = log_name
        self._file = HeadsFile(heads_file)
        self._heads_file = heads_file
        self._signer: HeadSigner | None = None
        self._key: SigningKey | None = None
        self._newest: str | None = None
        self._at_work = asyncio.Lock()

    async def open(self, read_stream: ReadNewest) -> None:
        """Load or make the key, and find what was signed last: in the file or in the stream, whichever has more."""
        try:
            for directory in (self._key_file.parent, self._heads_file.parent):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._key = SigningKey.load_or_generate(self._key_file, self._log_name)
        except OSError as error:
            raise Rejected(
                "signing-key-unwritable",
                f"the log's signing key cannot be made: {error}",
                f"make {self._key_file.parent} and {self._heads_file.parent} writable for this service",
            ) from error
        last: SignedSizeAndRoot | None = None
        for place, note in (("the heads file", await self._file.newest()), ("stream HEADS", await read_stream())):
            if note is None:
                continue
            try:
                signed = self._key.verifier.open_checkpoint(note)
            except NoteRefused as error:
                _log.error("the newest head in %s is not ours and is passed over: %s", place, error)
                continue
            if last is None or signed.size > last.size:
                last, self._newest = signed, note
        self._signer = HeadSigner(self._log, self._key.sign_checkpoint, (self._keep, self._publish), last)

    async def sign(self) -> None:
        """Sign the head if the log has grown; see `HeadSigner.sign_if_grown` for what it raises."""
        assert self._signer is not None, "open() comes first"
        async with self._at_work:
            note = await self._signer.sign_if_grown()
            if note is not None:
                self._newest = note

    async def answer(self, relayed: int) -> HeadAnswer:
        """The newest signed head; one is signed now when there is none yet."""
        if self._newest is None:
            await self.sign()
        if self._newest is None or self._key is None:
            raise Rejected("no-signed-head", "the log is empty: there is nothing to sign", "ask after the first event")
        verifier = self._key.verifier
        size = verifier.open_checkpoint(self._newest).size
        return HeadAnswer(note=self._newest, size=size, public_key=str(verifier), relayed=relayed)

    async def _keep(self, note: str) -> None:
        try:
            await self._file.keep(note)
        except OSError as error:
            raise Transient(f"the signed head cannot be kept in {self._heads_file}: {error}", 5.0) from error

    async def _publish(self, note: str) -> None:
        await self._bus.publish_stored(subjects.HEAD, note.encode())


def newest_in_stream(api: Callable[[str, dict[str, object]], Awaitable[dict[str, object]]]) -> ReadNewest:
    """Reads the newest note of the stream HEADS by the JetStream API; None when it cannot be read."""

    async def read() -> str | None:
        try:
            answer = await api("STREAM.MSG.GET.HEADS", {"last_by_subj": subjects.HEAD})
        except TorporError as error:
            _log.warning("stream HEADS cannot be read: %s", error)
            return None
        message = answer.get("message")
        if not isinstance(message, dict):
            return None
        return base64.b64decode(str(message.get("data", ""))).decode(errors="replace")

    return read
