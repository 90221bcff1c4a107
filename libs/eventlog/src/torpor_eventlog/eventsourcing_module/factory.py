"""The factory that `eventsourcing` finds by PERSISTENCE_MODULE; configured by the environment, as that library is."""

from typing import Any, Final, cast
from urllib.parse import urlsplit

from eventsourcing.domain import TAggregateID
from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    InfrastructureFactory,
    Mapper,
    ProcessRecorder,
    Transcoder,
)
from eventsourcing.utils import Environment, EnvType, resolve_topic, strtobool

from torpor_contracts.errors import TorporError
from torpor_eventlog.eventsourcing_module.datastore import Datastore, meaning_of
from torpor_eventlog.eventsourcing_module.mapper import EventMapper
from torpor_eventlog.eventsourcing_module.naming import OriginatorIdType
from torpor_eventlog.eventsourcing_module.recorders import (
    DEFAULT_TENANT,
    LogAggregateRecorder,
    LogApplicationRecorder,
    LogProcessRecorder,
    LogRecorder,
    LogSnapshotRecorder,
    LogTrackingRecorder,
)
from torpor_eventlog.opening import sqlite_path

LOG_DSN: Final = "TORPOR_LOG_DSN"
TENANT: Final = "TORPOR_TENANT"
ORIGINATOR_ID_TYPE: Final = "ORIGINATOR_ID_TYPE"
CREATE_TABLE: Final = "CREATE_TABLE"


class Factory(InfrastructureFactory[LogTrackingRecorder]):
    """Makes recorders over the log that TORPOR_LOG_DSN names.

    TORPOR_TENANT (default `default`) is whose the recorded events are. ORIGINATOR_ID_TYPE (`uuid`, the default, or
    `text`) and CREATE_TABLE mean what they mean to the library's own modules.
    """

    aggregate_recorder_class: type[LogAggregateRecorder] = LogAggregateRecorder
    application_recorder_class: type[LogApplicationRecorder] = LogApplicationRecorder
    tracking_recorder_class: type[LogTrackingRecorder] = LogTrackingRecorder
    process_recorder_class: type[LogProcessRecorder] = LogProcessRecorder

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        dsn = self.env.get(LOG_DSN)
        if not dsn:
            raise OSError(f"no log is named: set one of {', '.join(self.env.create_keys(LOG_DSN))}")
        kind = (self.env.get(ORIGINATOR_ID_TYPE) or "uuid").lower()
        if kind not in {"uuid", "text"}:
            raise OSError(f"{ORIGINATOR_ID_TYPE} is {kind!r}; it must be uuid or text")
        self._originator_id_type = cast("OriginatorIdType", kind)
        self.datastore = _opened(dsn)

    def mapper(
        self, transcoder: Transcoder | None = None, mapper_class: type[Mapper[TAggregateID]] | None = None
    ) -> Mapper[TAggregateID]:
        """The mapper: one that knows Torpor's events, unless another is asked for."""
        if mapper_class is None and not self.env.get(self.MAPPER_TOPIC):
            mapper_class = EventMapper
        return super().mapper(transcoder, mapper_class)

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        """A recorder of events, or of snapshots, which are kept beside the log."""
        if purpose == "events":
            recorder: AggregateRecorder = self._made(self.aggregate_recorder_class)
            return recorder
        if purpose == "snapshots":
            snapshots: AggregateRecorder = self._made(LogSnapshotRecorder)
            return snapshots
        raise ValueError(f"nothing is known of recorders for {purpose!r}")

    def application_recorder(self) -> ApplicationRecorder:
        """A recorder of a whole application; APPLICATION_RECORDER_TOPIC may name a subclass."""
        kind = self._named(self.APPLICATION_RECORDER_TOPIC, self.application_recorder_class)
        recorder: ApplicationRecorder = self._made(kind)
        return recorder

    def tracking_recorder(self, tracking_recorder_class: type[Any] | None = None) -> Any:
        """A recorder of positions, or of a view with them: TRACKING_RECORDER_TOPIC may name a subclass."""
        return self._made(
            tracking_recorder_class or self._named(self.TRACKING_RECORDER_TOPIC, self.tracking_recorder_class)
        )

    def process_recorder(self) -> ProcessRecorder:
        """A recorder of events and positions together; PROCESS_RECORDER_TOPIC may name a subclass."""
        recorder: ProcessRecorder = self._made(self._named(self.PROCESS_RECORDER_TOPIC, self.process_recorder_class))
        return recorder

    def close(self) -> None:
        """Let go of the database."""
        self.datastore.close()

    def _named(self, variable: str, otherwise: type[Any]) -> type[Any]:
        topic = self.env.get(variable)
        if not topic:
            return otherwise
        named: Any = resolve_topic(topic)
        if not (isinstance(named, type) and issubclass(named, otherwise)):
            raise OSError(f"{variable} names {topic}, which is no {otherwise.__name__}")
        return named

    def _made(self, kind: type[Any]) -> Any:
        if not issubclass(kind, LogRecorder):
            raise TypeError(f"{kind.__name__} is no recorder of this module: subclass one of them")
        recorder = kind(
            self.datastore,
            originator_id_type=self._originator_id_type,
            tenant_id=self.env.get(TENANT) or DEFAULT_TENANT,
        )
        if strtobool(self.env.get(CREATE_TABLE) or "yes"):
            recorder.create_table()
        return recorder


def _opened(dsn: str) -> Datastore:
    if urlsplit(dsn).scheme in {"postgresql", "postgres"}:
        from torpor_eventlog.eventsourcing_module.postgres_datastore import (  # noqa: PLC0415  (only where it is used)
            PostgresDatastore,
        )

        return PostgresDatastore(dsn)
    from torpor_eventlog.eventsourcing_module.sqlite_datastore import SqliteDatastore  # noqa: PLC0415

    try:
        path = sqlite_path(dsn)
    except TorporError as error:
        raise meaning_of(error) from error
    return SqliteDatastore(path)
