"""What the conformance tests of the `eventsourcing` library need to run over a log of ours."""

from eventsourcing.utils import Environment

from torpor_eventlog import eventsourcing_module
from torpor_eventlog.eventsourcing_module.recorders import LogTrackingRecorder


class ViewOfOnesOwn(LogTrackingRecorder):
    """What a user of the library makes for a projection."""


def environment_of(dsn: str) -> Environment:
    """The environment of an application over the log that `dsn` names."""
    return Environment(env={"PERSISTENCE_MODULE": eventsourcing_module.__name__, "TORPOR_LOG_DSN": dsn})
