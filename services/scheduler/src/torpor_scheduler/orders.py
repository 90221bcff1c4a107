"""The commands a session's state asks of the vm-host of its machine; made from the state, so they can be made again."""

from collections.abc import Collection, Sequence

import msgspec

from torpor_contracts.ids import HostId, SessionId, VmId
from torpor_contracts.session import ExecRequested
from torpor_contracts.vm import CheckpointVm, ExecVm, StartVm, StopVm, SuspendVm, VmCommand
from torpor_eventlog.codec import decode_event
from torpor_eventlog.port import EventLog
from torpor_scheduler.domain.session import Machine, Phase, Session

EXEC_REQUESTED = ExecRequested.__struct_config__.tag


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A command for the vm-host of a machine."""

    host_id: HostId
    vm_id: VmId
    command: VmCommand

    @property
    def target(self) -> str:
        """The rest of the command's subject: the host takes it, the machine orders it."""
        return f"{self.host_id}.{self.vm_id}"


def pending_order(session: Session) -> Order | None:
    """What the host of the session's machine still has to do for it, programs apart."""
    machine = session.machine
    if machine is None:
        return None
    command: VmCommand
    match session.phase:
        case Phase.STARTING | Phase.RESUMING:
            command = StartVm(
                session_id=session.session_id,
                incarnation=machine.incarnation,
                machine=session.spec,
                checkpoint_id=machine.checkpoint_id,
                deadline_at=machine.deadline_at,
            )
        case Phase.SUSPENDING if session.suspending is not None:
            suspending = session.suspending
            command = SuspendVm(
                session_id=session.session_id,
                incarnation=machine.incarnation,
                checkpoint_id=suspending.checkpoint_id,
                parent_id=suspending.parent_id,
                deadline_at=suspending.deadline_at,
                idle_s=session.idle_after_s if suspending.cause == "idle" else None,
            )
        case Phase.TERMINATING:
            return stop_order(session.session_id, machine, "the session is terminated")
        case Phase.ROLLING_BACK:
            return stop_order(session.session_id, machine, "the session goes back to an earlier checkpoint")
        case _:
            return None
    return Order(host_id=machine.host_id, vm_id=machine.vm_id, command=command)


def checkpoint_order(session: Session) -> Order | None:
    """The checkpoint that the host of a running machine still has to take; None when the next try is not due."""
    machine, pending = session.machine, session.checkpointing
    if machine is None or pending is None or pending.retry_at is not None or session.phase is not Phase.RUNNING:
        return None
    command = CheckpointVm(
        session_id=session.session_id,
        incarnation=machine.incarnation,
        checkpoint_id=pending.checkpoint_id,
        parent_id=pending.parent_id,
        deadline_at=pending.deadline_at,
    )
    return Order(host_id=machine.host_id, vm_id=machine.vm_id, command=command)


def stop_order(session_id: SessionId, machine: Machine, reason: str) -> Order:
    """Destroy the machine, whatever it does."""
    return Order(
        host_id=machine.host_id,
        vm_id=machine.vm_id,
        command=StopVm(session_id=session_id, incarnation=machine.incarnation, reason=reason),
    )


async def exec_orders(log: EventLog, session: Session, versions: Collection[int]) -> Sequence[tuple[int, Order]]:
    """The programs asked for at these versions of the session's stream, for its machine; with their versions.

    The programs' text is not kept in folded state, so it is read from the log.
    """
    machine = session.machine
    if machine is None or not versions:
        return []
    orders = []
    for recorded in await log.load(session.session_id, after_version=min(versions) - 1):
        if recorded.version not in versions or recorded.tag != EXEC_REQUESTED:
            continue
        event: ExecRequested = decode_event(recorded)
        orders.append((recorded.version, exec_order(session.session_id, machine, event)))
    return orders


def exec_order(session_id: SessionId, machine: Machine, event: ExecRequested) -> Order:
    """Run the program in the machine."""
    return Order(
        host_id=machine.host_id,
        vm_id=machine.vm_id,
        command=ExecVm(
            session_id=session_id,
            incarnation=machine.incarnation,
            exec_id=event.exec_id,
            program=event.program,
        ),
    )
