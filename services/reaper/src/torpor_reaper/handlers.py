"""Turns heartbeats into steps of clean-ups: what a host says it has is held against what the log says it may have.

A view gives the first hint; whatever is recorded rests on the log itself, read to the end named in the event.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import msgspec

from torpor_contracts.errors import Transient
from torpor_contracts.host import HostHeartbeat, VmObservation
from torpor_contracts.ids import SYSTEM_TENANT, CommandId, HostId, TenantId, VmId, is_token
from torpor_eventlog.codec import decode_event
from torpor_eventlog.deciding import Decisions
from torpor_eventlog.instants import to_us
from torpor_eventlog.port import EventLog
from torpor_eventlog.views_port import ViewStore
from torpor_messaging import subjects
from torpor_messaging.ports import Clock
from torpor_reaper.domain.cleanup import IDLE, CleanupState, Look, Rules, decide, evolve, is_due
from torpor_reaper.domain.reasons import HostWord
from torpor_reaper.domain.standing import (
    SESSION_STEPS,
    Held,
    MachineFacts,
    Nobodys,
    SessionFacts,
    Sighting,
    evolve_machine,
    evolve_session,
    judge,
)
from torpor_reaper.projections import MACHINES, PAGE, MachineRow, proposal_of

HOSTS_MAX: Final = 10_000
"""Hosts remembered; the one heard longest ago is forgotten first."""

VM_PREFIX: Final = "vm-"

_log: Final = logging.getLogger(__name__)


class Oddity(msgspec.Struct, frozen=True, kw_only=True):
    """A machine on a host that no command can be addressed to, so that an operator must look."""

    vm_id: VmId
    host_id: HostId
    found: Nobodys


@dataclass
class _Host:
    """What this process remembers of a host; losing it costs nothing but the notice time."""

    boot_id: str = ""
    observed_at: datetime | None = None
    heard_at: datetime | None = None
    busy: bool = False
    noticed: dict[tuple[VmId, bool], float] = field(default_factory=dict)
    oddities: list[Oddity] = field(default_factory=list)

    def is_news(self, heartbeat: HostHeartbeat) -> bool:
        """Whether it says more than the last one; messages may come late, twice, or after a clock was set back."""
        same_boot = heartbeat.boot_id == self.boot_id
        return not same_boot or self.observed_at is None or heartbeat.observed_at > self.observed_at


@dataclass(frozen=True)
class _Step:
    """The cause of a clean-up's event: one id for each version of its stream, so that replicas agree on the step."""

    tenant_id: TenantId
    command_id: CommandId
    causation_id: str
    correlation_id: str

    @property
    def request_digest(self) -> bytes:
        return hashlib.sha256(self.command_id.encode()).digest()


class Heartbeats:
    """Looks at every machine a host reports, and at every claim on that host whose machine has ended."""

    def __init__(self, log: EventLog, views: ViewStore, clock: Clock, rules: Rules, notice_s: float) -> None:
        self._log = log
        self._views = views
        self._clock = clock
        self._rules = rules
        self._notice_s = notice_s
        self._hosts: dict[HostId, _Host] = {}
        self._cleanups: Decisions[CleanupState] = Decisions(log, lambda: IDLE, evolve, clock.now)

    async def on_heartbeat(self, subject: str, data: bytes) -> None:
        """Look once; what cannot be read or done now is looked at again with the next heartbeat."""
        try:
            heartbeat = msgspec.json.decode(data, type=HostHeartbeat)
        except msgspec.MsgspecError as error:
            _log.warning("no heartbeat on %s: %s", subject, error)
            return
        if heartbeat.host_id != subjects.parse_observation(subject).id:
            _log.warning("a heartbeat of %s came on %s and is ignored", heartbeat.host_id, subject)
            return
        host = self._remember(heartbeat.host_id)
        if host.busy or not host.is_news(heartbeat):
            return
        host.boot_id, host.observed_at, host.heard_at = heartbeat.boot_id, heartbeat.observed_at, self._clock.now()
        host.busy = True
        try:
            await self._compare(heartbeat, host)
        except Transient as error:
            _log.warning("%s is looked at again with its next heartbeat: %s", heartbeat.host_id, error)
        finally:
            host.busy = False

    def word_of(self, host_id: HostId, silent_after_s: float) -> HostWord:
        """When this process last heard the host."""
        host = self._hosts.get(host_id)
        heard_at = host.heard_at if host is not None else None
        silent = heard_at is None or self._clock.now() - heard_at > timedelta(seconds=silent_after_s)
        return HostWord(host_id=host_id, heard_at=heard_at, is_silent=silent)

    def oddities(self) -> list[Oddity]:
        """Machines in the last heartbeats that no command can be addressed to."""
        return [oddity for host in self._hosts.values() for oddity in host.oddities]

    def _remember(self, host_id: HostId) -> _Host:
        host = self._hosts.pop(host_id, None) or _Host()
        self._hosts[host_id] = host
        while len(self._hosts) > HOSTS_MAX:
            self._hosts.pop(next(iter(self._hosts)))
        return host

    async def _compare(self, heartbeat: HostHeartbeat, host: _Host) -> None:
        held = {row.vm_id for row in await self._rows("held_on", heartbeat.host_id)}
        candidates = {row.vm_id: row for row in await self._rows("candidate_on", heartbeat.host_id)}
        doubtful = [seen for seen in heartbeat.vms if seen.vm_id not in held or seen.vm_id in candidates]
        missing = candidates.keys() - {seen.vm_id for seen in heartbeat.vms}
        wanted = {(seen.vm_id, True) for seen in doubtful} | {(vm_id, False) for vm_id in missing}
        now_s = self._clock.monotonic_s()
        host.noticed = {key: host.noticed.get(key, now_s) for key in wanted}
        host.oddities = [_illegal(heartbeat.host_id, seen) for seen in doubtful if not _is_machine_id(seen.vm_id)]
        for seen in doubtful:
            ripe = now_s - host.noticed[seen.vm_id, True] >= self._notice_s
            if ripe and _is_machine_id(seen.vm_id) and self._due(candidates.get(seen.vm_id), heartbeat):
                await self._look_at_seen(heartbeat, host, seen.vm_id)
        for vm_id in sorted(missing):
            ripe = now_s - host.noticed[vm_id, False] >= self._notice_s
            await self._look_at_missing(heartbeat, candidates[vm_id], ripe=ripe)

    async def _rows(self, field_name: str, host_id: HostId) -> Sequence[MachineRow]:
        found: list[MachineRow] = []
        async with self._views.reading() as rows:
            after: str | None = None
            while page := await rows.find(MACHINES, {field_name: host_id}, after_key=after, limit=PAGE):
                found.extend(page)
                after = page[-1].vm_id
        return found

    def _due(self, row: MachineRow | None, heartbeat: HostHeartbeat) -> bool:
        return row is None or is_due(row.cleanup, row.facts, heartbeat.boot_id, self._clock.now())

    async def _look_at_seen(self, heartbeat: HostHeartbeat, host: _Host, vm_id: VmId) -> None:
        checked_position = (await self._log.head()).position
        machine, session = await self._facts(vm_id)
        sighting = Sighting(host_id=heartbeat.host_id, seen_us=to_us(heartbeat.observed_at))
        found = judge(machine, session, sighting)
        if isinstance(found, Nobodys) and found.reason == "misplaced":
            host.oddities.append(Oddity(vm_id=vm_id, host_id=heartbeat.host_id, found=found))
            return
        await self._step(
            Look(
                host_id=heartbeat.host_id,
                boot_id=heartbeat.boot_id,
                machine=machine,
                found=found if isinstance(found, Nobodys) else None,
                action="reap",
                cause=f"it is {found.holder}" if isinstance(found, Held) else f"{heartbeat.host_id} has it still",
                checked_position=checked_position,
                now=self._clock.now(),
            )
        )

    async def _look_at_missing(self, heartbeat: HostHeartbeat, row: MachineRow, *, ripe: bool) -> None:
        proposal = proposal_of(row.cleanup)
        if proposal is None or proposal.action == "release":
            claims_left = row.facts.end is not None and bool(row.facts.held)
            if proposal is None and not claims_left:
                return  # nobody's by the log, and not there: its host has to record its end
            if claims_left and not (ripe and self._due(row, heartbeat)):
                return
        checked_position = (await self._log.head()).position
        machine, _ = await self._facts(row.vm_id)
        found = None
        if machine.end is not None and machine.held:
            evidence = f"{machine.end.how} at position {machine.end.position}, {len(machine.held)} claims not released"
            found = Nobodys(reason="unreleased", evidence=evidence, position=machine.end.position)
        await self._step(
            Look(
                host_id=heartbeat.host_id,
                boot_id=heartbeat.boot_id,
                machine=machine,
                found=found,
                action="release",
                cause=f"{heartbeat.host_id} has it no more",
                checked_position=checked_position,
                now=self._clock.now(),
            )
        )

    async def _facts(self, vm_id: VmId) -> tuple[MachineFacts, SessionFacts]:
        machine = MachineFacts(vm_id=vm_id)
        for recorded in await self._log.load(vm_id):
            machine = evolve_machine(machine, decode_event(recorded), recorded.position)
        session = SessionFacts()
        if machine.claim is not None:
            for recorded in await self._log.load(machine.claim.session_id):
                event = decode_event(recorded)
                if isinstance(event, SESSION_STEPS):
                    session = evolve_session(session, event, recorded.position)
        return machine, session

    async def _step(self, look: Look) -> None:
        stream = stream_of(look.machine.vm_id)
        _, version = await self._cleanups.fold(stream)
        claim = look.machine.claim
        step = _Step(
            tenant_id=SYSTEM_TENANT if claim is None else claim.tenant_id,
            command_id=CommandId(f"reaper-{look.machine.vm_id}-{version + 1}"),
            causation_id=f"heartbeat-{look.host_id}",
            correlation_id=stream,
        )
        await self._cleanups.execute(step, stream, lambda state: decide(state, look, self._rules))


def stream_of(vm_id: VmId) -> str:
    """The stream of a machine's clean-up."""
    return f"cleanup-{vm_id}"


def _is_machine_id(vm_id: VmId) -> bool:
    """Whether the log may have a stream of this machine: all streams share one name space, and ids have prefixes."""
    return vm_id.startswith(VM_PREFIX) and is_token(stream_of(vm_id))


def _illegal(host_id: HostId, seen: VmObservation) -> Oddity:
    evidence = f"{seen.vm_id[:80]!r} is no machine's id: no command can name it"
    return Oddity(
        vm_id=seen.vm_id, host_id=host_id, found=Nobodys(reason="unclaimed", evidence=evidence, position=None)
    )
