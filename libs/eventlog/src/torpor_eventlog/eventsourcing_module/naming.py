"""How the library's names stand in the log: an originator is a stream, its topic a tag, its state the data.

The log counts versions from 1. An originator whose first version is 0 stands in a stream with the suffix `~0`, where
every version is one higher; `~` is in no id of Torpor's, and refused in others.
"""

from typing import Final, Literal
from uuid import UUID

from eventsourcing.persistence import DataError

ZERO: Final = "~0"

OriginatorIdType = Literal["uuid", "text"]

_UUID_LENGTH: Final = 36


def text_of(originator_id: UUID | str) -> str:
    """The stream of an originator that counts from 1."""
    text = str(originator_id)
    if "~" in text:
        raise DataError(f"originator id {text!r}: `~` cannot be part of one")
    return text


def originator_of(stream: str, kind: OriginatorIdType) -> UUID | str:
    """The originator a stream stands for. With `uuid`, text that is no UUID stays text: Torpor's own ids are none."""
    text = stream.removesuffix(ZERO)
    if kind == "uuid" and len(text) == _UUID_LENGTH:
        try:
            originator = UUID(text)
        except ValueError:
            return text
        return originator if str(originator) == text else text
    return text


def offset_of(stream: str) -> int:
    """What the stream's versions are higher by than the originator's."""
    return 1 if stream.endswith(ZERO) else 0
