"""The stream EVENTS as audits need it; `torpor_messaging` has it on JetStream."""

from typing import Protocol

from torpor_eventlog.healing import Carried
from torpor_eventlog.relay import EventStream


class StoredStream(EventStream, Protocol):
    """The stream with what only an operator may do: read any message of it, and make it afresh."""

    async def read(self, after_sequence: int, limit: int) -> list[Carried]:
        """At most `limit` messages above `after_sequence`, in order; sequences are skipped where none is stored.

        An empty answer means that there is none. Raises `Transient` when the server cannot be asked now.
        """
        ...

    async def recreate(self) -> None:
        """Delete the stream and make it again, empty, its next sequence 1."""
        ...
