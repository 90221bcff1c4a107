"""Takes the commands of this host's machines, one at a time for each machine."""

from collections.abc import Awaitable, Callable
from typing import assert_never

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.vm import CheckpointVm, ExecVm, QuarantineVm, ReapVm, StartVm, StopVm, SuspendVm, VmCommand
from torpor_messaging.service import Incoming
from torpor_vm_host.domain import decisions
from torpor_vm_host.domain.vm import Running
from torpor_vm_host.ending import Ending
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.live import LiveCheckpoints
from torpor_vm_host.starting import Starting
from torpor_vm_host.suspending import Suspends


class Handlers:
    """Commands to events. `execs_max`: programs that may run in one machine at once."""

    def __init__(
        self,
        hosting: Hosting,
        starting: Starting,
        suspends: Suspends,
        live: LiveCheckpoints,
        ending: Ending,
        *,
        execs_max: int,
    ) -> None:
        self._hosting = hosting
        self._starting = starting
        self._suspends = suspends
        self._live = live
        self._ending = ending
        self._execs_max = execs_max

    async def handle(self, incoming: Incoming) -> Receipt | None:
        """Carry out a command whose target is `<host id>.<vm id>`."""
        vm_id = self._own_vm(incoming.target)
        command: VmCommand = incoming.command
        async with self._hosting.locks.holding(vm_id):
            if isinstance(command, SuspendVm | StopVm | QuarantineVm | ReapVm):
                await self._live.let_go(vm_id)
            return await self._work_of(command)(incoming, vm_id)

    def _work_of(self, command: VmCommand) -> Callable[[Incoming, VmId], Awaitable[Receipt | None]]:
        work: Callable[[Incoming, VmId], Awaitable[Receipt | None]]
        match command:
            case StartVm():
                work = self._starting.start
            case ExecVm():
                work = self._exec
            case SuspendVm():
                work = self._suspends.suspend
            case CheckpointVm():
                work = self._live.checkpoint
            case StopVm():
                work = self._ending.stop
            case QuarantineVm():
                work = self._ending.quarantine
            case ReapVm():
                work = self._ending.reap
            case _ as never:
                assert_never(never)
        return work

    async def _exec(self, incoming: Incoming, vm_id: VmId) -> Receipt | None:
        """Record that a program starts, then start it; it is not waited for.

        A repeat of the command begins nothing, unless this very process had meant to and never came to it.
        """
        command: ExecVm = incoming.command
        ledger, programs = self._hosting.ledger, self._hosting.programs
        state = await ledger.state(vm_id)
        decisions.check_tenant(state, incoming.tenant_id)
        if not (isinstance(state, Running) and command.exec_id in state.execs):
            programs.intend(vm_id, command.exec_id)
        try:
            receipt = await ledger.command_of(
                incoming,
                vm_id,
                command.session_id,
                lambda now, place: decisions.exec_program(now, command, place, self._execs_max),
                command.exec_id,
            )
        except Rejected:
            programs.withdraw(vm_id, command.exec_id)
            raise
        after = await ledger.state(vm_id)
        if isinstance(after, Running) and after.execs.get(command.exec_id, False):
            programs.begin(after.claim, command.exec_id, command.program)
        else:
            programs.withdraw(vm_id, command.exec_id)
        return receipt

    def _own_vm(self, target: str) -> VmId:
        host_id, _, vm_id = target.partition(".")
        if host_id != self._hosting.host.host_id or not vm_id:
            raise Rejected(
                "not-this-host",
                f"{target!r} is no machine of {self._hosting.host.host_id}",
                "send it to cmd.<tenant>.vm-host.<type>.<host id>.<vm id>",
            )
        return VmId(vm_id)
