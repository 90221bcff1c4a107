"""The `eventsourcing` library's own conformance tests, run over the log in SQLite."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from eventsourcing.persistence import AggregateRecorder, ApplicationRecorder, ProcessRecorder, TrackingRecorder
from eventsourcing.tests import persistence as conformance
from eventsourcing.utils import Environment

from tests.support.eventsourcing_log import ViewOfOnesOwn, environment_of
from torpor_eventlog.eventsourcing_module import Factory
from torpor_eventlog.eventsourcing_module.recorders import (
    LogAggregateRecorder,
    LogApplicationRecorder,
    LogProcessRecorder,
    LogTrackingRecorder,
)


class SqliteLog:
    """A fresh log for each test."""

    factory: Factory

    @pytest.fixture(autouse=True)
    def _log(self, tmp_path: Path) -> Iterator[None]:
        self.factory = Factory(environment_of(f"sqlite:///{tmp_path / 'log.db'}"))
        yield
        self.factory.close()


class TestAggregateSqlite(SqliteLog, conformance.AggregateRecorderTestCase):
    def create_recorder(self) -> AggregateRecorder:
        return self.factory.aggregate_recorder()


class TestSnapshotsSqlite(SqliteLog, conformance.AggregateRecorderTestCase):
    def create_recorder(self) -> AggregateRecorder:
        return self.factory.aggregate_recorder(purpose="snapshots")


class TestApplicationSqlite(SqliteLog, conformance.ApplicationRecorderTestCase[ApplicationRecorder]):
    def create_recorder(self) -> ApplicationRecorder:
        return self.factory.application_recorder()

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestTrackingSqlite(SqliteLog, conformance.TrackingRecorderTestCase):
    def create_recorder(self) -> TrackingRecorder:
        recorder: TrackingRecorder = self.factory.tracking_recorder()
        return recorder


class TestProcessSqlite(SqliteLog, conformance.ProcessRecorderTestCase):
    def create_recorder(self) -> ProcessRecorder:
        return self.factory.process_recorder()


class TestNonInterleavingSqlite(SqliteLog, conformance.NonInterleavingNotificationIDsBaseCase):
    def create_recorder(self) -> ApplicationRecorder:
        return self.factory.application_recorder()


class TestFactorySqlite(conformance.InfrastructureFactoryTestCase[Factory]):
    env: Environment

    @pytest.fixture(autouse=True)
    def _log(self, tmp_path: Path) -> None:
        # The library's own setUp makes the factory, and runs after this.
        self.env = environment_of(f"sqlite:///{tmp_path / 'log.db'}")

    def expected_factory_class(self) -> type[Factory]:
        return Factory

    def expected_aggregate_recorder_class(self) -> type[AggregateRecorder]:
        return LogAggregateRecorder

    def expected_application_recorder_class(self) -> type[ApplicationRecorder]:
        return LogApplicationRecorder

    def expected_tracking_recorder_class(self) -> type[TrackingRecorder]:
        return LogTrackingRecorder

    def tracking_recorder_subclass(self) -> type[TrackingRecorder]:
        return ViewOfOnesOwn

    def expected_process_recorder_class(self) -> type[ProcessRecorder]:
        return LogProcessRecorder
