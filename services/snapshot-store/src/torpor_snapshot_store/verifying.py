"""Reads checkpoints whole when somebody asks, each once at a time however often it is asked for."""

import asyncio
from collections import OrderedDict
from typing import Final

from torpor_chunks.port import ChunkError, ChunkStore
from torpor_contracts.checkpoint import CheckpointVerification
from torpor_contracts.errors import Transient
from torpor_contracts.ids import CheckpointId
from torpor_messaging.ports import Clock
from torpor_snapshot_store.projections import CheckpointRow

AT_ONCE: Final = 2
WAITING_MAX: Final = 64
KEPT_MAX: Final = 64
KEPT_S: Final = 3.0
"""A question that waited too long is asked again: the answer to the first is there for so long."""


class Verifying:
    """Verifies checkpoints; `stop` ends what is under way."""

    def __init__(self, chunks: ChunkStore, clock: Clock) -> None:
        self._chunks = chunks
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._running: dict[CheckpointId, asyncio.Task[CheckpointVerification]] = {}
        self._done: OrderedDict[CheckpointId, tuple[float, CheckpointVerification]] = OrderedDict()

    async def verify(self, row: CheckpointRow) -> CheckpointVerification:
        """What reading the checkpoint shows; raises `Transient` when too many are being read."""
        checkpoint_id = row.checkpoint_id
        known = self._done.get(checkpoint_id)
        if known is not None and self._clock.monotonic_s() - known[0] < KEPT_S:
            return known[1]
        running = self._running.get(checkpoint_id)
        if running is None:
            if len(self._running) >= WAITING_MAX:
                raise Transient(f"{WAITING_MAX} checkpoints are being verified already", retry_after_s=5.0)
            running = asyncio.get_running_loop().create_task(self._read(row), name=f"verify {checkpoint_id}")
            self._running[checkpoint_id] = running
            running.add_done_callback(lambda _: self._running.pop(checkpoint_id, None))
        # Who asks no longer does not end it for others, who may have joined.
        return await asyncio.shield(running)

    async def stop(self) -> None:
        """End what is under way."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _read(self, row: CheckpointRow) -> CheckpointVerification:
        async with self._slots:
            began_s = self._clock.monotonic_s()
            code, detail = "", ""
            packs = row.manifest.packs
            try:
                if not packs:
                    code, detail = "checkpoint-part-missing", "it was kept by an earlier release, in no pack"
                else:
                    stored = await self._chunks.verify(row.tenant_id, packs[0].address)
                    wrong = _differences(row, {part.name: part.digest for part in stored.parts})
                    if wrong:
                        code, detail = "checkpoint-part-corrupt", f"{', '.join(wrong)}: not what was registered"
            except ChunkError as error:
                code, detail = error.code, str(error)
            ended_s = self._clock.monotonic_s()
        found = CheckpointVerification(
            checkpoint_id=row.checkpoint_id,
            ok=not code,
            code=code,
            detail=detail,
            size_bytes=sum(part.size_bytes for part in row.manifest.parts),
            packs=packs,
            took_ms=round(1000 * (ended_s - began_s)),
        )
        self._done[row.checkpoint_id] = ended_s, found
        while len(self._done) > KEPT_MAX:
            self._done.popitem(last=False)
        return found


def _differences(row: CheckpointRow, digests: dict[str, str]) -> list[str]:
    return [part.kind for part in row.manifest.parts if digests.get(part.kind) != part.digest]
