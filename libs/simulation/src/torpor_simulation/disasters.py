"""Carries out the disasters of a plan: outages, partitions, power failures, deaths, and hosts being drained."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final

from torpor_contracts.checkpoint import FreeCheckpoint
from torpor_contracts.host import DrainHost, UndrainHost
from torpor_contracts.ids import SessionId, TenantId, VmId
from torpor_contracts.session import MachineSpec
from torpor_simulation.hypervisor import Host
from torpor_simulation.network import BUS, LOG
from torpor_simulation.plan import Disaster, DisasterKind
from torpor_simulation.programs import Supervisor
from torpor_vm_host.adapters.simulated.machine import Machine

if TYPE_CHECKING:
    from torpor_simulation.world import World

STRANGER: Final = SessionId("s-nobody")
"""The session that a machine nobody asked for says it belongs to."""


class Disasters:
    """What befalls one world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._strangers = 0
        self._kinds: Mapping[DisasterKind, Callable[[Host, Disaster], Awaitable[None]]] = {
            "crash": self._crash,
            "bus-outage": self._bus_outage,
            "log-outage": self._log_outage,
            "partition": self._partition,
            "host-off": self._off,
            "host-gone": self._gone,
            "machine-dies": self._machine_dies,
            "machine-ruined": self._machine_ruined,
            "stranger": self._stranger,
            "schedules-lost": self._schedules_lost,
            "drain": self._drain,
            "tidying": self._tidy,
            "service-off": self._service_off,
            "stream-truncated": self._truncate,
            "stream-changed": self._change,
        }

    async def run(self) -> None:
        """All disasters of the plan, each at its time."""
        async with asyncio.TaskGroup() as all_of_them:
            for disaster in self._world.plan.disasters:
                all_of_them.create_task(self._befall(disaster))

    async def _befall(self, disaster: Disaster) -> None:
        await asyncio.sleep(disaster.at_s)
        if self._world.calmed:
            return
        host = self._host(disaster)
        self._world.trace.add("disaster", disaster.kind, host.host_id, f"{disaster.lasts_s:g} s")
        await self._kinds[disaster.kind](host, disaster)

    async def _crash(self, _host: Host, disaster: Disaster) -> None:
        supervisors = self._world.supervisors
        supervisors[int(disaster.which * len(supervisors))].crash()

    async def _service_off(self, _host: Host, disaster: Disaster) -> None:
        """One of the services is not started again for a while."""
        services = [one for one in self._world.supervisors if one.program.machine not in self._world.hosts]
        supervisor = services[int(disaster.which * len(services))]
        supervisor.hold()
        await asyncio.sleep(disaster.lasts_s)
        supervisor.release()

    async def _bus_outage(self, _host: Host, disaster: Disaster) -> None:
        await self._outage(BUS, disaster.lasts_s)

    async def _log_outage(self, _host: Host, disaster: Disaster) -> None:
        await self._outage(LOG, disaster.lasts_s)

    async def _partition(self, host: Host, disaster: Disaster) -> None:
        await self._outage(host.host_id, disaster.lasts_s)

    async def _truncate(self, _host: Host, disaster: Disaster) -> None:
        """The server restarts without the last messages it had acknowledged; readers connect again."""
        events = self._world.events
        events.truncate(int(len(events.rows) * disaster.which))

    async def _change(self, _host: Host, disaster: Disaster) -> None:
        """A message rots; not the last one, at which the relay would stop and ask for an operator."""
        events = self._world.events
        if len(events.rows) > 1:
            events.change(1 + int((len(events.rows) - 1) * disaster.which))

    async def _schedules_lost(self, _host: Host, _disaster: Disaster) -> None:
        self._world.broker.forget_schedules()

    async def _outage(self, what: str, lasts_s: float) -> None:
        self._world.network.take_down(what)
        await asyncio.sleep(lasts_s)
        if what not in self._world.gone:
            self._world.network.bring_back(what)

    async def _off(self, host: Host, disaster: Disaster) -> None:
        """The power fails: programs and machines end, the disk stays."""
        supervisor = self._vm_host(host)
        supervisor.hold()
        self._world.network.take_down(host.host_id)
        host.machines.vanish_all()
        await asyncio.sleep(disaster.lasts_s)
        if host.host_id not in self._world.gone:
            self._world.network.bring_back(host.host_id)
            supervisor.release()

    async def _gone(self, host: Host, _disaster: Disaster) -> None:
        """A host burns down; the last one never does."""
        if len(self._world.hosts) - len(self._world.gone) > 1:
            self._world.gone.add(host.host_id)
            self._vm_host(host).hold()
            self._world.network.take_down(host.host_id)
            host.machines.vanish_all()

    async def _machine_dies(self, host: Host, disaster: Disaster) -> None:
        vm_id = _one(sorted(host.machines.kept), disaster.which)
        if vm_id is not None:
            host.machines.vanish(vm_id)

    async def _machine_ruined(self, host: Host, disaster: Disaster) -> None:
        vm_id = _one(sorted(host.machines.kept), disaster.which)
        if vm_id is not None:
            host.machines.ruin(vm_id)

    async def _stranger(self, host: Host, _disaster: Disaster) -> None:
        """A machine that nobody asked for turns up."""
        if host.host_id in self._world.gone:
            return
        self._strangers += 1
        machine = Machine(
            vm_id=VmId(f"vm-stranger-{host.host_id}-{self._strangers}"),
            tenant_id=TenantId("acme"),
            session_id=STRANGER,
            incarnation=1,
            spec=MachineSpec(memory_mib=64, disk_mib=64),
            state="starting",
        )
        machine.run(0)
        host.machines.plant(machine)

    async def _drain(self, host: Host, disaster: Disaster) -> None:
        operator = self._world.operator
        await operator.ask(host.host_id, DrainHost(reason="maintenance"), operator.new_id("drain"))
        await asyncio.sleep(disaster.lasts_s)
        await operator.ask(host.host_id, UndrainHost(), operator.new_id("undrain"))

    async def _tidy(self, _host: Host, _disaster: Disaster) -> None:
        """Somebody asks to free every checkpoint there is; those that anything rests on are refused."""
        operator = self._world.operator
        checkpoints = [row for row in self._world.log.rows if row.tag.startswith("checkpoint-recorded.")]
        for row in reversed(checkpoints):
            command = FreeCheckpoint(reason="tidying up")
            await operator.ask(row.stream, command, operator.new_id("free"), service="snapshot-store")

    def _host(self, disaster: Disaster) -> Host:
        hosts = list(self._world.hosts.values())
        return hosts[int(disaster.which * len(hosts))]

    def _vm_host(self, host: Host) -> Supervisor:
        return next(one for one in self._world.supervisors if one.program.machine == host.host_id)


def _one(choices: list[VmId], which: float) -> VmId | None:
    return choices[int(which * len(choices))] if choices else None
