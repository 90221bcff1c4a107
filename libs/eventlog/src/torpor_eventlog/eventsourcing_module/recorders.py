"""The library's recorders over the log: appended by the log's own rules, so with the log's one order and its proofs."""

import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final
from uuid import UUID, uuid4

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    IntegrityError,
    Notification,
    ProcessRecorder,
    StoredEvent,
    Subscription,
    Tracking,
    TrackingRecorder,
)

from torpor_contracts.errors import TorporError
from torpor_contracts.ids import CommandId, TenantId
from torpor_eventlog.eventsourcing_module.datastore import Datastore, Transaction, as_persistence_errors
from torpor_eventlog.eventsourcing_module.naming import ZERO, OriginatorIdType, offset_of, originator_of, text_of
from torpor_eventlog.eventsourcing_module.subscription import LogSubscription
from torpor_eventlog.planning import prepare
from torpor_eventlog.port import Commit, NewEvent

DEFAULT_TENANT: Final = "default"


class LogRecorder:
    """What all recorders have: a database, and how originators are named."""

    def __init__(
        self,
        datastore: Datastore,
        *,
        originator_id_type: OriginatorIdType = "uuid",
        tenant_id: str = DEFAULT_TENANT,
    ) -> None:
        self.datastore = datastore
        self.originator_id_type: OriginatorIdType = originator_id_type
        self.tenant_id = TenantId(tenant_id)

    def create_table(self) -> None:
        """Make the tables that are not the log's own."""
        statements = self.construct_create_table_statements()
        if statements:
            with as_persistence_errors():
                self.datastore.create(statements)

    def construct_create_table_statements(self) -> list[str]:
        """What makes the recorder's own tables; a subclass adds those of its view."""
        return []


class LogAggregateRecorder(LogRecorder, AggregateRecorder):
    """Appends events to the log and reads them by originator.

    An originator's versions have no gaps, here as anywhere in the log: an event that would leave one is a conflict.
    """

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Append the events, all or none; raises `IntegrityError` when one is not the next of its originator."""
        with as_persistence_errors(), self.datastore.writing() as transaction:
            self._insert_events(transaction, stored_events, **kwargs)
        return None

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """The originator's events in order of version, or from the last one back."""
        name = text_of(originator_id)
        with as_persistence_errors(), self.datastore.reading() as transaction:
            stream = name if _version(transaction, self.datastore, name) else name + ZERO
            offset = offset_of(stream)
            sql, bounds = _by_version(
                self.datastore,
                f"SELECT version, tag, data FROM {self.datastore.events}",  # noqa: S608
                stream,
                gt=None if gt is None else gt + offset,
                lte=None if lte is None else lte + offset,
                desc=desc,
                limit=limit,
            )
            found = transaction.fetch(sql, *bounds)
        return [StoredEvent(originator_id, version - offset, tag, bytes(data)) for version, tag, data in found]

    def _insert_events(
        self, transaction: Transaction, stored_events: Sequence[StoredEvent], **_: Any
    ) -> Sequence[int] | None:
        if not stored_events:
            return None
        expected, events = self._placed(transaction, stored_events)
        command_id = f"eventsourcing-{uuid4().hex}"
        commit = Commit(
            command_id=CommandId(command_id),
            tenant_id=self.tenant_id,
            causation_id=command_id,
            correlation_id=command_id,
            request_digest=sha256(command_id.encode()).digest(),
            occurred_at_us=time.time_ns() // 1000,
            expected=expected,
            events=events,
        )
        planned = transaction.place([prepare(commit)])
        (outcome,) = planned.outcomes
        if isinstance(outcome, TorporError):
            raise outcome
        return [row[0] for row in planned.rows]

    def _placed(
        self, transaction: Transaction, stored_events: Sequence[StoredEvent]
    ) -> tuple[dict[str, int], list[NewEvent]]:
        """The rows of stored events, and what their streams must be before: both forms, so that never both exist."""
        expected: dict[str, int] = {}
        following: dict[str, tuple[str, int]] = {}
        events: list[NewEvent] = []
        for stored in stored_events:
            name = text_of(stored.originator_id)
            if name not in following:
                for form in (name, name + ZERO):
                    expected[form] = _version(transaction, self.datastore, form)
                from_zero = expected[name + ZERO] or (stored.originator_version == 0 and not expected[name])
                stream = name + ZERO if from_zero else name
                following[name] = stream, expected[stream] + 1 - offset_of(stream)
            stream, version = following[name]
            if stored.originator_version != version:
                raise IntegrityError(
                    f"version {stored.originator_version} of {name} cannot be recorded: the next one is {version}"
                )
            following[name] = stream, version + 1
            events.append(NewEvent(stream=stream, tag=stored.topic, data=stored.state))
        return expected, events


class LogApplicationRecorder(LogAggregateRecorder, ApplicationRecorder):
    """Reads the whole log in its order; a notification's id is its position."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """As `LogAggregateRecorder.insert_events`; answers the positions."""
        with as_persistence_errors(), self.datastore.writing() as transaction:
            return self._insert_events(transaction, stored_events, **kwargs)

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        """At most `limit` notifications from `start` to `stop`, of these topics if any are given."""
        bounds: list[Any] = []
        terms: list[str] = []
        for bound, term in ((start, f"position {'>=' if inclusive_of_start else '>'} {{}}"), (stop, "position <= {}")):
            if bound is not None:
                bounds.append(bound)
                terms.append(term)
        if topics:
            bounds.extend(topics)
            terms.append(f"tag IN ({', '.join('{}' for _ in topics)})")
        where = f"WHERE {' AND '.join(terms)}" if terms else ""
        sql = (
            f"SELECT position, stream, version, tag, data FROM {self.datastore.events} {where} "  # noqa: S608
            "ORDER BY position LIMIT {}"
        ).format(*self.datastore.marks(len(bounds) + 1))
        with as_persistence_errors(), self.datastore.reading() as transaction:
            found = transaction.fetch(sql, *bounds, limit)
        return [
            Notification(
                id=position,
                originator_id=originator_of(stream, self.originator_id_type),
                originator_version=version - offset_of(stream),
                topic=tag,
                state=bytes(data),
            )
            for position, stream, version, tag, data in found
        ]

    def max_notification_id(self) -> int | None:
        """The log's last position, None when it is empty."""
        with as_persistence_errors(), self.datastore.reading() as transaction:
            ((position,),) = transaction.fetch(f"SELECT max(position) FROM {self.datastore.events}")  # noqa: S608
        return None if position is None else int(position)

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        """Notifications above `gt`, for ever."""
        return LogSubscription(self, self.datastore.arrived, gt=gt, topics=topics)


class LogSnapshotRecorder(LogRecorder, AggregateRecorder):
    """Keeps snapshots beside the log, not in it: they are folded state, which the log gives again."""

    @property
    def table(self) -> str:
        """The snapshots' table."""
        return self.datastore.own("snapshots")

    def construct_create_table_statements(self) -> list[str]:
        """The snapshots' table."""
        table = (
            f"CREATE TABLE IF NOT EXISTS {self.table} (stream TEXT NOT NULL, version BIGINT NOT NULL, "
            f"topic TEXT NOT NULL, state {self.datastore.bytes_type} NOT NULL, PRIMARY KEY (stream, version))"
        )
        return [*super().construct_create_table_statements(), table]

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Keep snapshots; `IntegrityError` for one that is there already."""
        del kwargs
        marks = ", ".join(self.datastore.marks(4))
        with as_persistence_errors(), self.datastore.writing() as transaction:
            for stored in stored_events:
                row = (text_of(stored.originator_id), stored.originator_version, stored.topic, stored.state)
                transaction.fetch(f"INSERT INTO {self.table} VALUES ({marks})", *row)  # noqa: S608
        return None

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """The originator's snapshots."""
        sql, bounds = _by_version(
            self.datastore,
            f"SELECT version, topic, state FROM {self.table}",  # noqa: S608
            text_of(originator_id),
            gt=gt,
            lte=lte,
            desc=desc,
            limit=limit,
        )
        with as_persistence_errors(), self.datastore.reading() as transaction:
            found = transaction.fetch(sql, *bounds)
        return [StoredEvent(originator_id, version, topic, bytes(state)) for version, topic, state in found]


class LogTrackingRecorder(LogRecorder, TrackingRecorder):
    """Keeps how far something has read, beside the log. A view of one's own is a subclass with tables of its own."""

    @property
    def tracking_table(self) -> str:
        """The table of positions."""
        return self.datastore.own("tracking")

    def construct_create_table_statements(self) -> list[str]:
        """The table of positions."""
        columns = "(application_name TEXT PRIMARY KEY, notification_id BIGINT NOT NULL)"
        table = f"CREATE TABLE IF NOT EXISTS {self.tracking_table} {columns}"
        return [*super().construct_create_table_statements(), table]

    def insert_tracking(self, tracking: Tracking) -> None:
        """Move on; `IntegrityError` when it is not ahead of what is kept."""
        with as_persistence_errors(), self.datastore.writing() as transaction:
            self._insert_tracking(transaction, tracking)

    def max_tracking_id(self, application_name: str) -> int | None:
        """How far the application's notifications were processed."""
        (mark,) = self.datastore.marks(1)
        sql = f"SELECT notification_id FROM {self.tracking_table} WHERE application_name = {mark}"  # noqa: S608
        with as_persistence_errors(), self.datastore.reading() as transaction:
            found = transaction.fetch(sql, application_name)
        return int(found[0][0]) if found else None

    def _insert_tracking(self, transaction: Transaction, tracking: Tracking) -> None:
        """To be called in the transaction that changes the view."""
        table = self.tracking_table
        sql = (
            f"INSERT INTO {table} VALUES ({', '.join(self.datastore.marks(2))}) "  # noqa: S608
            "ON CONFLICT (application_name) DO UPDATE SET notification_id = excluded.notification_id "
            f"WHERE {table.rpartition('.')[2]}.notification_id < excluded.notification_id RETURNING notification_id"
        )
        if not transaction.fetch(sql, tracking.application_name, tracking.notification_id):
            raise IntegrityError(
                f"{tracking.application_name} was processed up to {tracking.notification_id} or further already"
            )


class LogProcessRecorder(LogTrackingRecorder, LogApplicationRecorder, ProcessRecorder):
    """Appends events and moves on in one transaction."""

    def _insert_events(
        self, transaction: Transaction, stored_events: Sequence[StoredEvent], **kwargs: Any
    ) -> Sequence[int] | None:
        tracking: Tracking | None = kwargs.pop("tracking", None)
        positions = super()._insert_events(transaction, stored_events, **kwargs)
        if tracking is not None:
            self._insert_tracking(transaction, tracking)
        return positions


def _version(transaction: Transaction, datastore: Datastore, stream: str) -> int:
    (mark,) = datastore.marks(1)
    sql = f"SELECT max(version) FROM {datastore.events} WHERE stream = {mark}"  # noqa: S608  (names and placeholders)
    ((version,),) = transaction.fetch(sql, stream)
    return version or 0


def _by_version(
    datastore: Datastore,
    select: str,
    stream: str,
    *,
    gt: int | None,
    lte: int | None,
    desc: bool,
    limit: int | None,
) -> tuple[str, list[Any]]:
    """A statement over one stream's versions, with its parameters."""
    bounds: list[Any] = [stream]
    terms = ["stream = {}"]
    for bound, term in ((gt, "version > {}"), (lte, "version <= {}")):
        if bound is not None:
            bounds.append(bound)
            terms.append(term)
    ending = f"ORDER BY version {'DESC' if desc else 'ASC'}"
    if limit is not None:
        bounds.append(limit)
        ending += " LIMIT {}"
    return f"{select} WHERE {' AND '.join(terms)} {ending}".format(*datastore.marks(len(bounds))), bounds
