"""A small service under the real edge, for tests that start and kill it: `python -m tests.support.edge_service`.

It takes the scheduler's commands. The reason of a `terminate-session` says what is to go wrong with it.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from torpor_contracts.errors import InvariantViolation, Poison, Rejected, Transient
from torpor_contracts.host import HostDraining
from torpor_contracts.ids import HostId, TenantId
from torpor_contracts.replies import Receipt
from torpor_contracts.session import TerminateSession
from torpor_eventlog.deciding import Decisions
from torpor_eventlog.port import Recorded
from torpor_eventlog.views_port import Table, WritableRows
from torpor_messaging.edge import run_service
from torpor_messaging.service import (
    BackgroundRoute,
    CommandRoute,
    Incoming,
    ObservationRoute,
    QueryRoute,
    ReactorRoute,
    Service,
    TimerRoute,
)
from torpor_messaging.service_ports import ServicePorts


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """How many events a stream has, and what was said in them."""

    stream: str
    count: int
    reasons: list[str]


SEEN = Table(name="seen", row=Seen, key="stream")


class SeenView:
    name = "seen"
    tables = (SEEN,)

    async def fold(self, rows: WritableRows, event: Any, recorded: Recorded) -> None:
        row = await rows.get(SEEN, recorded.stream) or Seen(stream=recorded.stream, count=0, reasons=[])
        await rows.put(
            SEEN, Seen(stream=row.stream, count=row.count + 1, reasons=[*row.reasons, getattr(event, "reason", "")])
        )


class TestService:
    __test__ = False

    def __init__(self, ports: ServicePorts) -> None:
        self.ports = ports
        self.decisions: Decisions[int] = Decisions(
            ports.log, initial=lambda: 0, evolve=lambda count, _: count + 1, now=ports.clock.now
        )
        self.heard: list[str] = []
        self.beats = 0

    async def handle(self, incoming: Incoming) -> Receipt | None:
        reason = incoming.command.reason if isinstance(incoming.command, TerminateSession) else ""
        what, _, argument = reason.partition(" ")
        match what:
            case "refuse":
                raise Rejected("wrong-state", "it is asleep", "wake it")
            case "die":
                raise InvariantViolation("two live machines")
            case "exit":
                os._exit(9)
            case "poison":
                raise Poison("nobody can read this")
            case "slow":
                self.heard.append("slow")
                await asyncio.sleep(float(argument))
            case "flaky" if not self.heard:
                self.heard.append("flaky")
                raise Transient("not yet", retry_after_s=0.05)
            case "set-timer":
                await self.ports.timers.set(
                    incoming.tenant_id, "scheduler", "idle", incoming.target, self.ports.clock.now(), argument.encode()
                )
            case "ignore":
                return None
            case _:
                pass
        return await self.record(incoming, reason)

    async def record(self, incoming: Incoming, reason: str) -> Receipt | None:
        event = HostDraining(host_id=HostId(incoming.target), reason=reason, requested_at=self.ports.clock.now())
        return await self.decisions.execute(incoming, incoming.target, lambda _: [event])

    async def fire(self, _tenant: TenantId, kind: str, target: str, data: bytes) -> None:
        self.heard.append(f"timer {kind} {target} {data.decode()}")

    async def observe(self, subject: str, data: bytes) -> None:
        self.heard.append(f"{subject} {data.decode()}")
        if data == b"bug":
            raise KeyError("bug")

    async def seen(self, _tenant: TenantId, target: str, parameters: Mapping[str, Any]) -> Seen:
        if parameters.get("bug"):
            raise KeyError("bug")
        if parameters.get("wait"):
            raise Transient("not yet", retry_after_s=0.5)
        async with self.ports.views.reading() as rows:
            row: Seen | None = await rows.get(SEEN, target)
        if row is None:
            raise Rejected("not-found", f"there is no {target}", "look for another")
        return row

    async def state(self, _tenant: TenantId, _target: str, _parameters: Mapping[str, Any]) -> Seen:
        return Seen(stream="", count=self.beats, reasons=list(self.heard))

    async def react(self, event: Any, recorded: Recorded) -> None:
        self.heard.append(f"reaction {recorded.stream} {recorded.version} {event.reason}")

    async def beat(self) -> None:
        self.beats += 1
        if self.beats == 2:
            raise KeyError("bug")

    def service(self) -> Service:
        deliveries_max = int(os.environ.get("TEST_DELIVERIES_MAX", "20"))
        return Service(
            name="scheduler",
            commands=[
                CommandRoute("scheduler", "scheduler", self.handle, ack_wait_s=1.0, deliveries_max=deliveries_max)
            ],
            timers=[TimerRoute("scheduler", "scheduler-timers", self.fire)],
            observations=[ObservationRoute("obs.system.vm-host.heartbeat.*", self.observe)],
            queries=[QueryRoute("scheduler", "seen", self.seen), QueryRoute("scheduler", "state", self.state)],
            projections=[SeenView()],
            reactors=[ReactorRoute("test-reactor", (HostDraining,), self.react)],
            background=[BackgroundRoute("beat", every_s=0.05, run=self.beat)],
        )


if __name__ == "__main__":
    sys.exit(run_service("scheduler", lambda ports: TestService(ports).service()))
