"""Named points of a run, and the parts of a vm-host's surroundings that pass them: where tests let it die or fail."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torpor_chunks.memory import MemoryChunks
from torpor_chunks.port import PackAddress, PartSource, Stored, StoreUnavailable, WantedPart
from torpor_contracts.errors import Transient
from torpor_contracts.ids import SYSTEM_TENANT, ExecId, TenantId, VmId
from torpor_contracts.replies import Receipt
from torpor_contracts.session import ExecSpec
from torpor_eventlog.memory import MemoryDatabase, MemoryLog
from torpor_eventlog.port import Commit
from torpor_vm_host.adapters.simulated.driver import SimulatedDriver
from torpor_vm_host.adapters.workspace import DirectoryWorkspace
from torpor_vm_host.ports import CheckpointFiles, ExecOutcome, LiveCheckpoint, OnOutput, OnPause, PartFile, VmSpec


class Points:
    """Named points of a run. What is planned for a point happens when it is passed, once; it may raise."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.plans: dict[str, Callable[[], None]] = {}

    def plan(self, point: str, what: Callable[[], None], after: int = 0) -> None:
        """Let something happen at a point, once it has been passed `after` times more."""
        self.plans[point] = what if not after else lambda: self.plan(point, what, after - 1)

    def reach(self, point: str) -> None:
        self.passed.append(point)
        plan = self.plans.pop(point, None)
        if plan is not None:
            plan()


class PointedLog(MemoryLog):
    """The log, with a point before and after each append, named by the first event's tag."""

    def __init__(self, database: MemoryDatabase, points: Points) -> None:
        super().__init__(database)
        self._points = points
        self.away = False

    async def append(self, commit: Commit) -> Receipt:
        tag = commit.events[0].tag.partition(".")[0] if commit.events else "nothing"
        if self.away:
            raise Transient("the log is away", retry_after_s=0.1)
        self._points.reach(f"append {tag}")
        receipt = await super().append(commit)
        self._points.reach(f"appended {tag}")
        return receipt


class PointedDriver(SimulatedDriver):
    """The simulated driver, with a point before and after each call that changes something."""

    points: Points

    async def start(self, spec: VmSpec, checkpoint: CheckpointFiles | None) -> None:
        self.points.reach("start")
        await super().start(spec, checkpoint)
        self.points.reach("started")

    async def receive(self, name: str, directory: Path) -> None:
        self.points.reach("receive")
        await super().receive(name, directory)
        self.points.reach("received")

    async def checkpoint(self, vm_id: VmId, directory: Path) -> list[PartFile]:
        self.points.reach("checkpoint")
        parts = await super().checkpoint(vm_id, directory)
        self.points.reach("checkpointed")
        return parts

    async def checkpoint_live(self, vm_id: VmId, directory: Path, at_pause: OnPause) -> LiveCheckpoint:
        async def paused() -> None:
            self.points.reach("paused")
            await at_pause()

        self.points.reach("checkpoint-live")
        live = await super().checkpoint_live(vm_id, directory, paused)
        self.points.reach("captured")
        return live

    async def resume(self, vm_id: VmId) -> None:
        self.points.reach("resume")
        await super().resume(vm_id)

    async def destroy(self, vm_id: VmId) -> None:
        self.points.reach("destroy")
        await super().destroy(vm_id)
        self.points.reach("destroyed")

    async def freeze(self, vm_id: VmId) -> None:
        await super().freeze(vm_id)
        self.points.reach("frozen")

    async def exec(self, vm_id: VmId, exec_id: ExecId, program: ExecSpec, on_output: OnOutput) -> ExecOutcome:
        self.points.reach("exec")
        return await super().exec(vm_id, exec_id, program, on_output)

    async def forget(self, vm_id: VmId, exec_id: ExecId) -> None:
        self.points.reach("forget")
        await super().forget(vm_id, exec_id)


class PointedChunks(MemoryChunks):
    """The chunk store, with a point before each put."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points

    async def put(self, tenant_id: TenantId, parts: Sequence[PartSource], *, onto: PackAddress | None = None) -> Stored:
        of_base = tenant_id == SYSTEM_TENANT
        self._points.reach("put base" if of_base else "put")
        stored = await super().put(tenant_id, parts, onto=onto)
        if of_base:
            self._points.reach("base put")
        return stored

    async def fetch(self, tenant_id: TenantId, address: str, wanted: Sequence[WantedPart]) -> None:
        self._points.reach("fetch base" if tenant_id == SYSTEM_TENANT else "fetch")
        await super().fetch(tenant_id, address, wanted)


class StickyWorkspace(DirectoryWorkspace):
    """A workspace whose directories cannot be removed while `stuck` holds something."""

    stuck: list[str]

    async def remove(self, vm_id: VmId) -> None:
        if self.stuck:
            raise StoreUnavailable(f"{self.path(vm_id)}: {self.stuck[0]}")
        await super().remove(vm_id)
