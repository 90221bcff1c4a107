"""What the persistence module promises beyond the library's conformance tests: our log's rules, names and types."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID, uuid4

import pytest
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import (
    DataError,
    IntegrityError,
    Mapper,
    MapperDeserialisationError,
    OperationalError,
    ProgrammingError,
    StoredEvent,
    Tracking,
)
from eventsourcing.utils import Environment, TopicError

from torpor_contracts.host import HostDraining
from torpor_contracts.ids import HostId
from torpor_eventlog.audit.verify import Verified, verify
from torpor_eventlog.eventsourcing_module import Factory
from torpor_eventlog.eventsourcing_module.recorders import LogApplicationRecorder, LogProcessRecorder
from torpor_eventlog.sqlite import SqliteLog

Grow = Callable[..., Awaitable[None]]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
DRAIN = HostDraining(host_id=HostId("host-a"), reason="r", requested_at=NOON)


def variables(path: Path, **more: str) -> dict[str, str]:
    return {
        "PERSISTENCE_MODULE": "torpor_eventlog.eventsourcing_module",
        "TORPOR_LOG_DSN": f"sqlite:///{path / 'log.db'}",
        **more,
    }


@pytest.fixture
def factory(tmp_path: Path) -> Iterator[Factory]:
    factory = Factory(variables(tmp_path))
    yield factory
    factory.close()


@pytest.fixture
def recorder(factory: Factory) -> LogApplicationRecorder:
    recorder = factory.application_recorder()
    assert isinstance(recorder, LogApplicationRecorder)
    return recorder


def stored(originator: UUID | str, version: int, topic: str = "topic", state: bytes = b"{}") -> StoredEvent:
    return StoredEvent(originator, version, topic, state)


def on_log(path: Path, act: Callable[[SqliteLog], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        log = await SqliteLog.open(path / "log.db")
        try:
            return await act(log)
        finally:
            await log.close()

    return asyncio.run(run())


def test_what_it_records_is_chained_and_proved_like_everything_else(
    recorder: LogApplicationRecorder, tmp_path: Path, grow: Grow
) -> None:
    on_log(tmp_path, lambda log: grow(log, "host-a", DRAIN))
    assert recorder.insert_events([stored("a", 0), stored("b", 1), stored("a", 1)]) == [2, 3, 4]
    on_log(tmp_path, lambda log: grow(log, "host-a", DRAIN))
    verified: Verified = on_log(tmp_path, verify)
    assert verified.ok
    assert verified.rows == 5
    rows = on_log(tmp_path, lambda log: log.read(0, 10))
    assert [(row.stream, row.version, row.tenant_id) for row in rows[1:4]] == [
        ("a~0", 1, "default"),
        ("b", 1, "default"),
        ("a~0", 2, "default"),
    ]


def test_it_reads_what_services_wrote(recorder: LogApplicationRecorder, tmp_path: Path, grow: Grow) -> None:
    on_log(tmp_path, lambda log: grow(log, "host-a", DRAIN, DRAIN))
    assert [(each.originator_id, each.originator_version) for each in recorder.select_events("host-a")] == [
        ("host-a", 1),
        ("host-a", 2),
    ]
    (first, _) = recorder.select_notifications(None, 10)
    assert (first.id, first.originator_id, first.topic) == (1, "host-a", "host-draining.v1")


@pytest.mark.parametrize(("first", "then"), [(0, 2), (0, 0), (1, 3), (1, 1), (1, 0)])
def test_versions_have_no_gap_and_no_repetition(recorder: LogApplicationRecorder, first: int, then: int) -> None:
    recorder.insert_events([stored("a", first)])
    with pytest.raises(IntegrityError, match="the next one is"):
        recorder.insert_events([stored("a", then)])
    assert recorder.insert_events([stored("a", first + 1)]) == [2]
    assert [each.originator_version for each in recorder.select_events("a")] == [first, first + 1]


def test_an_originator_cannot_start_in_the_middle(recorder: LogApplicationRecorder) -> None:
    with pytest.raises(IntegrityError, match="the next one is 1"):
        recorder.insert_events([stored("a", 2)])


def test_bounds_of_versions_are_the_originators_own(recorder: LogApplicationRecorder) -> None:
    recorder.insert_events([stored("zero", version) for version in range(5)])
    recorder.insert_events([stored("one", version) for version in range(1, 6)])
    for originator, versions in (("zero", [2, 3]), ("one", [2, 3])):
        assert [each.originator_version for each in recorder.select_events(originator, gt=1, lte=3)] == versions
    assert [each.originator_version for each in recorder.select_events("zero", desc=True, limit=2)] == [4, 3]


def test_uuids_come_back_as_uuids_and_other_text_as_text(factory: Factory, tmp_path: Path) -> None:
    identity = uuid4()
    recorder = factory.application_recorder()
    recorder.insert_events([stored(identity, 1), stored("session-1", 1), stored(str(uuid4()).upper(), 0)])
    kinds = [type(each.originator_id) for each in recorder.select_notifications(None, 10)]
    assert kinds == [UUID, str, str]
    assert recorder.select_events(identity)[0].originator_id == identity
    text = Factory(variables(tmp_path, ORIGINATOR_ID_TYPE="text"))
    assert text.application_recorder().select_notifications(None, 1)[0].originator_id == str(identity)
    text.close()


@pytest.mark.parametrize(
    "event_",
    [stored("a~0", 1), stored("a" * 256, 1), stored("a", 1, "t" * 256), stored("a", 1, "t", bytes(900_001))],
)
def test_what_the_log_cannot_hold_is_a_data_error(recorder: LogApplicationRecorder, event_: StoredEvent) -> None:
    with pytest.raises(DataError):
        recorder.insert_events([event_])
    assert recorder.max_notification_id() is None


def test_events_and_tracking_are_recorded_together_or_not_at_all(factory: Factory) -> None:
    recorder = factory.process_recorder()
    assert isinstance(recorder, LogProcessRecorder)
    recorder.insert_events([stored("a", 1)], tracking=Tracking("up", 5))
    with pytest.raises(IntegrityError, match="up to 5 or further"):
        recorder.insert_events([stored("a", 2)], tracking=Tracking("up", 5))
    with pytest.raises(IntegrityError):
        recorder.insert_events([stored("a", 1)], tracking=Tracking("up", 6))
    assert recorder.max_notification_id() == 1
    assert recorder.max_tracking_id("up") == 5


def test_a_subscription_sees_what_another_process_records(recorder: LogApplicationRecorder, tmp_path: Path) -> None:
    script = (
        "import sys; from eventsourcing.persistence import StoredEvent\n"
        "from torpor_eventlog.eventsourcing_module import Factory\n"
        "f = Factory({'TORPOR_LOG_DSN': sys.argv[1]})\n"
        "f.application_recorder().insert_events([StoredEvent('a', 1, 'topic', b'{}')]); f.close()"
    )
    with recorder.subscribe(gt=None) as subscription:
        dsn = variables(tmp_path)["TORPOR_LOG_DSN"]
        subprocess.run([sys.executable, "-c", script, dsn], check=True, timeout=60)
        assert next(subscription).originator_id == "a"


def test_a_subscription_that_waits_can_be_stopped(recorder: LogApplicationRecorder) -> None:
    with recorder.subscribe(gt=None) as subscription:
        stopping = Thread(target=subscription.stop)
        stopping.start()
        assert list(subscription) == []
        stopping.join()


def test_a_filtered_subscription_does_not_look_at_the_same_rows_twice(recorder: LogApplicationRecorder) -> None:
    recorder.insert_events([stored("a", version, "dull") for version in range(1, 800)])
    recorder.insert_events([stored("a", version, "wanted") for version in range(800, 1400)])
    asked: list[int | None] = []
    select = recorder.select_notifications

    def counting(start: int | None, limit: int, stop: int | None = None, **more: Any) -> Any:
        asked.append(start)
        return select(start, limit, stop, **more)

    recorder.select_notifications = counting  # type: ignore[method-assign, assignment]
    with recorder.subscribe(gt=None, topics=["wanted"]) as subscription:
        seen = [next(subscription).id for _ in range(600)]
    assert seen == list(range(800, 1400))
    assert asked == [0, 1299]


def test_a_published_event_is_mapped_to_its_type_with_its_originator(
    factory: Factory, recorder: LogApplicationRecorder, tmp_path: Path, grow: Grow
) -> None:
    on_log(tmp_path, lambda log: grow(log, "host-a", DRAIN))
    mapper: Mapper[UUID] = factory.mapper(factory.transcoder())
    (notification,) = recorder.select_notifications(None, 10)
    mapped: Any = mapper.to_domain_event(notification)
    assert issubclass(type(mapped), HostDraining)
    assert (mapped.reason, mapped.requested_at) == ("r", NOON)
    assert (mapped.originator_id, mapped.originator_version) == ("host-a", 1)
    again = mapper.to_stored_event(mapped)
    assert (again.topic, again.originator_id, again.originator_version) == ("host-draining.v1", "host-a", 1)
    assert mapper.to_domain_event(again) == mapped


def test_an_event_nobody_knows_is_not_passed_over(factory: Factory) -> None:
    mapper: Mapper[UUID] = factory.mapper(factory.transcoder())
    with pytest.raises(TopicError):
        mapper.to_domain_event(stored("a", 1, "host-painted.v9"))
    with pytest.raises(MapperDeserialisationError):
        mapper.to_domain_event(stored("a", 1, "host-draining.v1", b'{"type":"host-draining.v1"}'))


class Dog(Aggregate):
    @event("Registered")
    def __init__(self, name: str) -> None:
        self.name = name
        self.tricks: list[str] = []

    @event("TrickAdded")
    def add_trick(self, trick: str) -> None:
        self.tricks.append(trick)


class Kennel(Application[UUID]):
    snapshotting_intervals = {Dog: 3}  # noqa: RUF012  (as the library has it)


def test_an_ordinary_application_with_snapshots_runs_on_the_log(tmp_path: Path) -> None:
    kennel = Kennel(env=variables(tmp_path, IS_SNAPSHOTTING_ENABLED="y"))
    dog = Dog("Fido")
    kennel.save(dog)
    for trick in ("sit", "roll", "beg", "wait"):
        dog = kennel.repository.get(dog.id)
        dog.add_trick(trick)
        kennel.save(dog)
    assert kennel.repository.get(dog.id).tricks == ["sit", "roll", "beg", "wait"]
    assert kennel.snapshots is not None
    assert [snapshot.originator_version for snapshot in kennel.snapshots.get(dog.id)] == [3]
    kennel.close()
    verified: Verified = on_log(tmp_path, verify)
    assert verified.ok
    assert verified.rows == 5, "snapshots are no events"


def test_settings_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="TORPOR_LOG_DSN"):
        Factory({})
    with pytest.raises(OSError, match="must be uuid or text"):
        Factory(variables(tmp_path, ORIGINATOR_ID_TYPE="number"))
    with pytest.raises(DataError, match="sqlite:///"):
        Factory({"TORPOR_LOG_DSN": "mysql://somewhere"})
    with pytest.raises(DataError, match="does not exist"):
        Factory({"TORPOR_LOG_DSN": f"sqlite:///{tmp_path}/nowhere/log.db"})
    factory = Factory(Environment("Kennel", variables(tmp_path, KENNEL_PROCESS_RECORDER_TOPIC="uuid:UUID")))
    with pytest.raises(OSError, match="is no LogProcessRecorder"):
        factory.process_recorder()
    factory.close()


def test_a_closed_or_locked_log_says_so(recorder: LogApplicationRecorder, factory: Factory, tmp_path: Path) -> None:
    with factory.datastore.reading():
        factory.close()
    with pytest.raises(ProgrammingError, match="closed"):
        recorder.max_notification_id()
    (tmp_path / "log.db").unlink()
    other = Factory(variables(tmp_path))
    (tmp_path / "log.db").unlink()
    with pytest.raises(OperationalError, match="cannot be opened"):
        other.application_recorder().max_notification_id()
    other.close()
