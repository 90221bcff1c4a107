"""Instants as whole microseconds since the Unix epoch, as rows of the log and of views hold them; exact both ways."""

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def to_us(instant: datetime) -> int:
    """Microseconds since the epoch. A time without a zone is a bug and raises `TypeError`."""
    return (instant - _EPOCH) // _MICROSECOND


def from_us(microseconds: int) -> datetime:
    """The instant, in UTC."""
    return _EPOCH + microseconds * _MICROSECOND
