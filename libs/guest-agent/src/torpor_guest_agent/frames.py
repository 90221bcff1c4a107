"""Frames on the channel between host and guest: zero-terminated, so that a half frame never costs more than itself.

A frame is a JSON header, a newline and a body of any bytes, escaped so that no zero byte is in it, and then one zero
byte. A checkpoint may be taken in the middle of a frame: whoever speaks next starts with a zero byte, and the half
frame before it is dropped, as its header says how long its body is. Escapes: 0x00 is written 0x01 0x01, and 0x01 is
written 0x01 0x02.
"""

import json
from typing import Any, Final, NamedTuple

FRAME_BYTES_MAX: Final = 2 * 1024 * 1024
"""Longest escaped frame that is read; a longer one is dropped as nonsense."""
BODY_BYTES_MAX: Final = 256 * 1024
"""Longest body that is sent in one frame."""
BODY_LENGTH: Final = "body"
"""The key of a header that says how many bytes the body has; absent when it has none."""

_encoded: Final = json.JSONEncoder(separators=(",", ":")).encode


class Frame(NamedTuple):
    """One message: a JSON object and the bytes that go with it."""

    header: dict[str, Any]
    body: bytes = b""


def encode(frame: Frame) -> bytes:
    """The frame as it travels, its terminating zero byte included."""
    header = {**frame.header, BODY_LENGTH: len(frame.body)} if frame.body else frame.header
    plain = _encoded(header).encode() + b"\n" + frame.body
    return plain.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01") + b"\x00"


def decode(escaped: bytes) -> Frame | None:
    """The frame between two zero bytes, or None if that is not one (what was cut off by a checkpoint is not)."""
    plain = escaped.replace(b"\x01\x01", b"\x00").replace(b"\x01\x02", b"\x01")
    text, newline, body = plain.partition(b"\n")
    if not newline:
        return None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.pop(BODY_LENGTH, 0) != len(body):
        return None
    return Frame(header, body)


class Frames:
    """Takes bytes as they arrive and gives the whole frames among them; memory is bounded by `FRAME_BYTES_MAX`."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.dropped = 0
        """How many pieces between zero bytes were no frames."""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes."""
        *whole, rest = data.split(b"\x00")
        found: list[Frame] = []
        for piece in whole:
            frame = self._completed(piece)
            if frame is not None:
                found.append(frame)
        if rest:
            self._size += len(rest)
            # Of a frame that is too long nothing is kept; it is dropped when its end comes.
            if self._size <= FRAME_BYTES_MAX:
                self._parts.append(rest)
            else:
                self._parts.clear()
        return found

    def _completed(self, piece: bytes) -> Frame | None:
        size = self._size + len(piece)
        escaped = b"".join([*self._parts, piece])
        self._parts, self._size = [], 0
        if size == 0:
            return None
        frame = decode(escaped) if size <= FRAME_BYTES_MAX else None
        if frame is None:
            self.dropped += 1
        return frame
