"""Follows the programs of this host's machines, one task each: output to the bus, the end to the log, once.

A program is begun once, by the command that recorded it, in the process that recorded it; after that it is only
ever followed. What happened to one that nobody can find is said to be unknown, never tried again.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torpor_contracts.errors import Transient
from torpor_contracts.ids import ExecId, VmId
from torpor_contracts.session import ExecSpec
from torpor_messaging.ports import Bus, Clock
from torpor_vm_host.bounded import TIMED_OUT
from torpor_vm_host.domain.observations import Outcome, continued, exec_end, exec_ended
from torpor_vm_host.domain.vm import Claim, Running, running_execs
from torpor_vm_host.ledger import About, Ledger
from torpor_vm_host.outputs import OutputLimits, OutputSink, OutputStalled
from torpor_vm_host.ports import EXEC_UNKNOWN, VM_GONE, Driver, DriverError, ExecOutcome, PresentExec
from torpor_vm_host.workers import Workers

FOLLOW_TRIES_MAX: Final = 4
FOLLOW_PAUSE_S: Final = 0.5
SIGKILL: Final = 9

_log: Final = logging.getLogger(__name__)


class _Gone(Exception):  # noqa: N818
    """The machine is gone; who watches it says so, and what of its programs is lost."""


@dataclass
class _Followed:
    """One program that is followed. While `settling` its end is being recorded, which is not broken off."""

    task: "asyncio.Task[None]"
    settling: bool = field(default=False)


class Programs:
    """Begins and follows programs; see `Driver.exec` and `Driver.attach`."""

    def __init__(
        self, driver: Driver, ledger: Ledger, workers: Workers, *, bus: Bus, clock: Clock, limits: OutputLimits
    ) -> None:
        self._driver = driver
        self._ledger = ledger
        self._workers = workers
        self._bus = bus
        self._clock = clock
        self._limits = limits
        self._followed: dict[VmId, dict[ExecId, _Followed]] = {}
        self._intended: set[tuple[VmId, ExecId]] = set()

    def intend(self, vm_id: VmId, exec_id: ExecId) -> None:
        """The program is about to be recorded, to be begun by this process and no other."""
        self._intended.add((vm_id, exec_id))

    def withdraw(self, vm_id: VmId, exec_id: ExecId) -> None:
        """The program will not be begun by this process."""
        self._intended.discard((vm_id, exec_id))

    def begin(self, claim: Claim, exec_id: ExecId, program: ExecSpec) -> None:
        """Run a program that this process intended and has recorded; nothing for any other."""
        if (claim.vm_id, exec_id) in self._intended:
            self._intended.discard((claim.vm_id, exec_id))
            self._spawn(claim, exec_id, program)

    def following(self, vm_id: VmId) -> set[ExecId]:
        """The programs of a machine that are followed, or about to be begun."""
        return {*self._followed.get(vm_id, ()), *(exec_id for vm, exec_id in self._intended if vm == vm_id)}

    async def follow_all(self, about: About, state: Running) -> None:
        """Follow every program of a running machine that is not followed; raises `DriverError` or `Transient`.

        Those that only the guest knows came with a checkpoint; those that it does not know have an unknown outcome;
        those whose end is recorded are forgotten.
        """
        vm_id = state.claim.vm_id
        present = {one.exec_id: one for one in await self._driver.execs(vm_id)}
        await self._forget_recorded(vm_id, state.execs, present.values())
        if any(exec_id not in state.execs for exec_id in present):
            after = await self._ledger.observe(about, vm_id, lambda now, place: continued(now, place, present))
            if not isinstance(after, Running):
                return
            state = after
        for exec_id in running_execs(state):
            if exec_id in self.following(vm_id):
                continue
            if exec_id in present:
                self._spawn(state.claim, exec_id, None)
            else:
                why = "the host stopped before it had seen the program's end; it is not started again"
                await self._settle(state.claim, exec_id, _unknown(why, 0), self._sink(state.claim, exec_id))

    async def forget_recorded(self, vm_id: VmId, execs: Mapping[ExecId, bool]) -> None:
        """Let the guest drop what it keeps of programs whose end is recorded, so that no checkpoint carries it."""
        await self._forget_recorded(vm_id, execs, await self._driver.execs(vm_id))

    async def detach(self, vm_id: VmId) -> None:
        """Let go of all programs of a machine; they go on. What was being recorded is recorded first."""
        followed = list(self._followed.get(vm_id, {}).values())
        for one in followed:
            if not one.settling:
                one.task.cancel()
        await asyncio.gather(*(one.task for one in followed), return_exceptions=True)

    async def stop(self) -> None:
        """Let go of all programs of all machines."""
        await asyncio.gather(*(self.detach(vm_id) for vm_id in list(self._followed)))

    def _sink(self, claim: Claim, exec_id: ExecId) -> OutputSink:
        return OutputSink(self._bus, self._clock, claim, exec_id, self._limits)

    def _spawn(self, claim: Claim, exec_id: ExecId, program: ExecSpec | None) -> None:
        vm_id = claim.vm_id
        task = self._workers.spawn(f"follow {exec_id} in {vm_id}", self._follow(claim, exec_id, program))
        self._followed.setdefault(vm_id, {})[exec_id] = _Followed(task)
        task.add_done_callback(lambda _: self._let_go(vm_id, exec_id))

    def _let_go(self, vm_id: VmId, exec_id: ExecId) -> None:
        followed = self._followed.get(vm_id, {})
        followed.pop(exec_id, None)
        if not followed:
            self._followed.pop(vm_id, None)

    async def _follow(self, claim: Claim, exec_id: ExecId, program: ExecSpec | None) -> None:
        sink = self._sink(claim, exec_id)
        try:
            outcome = await self._outcome(claim.vm_id, exec_id, program, sink)
        except _Gone:
            return
        except OutputStalled as error:
            _log.warning("output waits in the guest: %s", error)
            return
        self._followed[claim.vm_id][exec_id].settling = True
        try:
            await self._settle(claim, exec_id, outcome, sink)
        except (Transient, DriverError) as error:
            _log.warning("the end of %s in %s is not settled yet: %s", exec_id, claim.vm_id, error)

    async def _outcome(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec | None, sink: OutputSink) -> Outcome:
        """Follow to the end, over lost connections, a bounded number of times."""
        why = ""
        for attempt in range(FOLLOW_TRIES_MAX):
            try:
                if program is not None and attempt == 0:
                    return self._seen(await self._driver.exec(vm_id, exec_id, program, sink.take), sink)
                return self._seen(await self._driver.attach(vm_id, exec_id, sink.take), sink)
            except DriverError as error:
                if error.code == VM_GONE:
                    raise _Gone from error
                why = f"{why}; {error}" if why else str(error)
                if error.code == EXEC_UNKNOWN or not error.retryable:
                    break
                if error.code == TIMED_OUT:
                    await self._kill(vm_id, exec_id)
                await self._clock.sleep(FOLLOW_PAUSE_S * 2**attempt)
        return _unknown(why, sink.kept_bytes)

    async def _kill(self, vm_id: VmId, exec_id: ExecId) -> None:
        try:
            await self._driver.kill(vm_id, exec_id, SIGKILL)
        except DriverError as error:
            _log.warning("%s in %s could not be killed: %s", exec_id, vm_id, error)

    def _seen(self, outcome: ExecOutcome, sink: OutputSink) -> Outcome:
        kept = sink.kept_of(outcome.output_bytes)
        detail = outcome.detail
        if kept < outcome.output_bytes:
            cut = f"output-cut: only the first {kept} of {outcome.output_bytes} bytes are kept"
            detail = f"{cut}; {detail}" if detail else cut
        return Outcome(outcome.outcome, outcome.exit_code, detail, kept)

    async def _settle(self, claim: Claim, exec_id: ExecId, outcome: Outcome, sink: OutputSink) -> None:
        """Record the end, say it on the output's subject, then let the guest forget; it may end after any of them."""
        about = About(tenant_id=claim.tenant_id, causation_id=exec_id, correlation_id=claim.session_id)
        vm_id = claim.vm_id
        end = exec_end(claim, self._ledger.place(vm_id), exec_id, outcome)
        await self._ledger.observe(about, vm_id, lambda state, _: exec_ended(state, end))
        await sink.end(end)
        await self._driver.forget(vm_id, exec_id)

    async def _forget_recorded(self, vm_id: VmId, execs: Mapping[ExecId, bool], present: Iterable[PresentExec]) -> None:
        for one in present:
            if not one.running and execs.get(one.exec_id) is False:
                await self._driver.forget(vm_id, one.exec_id)


def _unknown(why: str, output_bytes: int) -> Outcome:
    return Outcome("failed", None, f"outcome-unknown: {why}", output_bytes)
