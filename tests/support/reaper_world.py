"""The reaper over a log in memory, and hosts that say what they have: for its specifications."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from tests.support.fakes import Outside
from tests.support.histories import Machine, append, at, fold_into, stream_of, written
from torpor_contracts.cleanup import CleanupEvent
from torpor_contracts.host import HostHeartbeat, VmObservation
from torpor_contracts.ids import HostId, VmId
from torpor_eventlog.codec import decode_event
from torpor_eventlog.memory import MemoryLog
from torpor_messaging.ports import OutgoingCommand
from torpor_reaper.assembly import build
from torpor_reaper.settings import ReaperSettings

FIRST = Machine()
SETTINGS = ReaperSettings(
    grace_s=30, notice_s=5, attempts_max=3, backoff_s=10, backoff_s_max=60, deadline_s=300, silent_after_s=30
)
RUNS = (("s-1", FIRST.asked_for(0)), FIRST.claimed(1), FIRST.started(2))


class World:
    """The reaper with a log, and hosts that say what they have."""

    def __init__(self, log: MemoryLog) -> None:
        self.outside = Outside(log)
        self.service = build(SETTINGS, self.outside.ports())
        self._reacted = 0

    async def beat(
        self, second: float, *vms: VmId, host: str = "host-a", boot: str = "boot-1", observed: float | None = None
    ) -> None:
        """A heartbeat arrives; then views and reactors catch up with the log."""
        await self.catch_up()
        self.outside.clock.time = at(second)
        heartbeat = HostHeartbeat(
            host_id=HostId(host),
            boot_id=boot,
            observed_at=at(second if observed is None else observed),
            vms=[VmObservation(vm_id=vm_id, session_id=None, incarnation=None, state="unknown") for vm_id in vms],
        )
        await self.hear(f"obs.system.vm-host.heartbeat.{host}", msgspec.json.encode(heartbeat))
        await self.catch_up()

    async def hear(self, subject: str, data: bytes) -> None:
        (route,) = self.service.observations
        await route.handle(subject, data)

    async def catch_up(self) -> None:
        for projection in self.service.projections:
            await fold_into(self.outside.views, projection, self.outside.log)
        for recorded in await self.outside.log.read(self._reacted, limit=10_000):
            event = decode_event(recorded)
            for reactor in self.service.reactors:
                if isinstance(event, reactor.reacts_to):
                    await reactor.react(event, recorded)
            self._reacted = recorded.position

    async def happened(self, event: msgspec.Struct, stream: str | None = None) -> None:
        await append(self.outside.log, event, stream or stream_of(event))

    async def steps(self, vm_id: VmId = FIRST.vm_id) -> list[CleanupEvent]:
        return [decode_event(recorded) for recorded in await self.outside.log.load(f"cleanup-{vm_id}")]

    @property
    def sent(self) -> list[OutgoingCommand]:
        return self.outside.bus.sent

    def commands(self) -> list[type]:
        return [type(command.command) for command in self.sent]


def given(*events: msgspec.Struct | tuple[str, msgspec.Struct]) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Run a check in a world whose log holds these events."""

    def run(check: Callable[[World], Awaitable[None]]) -> None:
        async def main() -> None:
            await check(World(await written(*events)))

        asyncio.run(main())

    return run


def kinds(steps: list[CleanupEvent]) -> list[type]:
    return [type(step) for step in steps]
