"""Machines that nobody claims."""

from torpor_contracts.ids import SessionId, TenantId, VmId
from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.simulated.machine import Machine


def strange_machine(vm_id: str) -> Machine:
    """A running machine that the log has never heard of."""
    return Machine(
        vm_id=VmId(vm_id),
        tenant_id=TenantId("unknown"),
        session_id=SessionId("s-strange"),
        incarnation=7,
        spec=MachineSpec(),
        state="running",
    )
