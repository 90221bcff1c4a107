"""What the recorders need of a database with a log in it: transactions in the calling thread, and word of new rows."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Condition
from typing import Any, Final, Protocol

from eventsourcing.persistence import (
    DataError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    PersistenceError,
    ProgrammingError,
)

from torpor_contracts.errors import InvariantViolation, Rejected, Transient, VersionConflict
from torpor_eventlog.planning import Plan, Prepared


class Transaction(Protocol):
    """One open transaction."""

    def fetch(self, sql: str, *parameters: Any) -> Sequence[Sequence[Any]]:
        """The rows a statement answers; parameters stand where `Datastore.marks` says."""
        ...

    def place(self, batch: Sequence[Prepared]) -> Plan:
        """Place commits in the log, as every writer of the log does."""
        ...


class Datastore(Protocol):
    """A database with a log in it. Used from any number of threads."""

    events: str
    """The name of the log's table of events."""
    bytes_type: str
    """The column type of bytes."""
    arrived: "Arrivals"

    def marks(self, count: int) -> list[str]:
        """Placeholders for the first `count` parameters of a statement."""
        ...

    def own(self, table: str) -> str:
        """The name of a table that is ours, beside the log."""
        ...

    def create(self, statements: Sequence[str]) -> None:
        """Run statements that make tables of ours, if they are not there."""
        ...

    def reading(self) -> AbstractContextManager[Transaction]:
        """A transaction that only reads."""
        ...

    def writing(self) -> AbstractContextManager[Transaction]:
        """A transaction that writes: committed on a clean exit, else rolled back."""
        ...

    def close(self) -> None:
        """Let go of the database."""
        ...


class Arrivals:
    """Wakes subscriptions of this process when it has recorded something; other processes are noticed by polling."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._ticks = 0

    def ticks(self) -> int:
        """How often something arrived, or a subscription was stopped."""
        return self._ticks

    def notify(self) -> None:
        """Wake everybody who waits."""
        with self._condition:
            self._ticks += 1
            self._condition.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until `ticks` is not `seen`, at most `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._ticks != seen, timeout_s)


_MEANINGS: Final[tuple[tuple[type[Exception], type[PersistenceError]], ...]] = (
    (VersionConflict, IntegrityError),
    (Rejected, DataError),
    (Transient, OperationalError),
    (InvariantViolation, ProgrammingError),
)


@contextmanager
def as_persistence_errors() -> Iterator[None]:
    """Turn our errors into those that `eventsourcing` and its users expect."""
    try:
        yield
    except (VersionConflict, Rejected, Transient, InvariantViolation) as error:
        raise meaning_of(error) from error


def meaning_of(error: Exception) -> PersistenceError:
    """The library's error for one of ours."""
    for ours, theirs in _MEANINGS:
        if isinstance(error, ours):
            return theirs(str(error))
    return InterfaceError(str(error))
