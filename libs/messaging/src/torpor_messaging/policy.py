"""The one mapping from what a handler raised to what becomes of its message: who must act decides.

| raised | who must act | the message |
|---|---|---|
| nothing | - | reply with the receipt, ack |
| `Rejected` | the caller | ack, and once that is confirmed reply with the refusal |
| `Transient`, `VersionConflict` | time | again in place, then nak with a delay; after the last delivery `dead`, term |
| `Poison` | an operator | `dead`, then term |
| `InvariantViolation` | us | the process dies and it is delivered again; at last `dead`, term |
| anything else | us | nak with a delay; at last `dead`, term; the process lives on |

A message is never acknowledged before its handler returned, and never terminated before `dead` has stored it.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from torpor_contracts.errors import InvariantViolation, Poison, Rejected, TorporError, Transient, VersionConflict
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_messaging import subjects
from torpor_messaging.envelope import REPLY, decode_command, id_as_sent, percent_encode, trace_parent
from torpor_messaging.ports import Bus, Clock, Delivery, Ids
from torpor_messaging.service import Incoming

IN_PLACE_MAX: Final = 5
"""Tries within one delivery: they keep the order of a target's commands, which a redelivery does not."""

IN_PLACE_PAUSE_S_MAX: Final = 2.0
NAK_DELAY_S_MAX: Final = 30.0

BUGS_MAX: Final = 5
"""Deliveries of a message that meets a bug of ours; every one may cost a process, so there are fewer of them."""

trace: ContextVar[str | None] = ContextVar("trace", default=None)
"""The trace parent of the message being handled; a bus hands it on."""

_log: Final = logging.getLogger(__name__)


class Outcome(StrEnum):
    """What became of a delivery."""

    DONE = "done"
    IGNORED = "ignored"
    REFUSED = "refused"
    PUT_OFF = "put-off"
    BURIED = "buried"
    DIED = "died"


@dataclass(frozen=True)
class Limits:
    """A consumer's name, and how often it is given a message.

    The server must allow one delivery more than `deliveries_max`: in it, a message that killed every process that
    touched it is buried.
    """

    durable: str
    deliveries_max: int = 20


class ConsumerPolicy:
    """Carries out the mapping for one consumer; the edge and the simulation both use it.

    `die` is told of an `InvariantViolation` and must end the process without acknowledging anything.
    """

    def __init__(
        self, limits: Limits, *, bus: Bus, clock: Clock, ids: Ids, die: Callable[[InvariantViolation], None]
    ) -> None:
        self._limits = limits
        self._bus = bus
        self._clock = clock
        self._ids = ids
        self._die = die

    async def process(self, delivery: Delivery, handle: Callable[[Incoming], Awaitable[Receipt | None]]) -> Outcome:
        """Decode a command, hand it to `handle`, reply, and end the delivery."""
        reply_to = delivery.headers.get(REPLY)

        async def decode_and_handle() -> Reply | None:
            incoming = decode_command(delivery)
            if reply_to is not None:
                subjects.check_reply(incoming.tenant_id, reply_to)
            receipt = await handle(incoming)
            return None if receipt is None else Reply(receipt=_as_sent(incoming.tenant_id, receipt))

        return await self._run(delivery, decode_and_handle, _safe_reply(delivery, reply_to))

    async def process_plain(self, delivery: Delivery, handle: Callable[[], Awaitable[None]]) -> Outcome:
        """The same for a message that is no command (a due timer) and is never replied to."""

        async def handle_it() -> None:
            await handle()

        return await self._run(delivery, handle_it, None)

    async def _run(
        self, delivery: Delivery, handle: Callable[[], Awaitable[Reply | None]], reply_to: str | None
    ) -> Outcome:
        token = trace.set(trace_parent(delivery.headers))
        try:
            if delivery.attempt > self._limits.deliveries_max:
                return await self._bury(delivery, reply_to, "given up", "no delivery of it was ever ended")
            return await self._attempt(delivery, handle, reply_to)
        finally:
            trace.reset(token)

    async def _attempt(
        self, delivery: Delivery, handle: Callable[[], Awaitable[Reply | None]], reply_to: str | None
    ) -> Outcome:
        for tried in range(1, IN_PLACE_MAX + 1):
            try:
                reply = await handle()
            except Rejected as refused:
                return await self._refuse(delivery, reply_to, refused)
            except (Transient, VersionConflict) as error:
                if tried == IN_PLACE_MAX:
                    return await self._put_off(delivery, reply_to, error)
                if tried == 1 and isinstance(error, Transient):
                    # Whoever waits for an answer finds the reason in our log; the delivery may go on for long.
                    _log.warning("trying %s again: %s", delivery.subject, error)
                await delivery.in_progress()
                await self._clock.sleep(self._pause_s(error, tried))
            except Poison as error:
                return await self._bury(delivery, reply_to, "poison", str(error))
            except InvariantViolation as error:
                return await self._end_of_process(delivery, reply_to, error)
            except Exception as error:  # noqa: BLE001  (a bug of ours must neither lose the message nor stop the service)
                return await self._bug(delivery, reply_to, error)
            else:
                return await self._done(delivery, reply_to, reply)
        raise AssertionError("unreachable: the last try returns")

    async def _done(self, delivery: Delivery, reply_to: str | None, reply: Reply | None) -> Outcome:
        if reply is not None:
            await self._reply(reply_to, reply)
            await delivery.ack()
            return Outcome.DONE
        ignored = Refusal(code="ignored", message="there is nothing to record", advice="go on")
        await self._turn_down(delivery, reply_to, ignored)
        return Outcome.IGNORED

    async def _refuse(self, delivery: Delivery, reply_to: str | None, refused: Rejected) -> Outcome:
        _log.info("refused %s: %s", delivery.subject, refused)
        await self._turn_down(
            delivery, reply_to, Refusal(code=refused.code, message=refused.message, advice=refused.advice)
        )
        return Outcome.REFUSED

    async def _turn_down(self, delivery: Delivery, reply_to: str | None, refusal: Refusal) -> None:
        """Tell a refusal once the server has forgotten the command.

        A refusal is not in the log: were its acknowledgement lost, the command would come again, and might then happen
        although its sender was told that it had not.
        """
        if reply_to is None:
            await delivery.ack()
            return
        await delivery.ack_confirmed()
        await self._reply(reply_to, Reply(refusal=refusal))

    async def _put_off(self, delivery: Delivery, reply_to: str | None, error: Transient | VersionConflict) -> Outcome:
        if delivery.attempt >= self._limits.deliveries_max:
            return await self._bury(delivery, reply_to, "unavailable", str(error))
        return await self._nak(delivery, str(error), least_s=getattr(error, "retry_after_s", 0.0))

    async def _end_of_process(self, delivery: Delivery, reply_to: str | None, error: InvariantViolation) -> Outcome:
        _log.critical("invariant violated by %s: %s", delivery.subject, error, exc_info=error)
        if delivery.attempt >= min(BUGS_MAX, self._limits.deliveries_max):
            await self._bury(delivery, reply_to, "invariant-violation", str(error))
        self._die(error)
        return Outcome.DIED

    async def _bug(self, delivery: Delivery, reply_to: str | None, error: Exception) -> Outcome:
        _log.error("a bug was met by %s: %s", delivery.subject, error, exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        if delivery.attempt >= min(BUGS_MAX, self._limits.deliveries_max):
            return await self._bury(delivery, reply_to, "internal-error", reason)
        return await self._nak(delivery, reason)

    async def _nak(self, delivery: Delivery, reason: str, least_s: float = 0.0) -> Outcome:
        grown_s = 2.0 ** min(delivery.attempt - 1, 10) * (0.5 + self._ids.random())
        delay_s = min(max(least_s, grown_s), NAK_DELAY_S_MAX)
        _log.warning("put off %s for %.1f s, delivery %d: %s", delivery.subject, delay_s, delivery.attempt, reason)
        await delivery.nak(delay_s)
        return Outcome.PUT_OFF

    async def _bury(self, delivery: Delivery, reply_to: str | None, code: str, reason: str) -> Outcome:
        _log.error("buried %s after %d deliveries: %s: %s", delivery.subject, delivery.attempt, code, reason)
        grave = subjects.dead(self._limits.durable)
        try:
            await self._bus.publish_stored(grave, delivery.data, dead_headers(delivery, code, reason))
        except Transient as error:
            return await self._nak(delivery, f"it cannot be buried: {error}")
        advice = f"it is kept as {grave} for the operator; send it again with the same id once that is settled"
        await delivery.term(code)
        await self._reply(reply_to, Reply(refusal=Refusal(code=code, message=reason, advice=advice)))
        return Outcome.BURIED

    async def _reply(self, reply_to: str | None, reply: Reply) -> None:
        """Best effort: who got none repeats the command with the same id, and is answered the same."""
        if reply_to is None:
            return
        try:
            await self._bus.publish(reply_to, msgspec.json.encode(reply))
        except TorporError as error:
            _log.warning("no reply was sent to %s: %s", reply_to, error)

    def _pause_s(self, error: Transient | VersionConflict, tried: int) -> float:
        asked_s = error.retry_after_s if isinstance(error, Transient) else 0.0
        grown_s = max(asked_s, 0.05) * 2.0 ** (tried - 1)
        return min(grown_s, IN_PLACE_PAUSE_S_MAX) * (0.5 + self._ids.random() / 2)


def dead_headers(delivery: Delivery, code: str, reason: str) -> Mapping[str, str]:
    """The headers of a dead letter: the message's own, where it came from, and why it could not be handled."""
    headers = {name: value for name, value in delivery.headers.items() if not name.startswith("Nats-")}
    return headers | {
        "Torpor-Dead-Code": percent_encode(code),
        "Torpor-Dead-Reason": percent_encode(reason[:500]),
        "Torpor-Dead-Subject": percent_encode(delivery.subject),
        "Torpor-Dead-Sequence": str(delivery.sequence),
        "Torpor-Dead-Deliveries": str(delivery.attempt),
    }


def _as_sent(tenant_id: str, receipt: Receipt) -> Receipt:
    return msgspec.structs.replace(receipt, command_id=id_as_sent(tenant_id, receipt.command_id))


def _safe_reply(delivery: Delivery, reply_to: str | None) -> str | None:
    """Where a refusal may be sent: nowhere when the reply subject itself, or the tenant, is the illegal part.

    The tenant of any subject, also of an illegal one, is its sender's: the server lets nobody publish under another.
    """
    if reply_to is None:
        return None
    try:
        subjects.check_reply(subjects.sender_of_command(delivery.subject), reply_to)
    except Rejected:
        return None
    return reply_to
