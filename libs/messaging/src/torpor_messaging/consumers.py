"""Durable consumers: made as they must be, found again when they changed, and made anew when the server lost them.

They push to an inbox that only its service can listen to and nobody can guess, shared by the service's replicas as a
queue group. The server hands out at most `ack_pending_max` messages that nobody has ended; that bounds every queue.
"""

import logging
from dataclasses import dataclass
from typing import Any, Final

from torpor_contracts.errors import Rejected, Transient
from torpor_messaging.nats_errors import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND
from torpor_messaging.nats_link import Link

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class DurableSpec:
    """A durable consumer of `stream` for the messages on `subject`."""

    stream: str
    durable: str
    subject: str
    ack_wait_s: float
    deliveries_max: int
    ack_pending_max: int

    def config(self, deliver_subject: str) -> dict[str, Any]:
        """The configuration as the JetStream API takes it."""
        return {
            "name": self.durable,
            "durable_name": self.durable,
            "deliver_subject": deliver_subject,
            "deliver_group": self.durable,
            "filter_subject": self.subject,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_s * 1e9),
            "max_deliver": self.deliveries_max,
            "max_ack_pending": self.ack_pending_max,
        }


async def ensure(link: Link, spec: DurableSpec) -> str:
    """Make the consumer, or bring it up to date; the inbox it delivers to.

    `Transient` when the stream is away, `Rejected("consumer-differs")` when one of that name is of another kind.
    """
    found = await _config(link, spec)
    deliver_subject = link.client.new_inbox() if found is None else found.get("deliver_subject")
    if not deliver_subject:
        raise Rejected(
            "consumer-differs",
            f"the consumer {spec.durable} of {spec.stream} is no push consumer",
            "delete it with an administrator's key (nats consumer rm); the service makes its own",
        )
    wanted = spec.config(deliver_subject)
    if found is not None and all(found.get(name) == value for name, value in wanted.items()):
        return str(deliver_subject)
    answer = await link.api(
        f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.subject}", {"stream_name": spec.stream, "config": wanted}
    )
    if "error" in answer:
        raise Transient(f"consumer {spec.durable}: {answer['error'].get('description')}", retry_after_s=1.0)
    _log.info("consumer %s of %s %s", spec.durable, spec.stream, "made" if found is None else "brought up to date")
    return str(answer["config"]["deliver_subject"])


async def delivers_to(link: Link, spec: DurableSpec) -> str | None:
    """The inbox that the consumer delivers to now; None when there is no such consumer."""
    found = await _config(link, spec)
    return None if found is None else str(found.get("deliver_subject"))


async def _config(link: Link, spec: DurableSpec) -> dict[str, Any] | None:
    answer = await link.api(f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
    if "error" not in answer:
        config: dict[str, Any] = answer["config"]
        return config
    if answer["error"].get("err_code") in {CONSUMER_NOT_FOUND, STREAM_NOT_FOUND}:
        return None
    raise Transient(f"consumer {spec.durable}: {answer['error'].get('description')}", retry_after_s=1.0)
