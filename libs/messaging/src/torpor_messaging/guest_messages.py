"""Messages that carry bytes beside a JSON object: the object on one line, and after a newline the bytes."""

from typing import Final, NamedTuple, TypeVar

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.guest import PIECE_BYTES_MAX
from torpor_contracts.replies import Refusal, Reply

HEAD_BYTES_MAX: Final = 600 * 1024
"""The largest JSON object; a page of directory entries is the largest there is."""

Answer = TypeVar("Answer", bound=msgspec.Struct)


class Parts(NamedTuple):
    """A message taken apart."""

    head: bytes
    body: bytes


def encode(head: msgspec.Struct, body: bytes = b"") -> bytes:
    """The message of an object and the bytes that go with it."""
    encoded = msgspec.json.encode(head)
    return encoded + b"\n" + body if body else encoded


def split(data: bytes) -> Parts:
    """The object and the bytes of a message; `Rejected("payload-too-large")` when there is too much of either."""
    head, _, body = data.partition(b"\n")
    if len(head) > HEAD_BYTES_MAX or len(body) > PIECE_BYTES_MAX:
        raise Rejected(
            "payload-too-large",
            f"{len(head)} bytes of JSON and {len(body)} others are too much for one message",
            f"send at most {PIECE_BYTES_MAX} bytes at a time",
        )
    return Parts(head, body)


def refused(refusal: Refusal) -> bytes:
    """The answer that refuses."""
    return msgspec.json.encode(Reply(refusal=refusal))


def decode_answer(data: bytes, kind: type[Answer]) -> tuple[Answer | Refusal, bytes]:
    """What was answered, or the refusal, and the bytes; raises `msgspec.MsgspecError` for what is neither."""
    head, body = split(data)
    if head.startswith(b'{"refusal"'):
        refusal = msgspec.json.decode(head, type=Reply).refusal
        if refusal is not None:
            return refusal, b""
    return msgspec.json.decode(head, type=kind), body
