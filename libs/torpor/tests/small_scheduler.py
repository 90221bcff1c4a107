"""A scheduler in one page, on a real nats-server: just enough to talk to the SDK."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.support.nats import NatsServer
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_eventlog.port import Recorded
from torpor_messaging.envelope import encode_event
from torpor_messaging.nats_link import Link


class SmallScheduler:
    """Takes commands and answers them as a test says; appends to EVENTS and OUTPUT what a test wants there."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.client: Client = link.client
        self.positions = 0
        self.versions: dict[str, int] = {}
        self.commands: list[Msg] = []
        self.replies: dict[str, Reply] = {}
        self.on_command: Callable[[Msg], Awaitable[Reply | None]] = self._nothing

    @classmethod
    async def connect(cls, server: NatsServer) -> "SmallScheduler":
        scheduler = cls(await server.link("admin"))
        await scheduler.client.subscribe("cmd.>", cb=scheduler._received)
        await scheduler.client.flush()
        return scheduler

    async def close(self) -> None:
        await self._link.close()

    async def _nothing(self, _message: Msg) -> Reply | None:
        return None

    async def _received(self, message: Msg) -> None:
        self.commands.append(message)
        assert message.headers is not None
        known = self.replies.get(message.headers["ce-id"])
        reply = known or await self.on_command(message)
        if reply is not None:
            self.replies[message.headers["ce-id"]] = reply
            await self.client.publish(message.headers["Torpor-Reply"], msgspec.json.encode(reply))

    async def event(self, stream: str, event: msgspec.Struct) -> Receipt:
        """Append one event, and answer with the receipt it would have."""
        self.positions += 1
        version = self.versions[stream] = self.versions.get(stream, 0) + 1
        recorded = Recorded(
            position=self.positions,
            stream=stream,
            version=version,
            tag=str(event.__struct_config__.tag),
            data=msgspec.json.encode(event),
            occurred_at_us=int(datetime.now(UTC).timestamp() * 1e6),
            command_id="default/cmd-1",
            causation_id="default/cmd-1",
            correlation_id="default/cmd-1",
            tenant_id="default",
            digest=bytes(32),
        )
        message = encode_event(recorded)
        await self.client.jetstream().publish(message.subject, message.data, headers=message.headers)
        return Receipt(command_id="cmd-1", stream=stream, version=version, position=self.positions, digest="00" * 32)  # type: ignore[arg-type]

    async def output(self, session: str, program: str, offset: int, data: bytes, **headers: Any) -> None:
        """Publish a piece of a program's output."""
        given = {"Torpor-Offset": str(offset), "Torpor-Stream": "stdout"}
        given |= {f"Torpor-{name.replace('_', '-')}": str(value) for name, value in headers.items()}
        await self.client.jetstream().publish(f"out.default.{session}.{program}", data, headers=given)


def refusal(code: str) -> Reply:
    return Reply(refusal=Refusal(code=code, message="not so", advice="do otherwise"))
