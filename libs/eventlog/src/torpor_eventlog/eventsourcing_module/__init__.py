"""A persistence module for the `eventsourcing` library: its applications and projections over Torpor's log.

`PERSISTENCE_MODULE=torpor_eventlog.eventsourcing_module` and `TORPOR_LOG_DSN=sqlite:///…` or `postgresql://…`.
"""

from torpor_eventlog.eventsourcing_module.factory import Factory

__all__ = ["Factory"]
