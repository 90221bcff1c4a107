"""One world: every service, its clients and its misfortunes, from a plan to the findings of the checkers."""

import asyncio
import random
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from torpor_chunks.memory import MemoryChunks
from torpor_contracts.ids import SYSTEM_TENANT, TenantId
from torpor_contracts.replies import Reply
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import Recorded
from torpor_messaging import subjects
from torpor_messaging.envelope import REPLY, sent_id
from torpor_messaging.ports import OutgoingCommand
from torpor_scheduler.domain.session import Phase
from torpor_simulation.broker import Broker, StreamSpec
from torpor_simulation.bus import Questions, SimBus, SimDelivery
from torpor_simulation.carrying import EventsStream
from torpor_simulation.checks_live import LiveChecks
from torpor_simulation.clients import Client, Ledger, told
from torpor_simulation.clock import SimClock, SimIds
from torpor_simulation.disasters import Disasters
from torpor_simulation.faults import Faults
from torpor_simulation.fleet import CORE, Fleet
from torpor_simulation.history import Violation
from torpor_simulation.hypervisor import Host, HostMachines, Sighting
from torpor_simulation.network import Network
from torpor_simulation.plan import Plan
from torpor_simulation.process import Process
from torpor_simulation.programs import Supervisor
from torpor_simulation.rest import unsettled
from torpor_simulation.sessions import Sessions
from torpor_simulation.surroundings import Surroundings
from torpor_simulation.trace import Trace
from torpor_simulation.verdict import judge
from torpor_simulation.watched import WatchedLog
from torpor_simulation.workload import SessionLife, Workload

STREAMS: Final = (
    StreamSpec("COMMANDS", ("cmd.>",), work_queue=True),
    StreamSpec("TIMERS", ("timer.>",), work_queue=True, one_per_subject=True),
    StreamSpec("OUTPUT", ("out.>",)),
    StreamSpec("HEADS", ("head.log",)),
    StreamSpec("DEAD", ("dead.>", "$JS.EVENT.ADVISORY.CONSUMER.>")),
)
TENANT: Final = TenantId("acme")
RESTART_S: Final = 1.0
SETTLE_S_MAX: Final = 600.0
LOOK_S: Final = 2.0
SCRATCH: Final = Path("/dev/shm")  # noqa: S108  (memory: parts of checkpoints are written there and read once)


class World:
    """Built inside the virtual loop; `run` lives through the plan and returns what the checkers found."""

    def __init__(self, plan: Plan, scratch: Path, show: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.scratch = scratch
        self.trace = Trace(show)
        self.violations: list[Violation] = []
        self.network = Network(plan.seed, plan.network)
        self.faults = Faults(plan.seed, plan.rates, self.trace, plan.crash_at)
        self.broker = Broker(self.network, STREAMS)
        self.questions = Questions(self.network)
        self.events = EventsStream()
        self.log = WatchedLog(self._committed)
        self.chunks = MemoryChunks(asyncio.get_running_loop().time)
        self.hosts = {
            host_id: Host(host_id, scratch / host_id, HostMachines(host_id, self._seen))
            for host_id in (f"host-{number + 1}" for number in range(plan.hosts))
        }
        self.sessions = Sessions(self.violate)
        skews = random.Random(f"{plan.seed}-clocks")  # noqa: S311  (a seeded world)
        self.skew_s = {machine: plan.skew_s * (skews.random() - 0.5) for machine in (CORE, *self.hosts)}
        """How far the calendar of each machine is off."""
        self.live = LiveChecks(self.hosts, self.chunks, self.sessions, self.violate)
        self.lives: list[SessionLife] = []
        self.last_programs: dict[str, str] = {}
        """Session -> the program it was given when it was woken at the end."""
        self._works: list[Workload] = []
        self.ledger = Ledger()
        self.fleet = Fleet(self)
        self.supervisors = [
            Supervisor(program, self.trace, self.broken, RESTART_S) for program in self.fleet.programs()
        ]
        self.gone: set[str] = set()
        """Hosts that never come back."""
        self.calmed = False
        self._loop = asyncio.get_running_loop()
        self._processes: list[Process] = []
        self.operator, _ = self.client(SYSTEM_TENANT, "operator")

    def violate(self, violation: Violation) -> None:
        """Note that a law did not hold."""
        self.trace.add("violation", str(violation))
        self.violations.append(violation)

    def broken(self, what: str) -> None:
        """Note that a program did what none may do."""
        self.violate(Violation("broken", what))

    def surroundings(self, process: Process, machine: str) -> Surroundings:
        """What a process on a machine stands in."""
        return Surroundings(process, machine, self.network, self.faults, self.trace)

    async def run(self) -> list[Violation]:
        """Live through the plan, let everything come to rest, and judge."""
        keeping = [self._loop.create_task(supervisor.run()) for supervisor in self.supervisors]
        try:
            await self._trouble()
            self.trace.add("calm")
            await self._settle()
            await self._wake_up()
            await self._settle()
            if not self.violations:
                for violation in await judge(self):
                    self.violate(violation)
        finally:
            for task in keeping:
                task.cancel()
            for process in self._processes:
                process.kill()
            await asyncio.wait(keeping)
        return self.violations

    def client(self, tenant_id: TenantId, name: str) -> tuple[Client, SimClock]:
        """Somebody outside, on a machine of their own that never fails."""
        process = Process(name)
        self._processes.append(process)
        around = Surroundings(process, name, self.network, Faults.none(self.trace), self.trace)
        clock = SimClock(process)
        bus = SimBus(self.broker, self.questions, around, clock, SimIds(f"{self.plan.seed}-{name}"))
        return Client(tenant_id, name, bus, clock, self.ledger, self._heard), clock

    async def _trouble(self) -> None:
        """Clients at work while faults strike, then the rest of their work in peace."""
        doing: list[Coroutine[Any, Any, object]] = [Disasters(self).run()]
        for number in range(self.plan.sessions):
            client, clock = self.client(TENANT, f"client-{number + 1}")
            life = SessionLife(f"s-{number + 1}")
            self.lives.append(life)
            work = Workload(f"{self.plan.seed}-client-{number + 1}", client, clock)
            self._works.append(work)
            doing.append(work.live(life, self.plan.acts))
        tasks = [self._loop.create_task(one) for one in doing]
        await asyncio.wait(tasks, timeout=self.plan.trouble_s)
        self.calm()
        for task in tasks:
            await task

    def calm(self) -> None:
        """Stop every fault: from now on the world must come to rest."""
        self.calmed = True
        self.faults.calm()
        self.network.calm()
        self.plan.driver.calm()
        for host_id in sorted(self.gone):
            self.network.take_down(host_id)
        for supervisor in self.supervisors:
            if supervisor.program.machine not in self.gone:
                supervisor.release()

    async def _wake_up(self) -> None:
        """Wake whatever sleeps, is lost or has failed but can go on, and give it something to do."""
        self.trace.add("wake-up")
        for work, life in zip(self._works, self.lives, strict=True):
            session = self.sessions.folded.get(life.session_id)
            if self.violations or session is None or session.phase is Phase.TERMINATED:
                continue
            if session.phase in (Phase.SUSPENDED, Phase.LOST, Phase.FAILED):
                await work.resume(life)
            exec_id = await work.last_program(life)
            if exec_id is not None:
                self.last_programs[life.session_id] = exec_id

    async def _settle(self) -> None:
        """Wait until nothing is on its way any more; what never ends is a finding."""
        give_up_s = self._loop.time() + SETTLE_S_MAX
        waiting_for = await unsettled(self)
        while waiting_for and not self.violations:
            if self._loop.time() > give_up_s:
                self.violate(Violation("settles", "; ".join(waiting_for[:6])))
                return
            await asyncio.sleep(LOOK_S)
            waiting_for = await unsettled(self)

    def acking(self, delivery: SimDelivery) -> None:
        """A delivery is about to be acknowledged for good: a command that waits for a receipt must be in the log."""
        if REPLY in delivery.headers:
            tenant_id = subjects.parse_command(delivery.subject).tenant_id
            command_id = f"{tenant_id}/{sent_id(delivery)}"
            if not self.log.knows(command_id):
                self.violate(Violation("acked-unrecorded", f"{command_id} is acknowledged and not in the log"))

    def _heard(self, command: OutgoingCommand, reply: Reply) -> None:
        """A client was answered: a receipt must be true by then."""
        receipt = reply.receipt
        self.trace.add("reply", command.command_id, told(reply))
        if receipt is not None and receipt.position > len(self.log.rows):
            self.violate(
                Violation("receipt-true", f"{command.command_id} has a receipt for {receipt.position} already")
            )

    def _committed(self, rows: list[Recorded]) -> None:
        for row in rows:
            self.trace.add("commit", row.position, row.stream, row.tag, row.digest.hex()[:16])
            event = decode_event(row)
            self.sessions.committed(row.stream, event)
            self.live.committed(row, event)

    def _seen(self, sighting: Sighting) -> None:
        self.trace.add("machine", sighting.what, sighting.host_id, sighting.vm_id, sighting.exec_id or "")
        self.live.seen(sighting)


def scratch_directory(stack: ExitStack) -> Path:
    """A directory of its own for one world, gone when `stack` closes."""
    parent = SCRATCH if SCRATCH.is_dir() else None
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torpor-sim-", dir=parent)))
