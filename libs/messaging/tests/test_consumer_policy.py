from collections.abc import Callable
from typing import Any

import pytest

from torpor_contracts.errors import InvariantViolation, Poison, Rejected, Transient, VersionConflict
from torpor_contracts.ids import CommandId
from torpor_contracts.replies import Receipt
from torpor_messaging.policy import BUGS_MAX, IN_PLACE_MAX, NAK_DELAY_S_MAX, ConsumerPolicy, Limits, Outcome, trace
from torpor_messaging.service import Incoming

pytestmark = pytest.mark.anyio

INBOX = "_INBOX.default.a"
RECEIPT = Receipt(command_id=CommandId("default/c-1"), stream="ses-1", version=2, position=9, digest="00")


class QuickClock:
    """A clock whose sleeps take no time and are remembered."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def now(self) -> Any:
        raise AssertionError("the policy does not ask for the time of day")

    def monotonic_s(self) -> float:
        return sum(self.slept_s)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


class Steady:
    def new(self, prefix: str) -> str:
        return f"{prefix}-1"

    def random(self) -> float:
        return 0.5


class Handler:
    """Raises or returns what it is told to, one after the other; the last for ever."""

    def __init__(self, *results: Receipt | Exception | None) -> None:
        self._results = list(results)
        self.seen: list[Incoming] = []

    async def __call__(self, incoming: Incoming) -> Receipt | None:
        self.seen.append(incoming)
        result = self._results.pop(0) if len(self._results) > 1 else self._results[0]
        if isinstance(result, Exception):
            raise result
        return result


class Bench:
    def __init__(self, bus: Any, deliveries_max: int = 20) -> None:
        self.bus = bus
        self.clock = QuickClock()
        self.deaths: list[InvariantViolation] = []
        self.policy = ConsumerPolicy(
            Limits("scheduler-commands", deliveries_max),
            bus=bus,
            clock=self.clock,
            ids=Steady(),
            die=self.deaths.append,
        )


@pytest.fixture
def bench(bus: Any) -> Bench:
    return Bench(bus)


async def test_a_receipt_is_replied_then_the_command_acknowledged(bench: Bench, delivered: Callable[..., Any]) -> None:
    delivery = delivered(headers={"ce-id": "c-1", "Torpor-Reply": INBOX})
    assert await bench.policy.process(delivery, Handler(RECEIPT)) is Outcome.DONE
    assert delivery.end == "ack"
    assert bench.bus.reply(INBOX).receipt == Receipt(
        command_id=CommandId("c-1"), stream="ses-1", version=2, position=9, digest="00"
    )


async def test_nothing_is_acknowledged_before_the_handler_returned(bench: Bench, delivered: Callable[..., Any]) -> None:
    delivery = delivered()
    ends_while_handling: list[str | None] = []

    async def handle(_: Incoming) -> Receipt | None:
        ends_while_handling.append(delivery.end)
        return RECEIPT

    await bench.policy.process(delivery, handle)
    assert ends_while_handling == [None]
    assert delivery.end == "ack"


async def test_an_ignored_report_is_acknowledged_and_the_asker_told(
    bench: Bench, delivered: Callable[..., Any]
) -> None:
    quiet, asking = delivered(), delivered(headers={"Torpor-Reply": INBOX})
    assert await bench.policy.process(quiet, Handler(None)) is Outcome.IGNORED
    assert await bench.policy.process(asking, Handler(None)) is Outcome.IGNORED
    assert (quiet.end, asking.end) == ("ack", "ack-confirmed")
    assert bench.bus.reply(INBOX).refusal.code == "ignored"


async def test_a_refusal_is_replied_and_acknowledged(bench: Bench, delivered: Callable[..., Any]) -> None:
    delivery = delivered(headers={"Torpor-Reply": INBOX})
    outcome = await bench.policy.process(delivery, Handler(Rejected("wrong-state", "it sleeps", "wake it")))
    assert outcome is Outcome.REFUSED
    assert delivery.end == "ack-confirmed"
    refusal = bench.bus.reply(INBOX).refusal
    assert (refusal.code, refusal.message, refusal.advice) == ("wrong-state", "it sleeps", "wake it")


async def test_nobody_is_told_of_a_refusal_whose_command_may_come_again(
    bench: Bench, delivered: Callable[..., Any]
) -> None:
    delivery = delivered(headers={"Torpor-Reply": INBOX}, away=True)
    with pytest.raises(Transient):
        await bench.policy.process(delivery, Handler(Rejected("wrong-state", "it sleeps", "wake it")))
    assert not bench.bus.published


@pytest.mark.parametrize(
    ("data", "subject", "code"),
    [
        (b"{", "cmd.default.scheduler.suspend-session.ses-1", "malformed-command"),
        (b'{"x":1}', "cmd.default.scheduler.suspend-session.ses-1", "malformed-command"),
        (b"x" * 300_000, "cmd.default.scheduler.suspend-session.ses-1", "payload-too-large"),
        (b"", "cmd.default.scheduler.fly-session.ses-1", "unknown-command"),
    ],
)
async def test_bad_input_never_reaches_the_handler(
    data: bytes, subject: str, code: str, bench: Bench, delivered: Callable[..., Any]
) -> None:
    handler, delivery = Handler(RECEIPT), delivered(subject, {"Torpor-Reply": INBOX}, data)
    assert await bench.policy.process(delivery, handler) is Outcome.REFUSED
    assert not handler.seen
    assert delivery.end == "ack-confirmed"
    assert bench.bus.reply(INBOX).refusal.code == code


@pytest.mark.parametrize("target", ["SES_X", "a" * 64, "ses-1.ses-2.ses-3", "ségur", "-"])
async def test_whoever_names_an_illegal_target_is_told_so(
    bench: Bench, delivered: Callable[..., Any], target: str
) -> None:
    delivery = delivered(subject=f"cmd.default.scheduler.suspend-session.{target}", headers={"Torpor-Reply": INBOX})
    assert await bench.policy.process(delivery, Handler(RECEIPT)) is Outcome.REFUSED
    refusal = bench.bus.reply(INBOX).refusal
    assert refusal.code == "illegal-subject"
    assert "a-z" in refusal.advice


async def test_nothing_is_ever_published_to_an_illegal_reply_subject(
    bench: Bench, delivered: Callable[..., Any]
) -> None:
    handler = Handler(RECEIPT)
    for reply in ("_INBOX.other.a", "cmd.other.scheduler.terminate-session.ses-2", "$JS.API.STREAM.DELETE.EVENTS"):
        delivery = delivered(headers={"Torpor-Reply": reply})
        assert await bench.policy.process(delivery, handler) is Outcome.REFUSED
        assert delivery.end == "ack"
    assert not handler.seen
    assert not bench.bus.published


@pytest.mark.parametrize("error", [Transient("the log is locked", retry_after_s=0.1), VersionConflict("ses-1", 1, 2)])
async def test_what_time_heals_is_tried_again_in_place(
    error: Exception, bench: Bench, delivered: Callable[..., Any]
) -> None:
    delivery, handler = delivered(), Handler(error, error, RECEIPT)
    assert await bench.policy.process(delivery, handler) is Outcome.DONE
    assert len(handler.seen) == 3
    assert delivery.kept_alive == 2
    assert delivery.end == "ack"
    first_s, second_s = bench.clock.slept_s
    assert 0 < first_s < second_s


async def test_then_it_is_put_off_with_a_growing_delay(bench: Bench, delivered: Callable[..., Any]) -> None:
    delays_s = []
    for attempt in (1, 2, 3, 19):
        delivery, handler = delivered(attempt=attempt), Handler(Transient("away"))
        assert await bench.policy.process(delivery, handler) is Outcome.PUT_OFF
        assert len(handler.seen) == IN_PLACE_MAX
        [(how, delay_s)] = delivery.ends
        assert how == "nak"
        delays_s.append(delay_s)
    assert delays_s == sorted(delays_s)
    assert delays_s[0] < delays_s[1]
    assert delays_s[-1] == NAK_DELAY_S_MAX


async def test_and_at_last_buried_and_the_asker_told(bench: Bench, delivered: Callable[..., Any]) -> None:
    headers = {"Torpor-Reply": INBOX, "ce-id": "c-1", "Nats-Msg-Id": "c-1"}
    delivery = delivered(headers=headers, data=b"{}", attempt=20)
    assert await bench.policy.process(delivery, Handler(Transient("away"))) is Outcome.BURIED
    assert delivery.end == "term"
    [(subject, data, kept)] = bench.bus.stored
    assert (subject, data) == ("dead.scheduler-commands", b"{}")
    assert kept["Torpor-Dead-Subject"] == delivery.subject
    assert kept["Torpor-Dead-Deliveries"] == "20"
    assert kept["ce-id"] == "c-1"
    assert "Nats-Msg-Id" not in kept, "the server would act on it"
    assert bench.bus.reply(INBOX).refusal.code == "unavailable"


async def test_poison_is_buried_before_it_is_terminated(bench: Bench, delivered: Callable[..., Any]) -> None:
    delivery = delivered()
    assert await bench.policy.process(delivery, Handler(Poison("no such tag"))) is Outcome.BURIED
    assert delivery.end == "term"
    assert len(bench.bus.stored) == 1


async def test_what_cannot_be_buried_is_not_terminated(bench: Bench, delivered: Callable[..., Any]) -> None:
    bench.bus.full = True
    delivery = delivered()
    assert await bench.policy.process(delivery, Handler(Poison("no such tag"))) is Outcome.PUT_OFF
    assert delivery.end == "nak"


async def test_a_violated_invariant_ends_the_process_and_nothing_else(
    bench: Bench, delivered: Callable[..., Any]
) -> None:
    delivery, error = delivered(), InvariantViolation("two live machines")
    assert await bench.policy.process(delivery, Handler(error)) is Outcome.DIED
    assert bench.deaths == [error]
    assert delivery.end is None, "it must be delivered again"
    assert not bench.bus.stored


async def test_but_not_for_ever(bench: Bench, delivered: Callable[..., Any]) -> None:
    delivery = delivered(attempt=BUGS_MAX)
    await bench.policy.process(delivery, Handler(InvariantViolation("two live machines")))
    assert delivery.end == "term"
    assert len(bench.bus.stored) == len(bench.deaths) == 1


async def test_any_other_error_is_a_bug_that_stops_no_service(bench: Bench, delivered: Callable[..., Any]) -> None:
    for attempt in range(1, BUGS_MAX):
        delivery = delivered(attempt=attempt)
        assert await bench.policy.process(delivery, Handler(KeyError("x"))) is Outcome.PUT_OFF
        assert delivery.end == "nak"
    last = delivered(attempt=BUGS_MAX, headers={"Torpor-Reply": INBOX})
    assert await bench.policy.process(last, Handler(KeyError("x"))) is Outcome.BURIED
    assert last.end == "term"
    assert bench.bus.reply(INBOX).refusal.code == "internal-error"
    assert not bench.deaths


async def test_a_message_that_killed_every_process_is_buried_unhandled(bus: Any, delivered: Callable[..., Any]) -> None:
    bench, handler = Bench(bus, deliveries_max=3), Handler(RECEIPT)
    delivery = delivered(attempt=4)
    assert await bench.policy.process(delivery, handler) is Outcome.BURIED
    assert not handler.seen
    assert delivery.end == "term"


async def test_a_lost_reply_loses_no_command(bench: Bench, delivered: Callable[..., Any]) -> None:
    bench.bus.mute = True
    delivery = delivered(headers={"Torpor-Reply": INBOX})
    assert await bench.policy.process(delivery, Handler(RECEIPT)) is Outcome.DONE
    assert delivery.end == "ack"


async def test_timers_go_the_same_ways(bench: Bench, delivered: Callable[..., Any]) -> None:
    async def bad() -> None:
        raise Poison("no such kind")

    async def good() -> None:
        pass

    sound, broken = delivered("timer.due.default.scheduler.idle.ses-1"), delivered("timer.due.a.b.c.d")
    assert await bench.policy.process_plain(sound, good) is Outcome.IGNORED
    assert await bench.policy.process_plain(broken, bad) is Outcome.BURIED
    assert (sound.end, broken.end) == ("ack", "term")


async def test_the_trace_is_known_while_handling(bench: Bench, delivered: Callable[..., Any]) -> None:
    legal = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    seen = []

    async def handle(_: Incoming) -> Receipt | None:
        seen.append(trace.get())
        return RECEIPT

    await bench.policy.process(delivered(headers={"traceparent": legal}), handle)
    await bench.policy.process(delivered(), handle)
    assert seen == [legal, None]
