"""Takes the commands of this host's machines, one at a time for each machine."""

from typing import assert_never

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.vm import ExecVm, QuarantineVm, ReapVm, StartVm, StopVm, SuspendVm, VmCommand
from torpor_messaging.service import Incoming
from torpor_vm_host.domain import decisions
from torpor_vm_host.domain.vm import Running
from torpor_vm_host.ending import Ending
from torpor_vm_host.hosting import Hosting
from torpor_vm_host.starting import Starting
from torpor_vm_host.suspending import Suspends


class Handlers:
    """Commands to events. `execs_max`: programs that may run in one machine at once."""

    def __init__(
        self, hosting: Hosting, starting: Starting, suspends: Suspends, ending: Ending, *, execs_max: int
    ) -> None:
        self._hosting = hosting
        self._starting = starting
        self._suspends = suspends
        self._ending = ending
        self._execs_max = execs_max

    async def handle(self, incoming: Incoming) -> Receipt | None:
        """Carry out a command whose target is `<host id>.<vm id>`."""
        vm_id = self._own_vm(incoming.target)
        command: VmCommand = incoming.command
        async with self._hosting.locks.holding(vm_id):
            match command:
                case StartVm():
                    return await self._starting.start(incoming, vm_id)
                case ExecVm():
                    return await self._exec(incoming, command, vm_id)
                case SuspendVm():
                    return await self._suspends.suspend(incoming, vm_id)
                case StopVm():
                    return await self._ending.stop(incoming, vm_id)
                case QuarantineVm():
                    return await self._ending.quarantine(incoming, vm_id)
                case ReapVm():
                    return await self._ending.reap(incoming, vm_id)
                case _ as never:
                    assert_never(never)

    async def _exec(self, incoming: Incoming, command: ExecVm, vm_id: VmId) -> Receipt | None:
        """Record that a program starts, then start it; it is not waited for.

        A repeat of the command begins nothing, unless this very process had meant to and never came to it.
        """
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
