import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from torpor_simulation.broker import Broker, Refused, StoredMessage, StreamSpec
from torpor_simulation.consumer import Consumer, ConsumerSpec, Member
from torpor_simulation.loop import VirtualLoop
from torpor_simulation.network import UNNOTICED_S, Network, NetworkFaults
from torpor_simulation.subjects import matches, split

STREAMS = (
    StreamSpec("COMMANDS", ("cmd.>",), work_queue=True),
    StreamSpec("EVENTS", ("evt.>",)),
    StreamSpec("TIMERS", ("timer.>",)),
    StreamSpec("ADVICE", ("$JS.EVENT.ADVISORY.CONSUMER.>",)),
)


class Taker:
    """Takes messages and remembers them; acknowledges those that `acks` says."""

    def __init__(self, consumer: Consumer, machine: str = "here", acks: Callable[[int], bool] = lambda _: True) -> None:
        self.got: list[tuple[str, int]] = []
        self._consumer = consumer
        self._acks = acks
        self.leave = consumer.join(Member(machine, self._receive))

    def _receive(self, message: StoredMessage, attempt: int) -> None:
        self.got.append((message.subject, attempt))
        if self._acks(attempt):
            self._consumer.ack(message.sequence)


def in_world(test: Callable[[Broker], Coroutine[Any, Any, None]], seed: int = 1, **faults: float) -> None:
    async def main() -> None:
        await test(Broker(Network(seed, NetworkFaults(**faults)), STREAMS))

    loop = VirtualLoop(seed)
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def commands(broker: Broker, **spec: Any) -> Consumer:
    return broker.consumer("COMMANDS", ConsumerSpec(durable="c", filters=("cmd.*.s.>",), **spec))


@pytest.mark.parametrize(
    ("pattern", "subject", "matched"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.b.>", "x.b.c", True),
        ("a", "b", False),
    ],
)
def test_subject_patterns(pattern: str, subject: str, matched: bool) -> None:
    assert matches(split(pattern), split(subject)) is matched


def test_an_acknowledged_command_leaves_the_work_queue() -> None:
    async def main(broker: Broker) -> None:
        taker = Taker(commands(broker))
        broker.publish("cmd.t.s.x.1", {}, b"")
        broker.publish("cmd.t.other.x.1", {}, b"")
        await asyncio.sleep(60)
        assert taker.got == [("cmd.t.s.x.1", 1)]
        assert [message.subject for message in broker.streams["COMMANDS"].messages.values()] == ["cmd.t.other.x.1"]

    in_world(main)


def test_silence_brings_it_again_until_its_attempts_are_used_up_and_advised() -> None:
    async def main(broker: Broker) -> None:
        taker = Taker(commands(broker, ack_wait_s=5, deliveries_max=3), acks=lambda _: False)
        broker.publish("cmd.t.s.x.1", {}, b"")
        await asyncio.sleep(60)
        assert [attempt for _, attempt in taker.got] == [1, 2, 3]
        (advice,) = broker.streams["ADVICE"].messages.values()
        assert advice.subject == "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.COMMANDS.c"
        assert b'"stream_seq": 1' in advice.data
        assert list(broker.streams["COMMANDS"].messages) == [1]

    in_world(main)


def test_nak_waits_progress_puts_off_and_term_ends_it() -> None:
    async def main(broker: Broker) -> None:
        consumer = commands(broker, ack_wait_s=5)
        taker = Taker(consumer, acks=lambda _: False)
        broker.publish("cmd.t.s.x.1", {}, b"")
        await asyncio.sleep(4)
        consumer.progress(1)
        await asyncio.sleep(4)
        assert len(taker.got) == 1
        consumer.nak(1, 30)
        await asyncio.sleep(29)
        assert len(taker.got) == 1
        await asyncio.sleep(2)
        assert taker.got[-1] == ("cmd.t.s.x.1", 2)
        consumer.term(1, "enough")
        await asyncio.sleep(60)
        assert len(taker.got) == 2
        assert broker.streams["COMMANDS"].messages == {}

    in_world(main)


def test_one_subject_keeps_its_order_and_different_ones_overtake() -> None:
    async def main(broker: Broker) -> None:
        taker = Taker(commands(broker))
        for number in range(40):
            broker.publish(f"cmd.t.s.x.{number % 4}", {}, b"")
            broker.publish(f"cmd.t.s.y{number}.{number % 4}", {}, b"")
        await asyncio.sleep(10)
        numbered = [subject for subject, _ in taker.got if ".y" in subject]
        sent = [f"cmd.t.s.y{number}.{number % 4}" for number in range(40)]
        assert numbered != sent
        for target in range(4):
            assert [s for s in numbered if s.endswith(f".{target}")] == [s for s in sent if s.endswith(f".{target}")]

    in_world(main)


def test_unacknowledged_messages_are_bounded() -> None:
    async def main(broker: Broker) -> None:
        consumer = commands(broker, ack_pending_max=2)
        taker = Taker(consumer, acks=lambda _: False)
        for number in range(5):
            broker.publish(f"cmd.t.s.x.{number}", {}, b"")
        await asyncio.sleep(1)
        assert len(taker.got) == 2
        consumer.ack(1)
        await asyncio.sleep(1)
        assert len(taker.got) == 3

    in_world(main)


def test_who_is_gone_or_cut_off_gets_nothing_and_another_takes_over() -> None:
    async def main(broker: Broker) -> None:
        consumer = commands(broker, ack_wait_s=5)
        first = Taker(consumer, "first", acks=lambda _: False)
        second = Taker(consumer, "second")
        broker.network.take_down("second")
        await asyncio.sleep(UNNOTICED_S)
        broker.publish("cmd.t.s.x.1", {}, b"")
        await asyncio.sleep(1)
        first.leave()
        await asyncio.sleep(10)
        assert (len(first.got), len(second.got)) == (1, 0)
        broker.network.bring_back("second")
        await asyncio.sleep(1)
        assert second.got == [("cmd.t.s.x.1", 2)]

    in_world(main)


def test_what_is_sent_to_a_lost_connection_comes_again_after_the_wait() -> None:
    async def main(broker: Broker) -> None:
        consumer = commands(broker, ack_wait_s=5)
        taker = Taker(consumer, "far away")
        broker.network.take_down("far away")
        broker.publish("cmd.t.s.x.1", {}, b"")
        await asyncio.sleep(1)
        broker.network.bring_back("far away")
        await asyncio.sleep(10)
        assert taker.got == [("cmd.t.s.x.1", 2)]

    in_world(main)


def test_the_network_can_deliver_twice() -> None:
    async def main(broker: Broker) -> None:
        taker = Taker(commands(broker))
        broker.publish("cmd.t.s.x.1", {}, b"")
        await asyncio.sleep(1)
        assert taker.got == [("cmd.t.s.x.1", 1)] * 2

    in_world(main, duplicated=1.0)


def test_a_message_id_is_stored_once_within_the_window() -> None:
    async def main(broker: Broker) -> None:
        headers = {"Nats-Msg-Id": "m"}
        assert broker.publish("cmd.t.s.x.1", headers, b"") == 1
        assert broker.publish("cmd.t.s.x.1", headers, b"") == 1
        await asyncio.sleep(121)
        assert broker.publish("cmd.t.s.x.1", headers, b"") == 2

    in_world(main)


def test_a_fenced_sequence_refuses_whoever_is_behind() -> None:
    async def main(broker: Broker) -> None:
        assert broker.publish("evt.t.a.1", {"Nats-Expected-Last-Sequence": "0"}, b"") == 1
        with pytest.raises(Refused) as refused:
            broker.publish("evt.t.a.1", {"Nats-Expected-Last-Sequence": "0"}, b"")
        assert refused.value.code == 10071
        assert broker.publish("evt.t.a.1", {"Nats-Expected-Last-Sequence": "1"}, b"") == 2

    in_world(main)


def test_a_schedule_fires_once_never_early_and_is_replaced_by_its_subject() -> None:
    async def main(broker: Broker) -> None:
        consumer = broker.consumer("TIMERS", ConsumerSpec(durable="t", filters=("timer.due.>",)))
        taker = Taker(consumer)
        for second in ("10", "20"):
            headers = {"Nats-Schedule": f"@at 2030-01-01T00:00:{second}Z", "Nats-Schedule-Target": "timer.due.x"}
            broker.publish("timer.set.x", headers, b"")
        await asyncio.sleep(19.9)
        assert taker.got == []
        await asyncio.sleep(60)
        assert taker.got == [("timer.due.x", 1)]

    in_world(main)


def test_core_messages_reach_only_who_listens_now() -> None:
    async def main(broker: Broker) -> None:
        heard: list[str] = []
        broker.publish("obs.a", {}, b"")
        end = broker.listen("obs.*", lambda subject, _headers, _data: heard.append(subject))
        broker.publish("obs.b", {}, b"")
        end()
        broker.publish("obs.c", {}, b"")
        assert heard == ["obs.b"]

    in_world(main)
