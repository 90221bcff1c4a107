"""A snapshot store over a real chunk store and a log in memory."""

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.support.fakes import Outside
from tests.support.points import PointedLog, Points
from tests.support.vm_host_world import fold_view
from torpor_chunks.locations import default_key_file, default_url
from torpor_chunks.master_keys import make_master_keys
from torpor_chunks.object_storage import open_objects
from torpor_chunks.offload import inline
from torpor_chunks.port import Inspected, PackAddress, PartSource, Stored
from torpor_chunks.store import PackStore
from torpor_contracts.checkpoint import (
    CheckpointManifest,
    CheckpointPack,
    CheckpointPart,
    FreeCheckpoint,
    RegisterCheckpoint,
)
from torpor_contracts.ids import CheckpointId, CommandId, HostId, SessionId, TenantId
from torpor_contracts.replies import Receipt
from torpor_contracts.session import MachineSpec, RetryRule, SessionRequested, SessionSuspended, SessionTerminated
from torpor_contracts.session_branches import Lineage, SessionCheckpointed
from torpor_eventlog.codec import decode_event, encode_event
from torpor_eventlog.memory import MemoryDatabase
from torpor_eventlog.port import Commit
from torpor_messaging.service import Incoming
from torpor_snapshot_store import assembly
from torpor_snapshot_store.settings import SnapshotStoreSettings

ACME = TenantId("acme")


class PointedStore(PackStore):
    """The chunk store, with a point before each deletion and after each look at what is to be recorded."""

    points: Points

    async def delete(self, tenant_id: TenantId, address: str) -> bool:
        self.points.reach("delete")
        return await super().delete(tenant_id, address)

    async def verify(self, tenant_id: TenantId, address: str) -> Stored:
        self.points.reach("verify")
        return await super().verify(tenant_id, address)

    async def inspect(self, tenant_id: TenantId, address: str) -> Inspected:
        found = await super().inspect(tenant_id, address)
        self.points.reach("inspected")
        return found


class Put(NamedTuple):
    """What a host puts and then registers."""

    parts: list[CheckpointPart]
    packs: list[CheckpointPack]


class StoreWorld:
    """Everything a snapshot store lives on, and a host that puts parts. Views are folded when a test says so."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.points = Points()
        self.outside = Outside(PointedLog(MemoryDatabase(), self.points))
        objects = open_objects(default_url(root))
        self.chunks = PointedStore(objects, make_master_keys(default_key_file(root)), inline)
        self.chunks.points = self.points
        self.settings = SnapshotStoreSettings(**settings)
        self.service = assembly.build(self.settings, self.outside.ports(), self.chunks)
        self._numbers = itertools.count(1)

    async def put(self, *contents: bytes, onto: Put | None = None, tenant_id: TenantId = ACME) -> Put:
        """Put memory, devices and disk as a host would."""
        sources = []
        for name, content in zip(("memory", "devices", "disk"), contents, strict=True):
            path = self.root / f"part-{next(self._numbers)}"
            path.write_bytes(content)
            sources.append(PartSource(name=name, path=path))
        before = None if onto is None else PackAddress(onto.packs[0].address)
        stored = await self.chunks.put(tenant_id, sources, onto=before)
        parts = [
            CheckpointPart(
                kind=part.name,  # type: ignore[arg-type]
                digest=part.digest,
                size_bytes=part.size_bytes,
                unique_bytes=part.unique_bytes,
            )
            for part in stored.parts
        ]
        return Put(parts, [CheckpointPack(address=one.address, size_bytes=one.size_bytes) for one in stored.packs])

    async def register(
        self, checkpoint_id: str, put: Put, parent: str | None = None, **envelope: Any
    ) -> Receipt | None:
        """Register a checkpoint of session `s-1`."""
        manifest = CheckpointManifest(
            session_id=SessionId(envelope.pop("session_id", "s-1")),
            incarnation=1,
            parent_id=None if parent is None else CheckpointId(parent),
            fingerprint="simulated-1",
            parts=put.parts,
            packs=put.packs,
        )
        return await self.command(
            checkpoint_id, RegisterCheckpoint(host_id=HostId("host-a"), manifest=manifest), **envelope
        )

    async def kept(
        self, checkpoint_id: str, *contents: bytes, parent: str | None = None, onto: Put | None = None
    ) -> Put:
        """Put and register."""
        put = await self.put(*contents, onto=onto)
        assert await self.register(checkpoint_id, put, parent) is not None
        return put

    async def free(self, checkpoint_id: str, **envelope: Any) -> Receipt | None:
        """Free a checkpoint."""
        return await self.command(checkpoint_id, FreeCheckpoint(reason="a test is done with it"), **envelope)

    async def command(self, checkpoint_id: str, command: Any, **envelope: Any) -> Receipt | None:
        """Deliver a command once."""
        incoming = Incoming(
            tenant_id=envelope.get("tenant_id", ACME),
            service="snapshot-store",
            target=checkpoint_id,
            command=command,
            command_id=CommandId(envelope.get("command_id", f"acme/c-{next(self._numbers)}")),
            causation_id="test",
            correlation_id="test",
            request_digest=msgspec.json.encode(command)[-32:].ljust(32, b"."),
            attempt=1,
        )
        return await self.service.commands[0].handle(incoming)

    async def suspended(self, checkpoint_id: str, session_id: str = "s-1") -> None:
        """The session says that it was suspended to this checkpoint."""
        event = SessionSuspended(
            incarnation=1,
            host_id=HostId("host-a"),
            checkpoint_id=CheckpointId(checkpoint_id),
            fingerprint="simulated-1",
            observed_at=self.outside.clock.now(),
        )
        await self.append(session_id, event)

    async def captured(self, checkpoint_id: str, session_id: str = "s-1", label: str = "") -> None:
        """The session says that this checkpoint was taken of it while it ran."""
        now = self.outside.clock.now()
        event = SessionCheckpointed(
            incarnation=1,
            host_id=HostId("host-a"),
            checkpoint_id=CheckpointId(checkpoint_id),
            fingerprint="simulated-1",
            label=label,
            pause_ms=1.0,
            log_position=1,
            taken_at=now,
            observed_at=now,
        )
        await self.append(session_id, event)

    async def forked(self, checkpoint_id: str, session_id: str = "s-2") -> None:
        """A session is made that begins in this checkpoint."""
        event = SessionRequested(
            session_id=SessionId(session_id),
            tenant_id=ACME,
            machine=MachineSpec(),
            idle_after_s=None,
            start_retry=RetryRule(),
            metadata={},
            requested_at=self.outside.clock.now(),
            lineage=Lineage(
                session_id=SessionId("s-1"),
                checkpoint_id=CheckpointId(checkpoint_id),
                fingerprint="simulated-1",
                made_on=HostId("host-a"),
                log_position=1,
            ),
        )
        await self.append(session_id, event)

    async def terminated(self, session_id: str = "s-1") -> None:
        """The session is over."""
        await self.append(session_id, SessionTerminated(incarnation=1, cause="", observed_at=self.outside.clock.now()))

    async def append(self, stream: str, event: msgspec.Struct) -> None:
        """Append an event of another service."""
        await self.outside.log.append(
            Commit(
                command_id=CommandId(f"acme/other-{next(self._numbers)}"),
                tenant_id=ACME,
                causation_id="test",
                correlation_id="test",
                request_digest=b"." * 32,
                occurred_at_us=1,
                expected={stream: len(await self.outside.log.load(stream))},
                events=[encode_event(stream, event)],
            )
        )

    async def tags(self, stream: str) -> list[str]:
        """The types of a stream's events."""
        return [recorded.tag.partition(".")[0] for recorded in await self.outside.log.load(stream)]

    async def last(self, stream: str) -> Any:
        """The newest event of a stream."""
        return decode_event((await self.outside.log.load(stream))[-1])

    async def background(self, name: str) -> None:
        """Run a background route once."""
        (route,) = [route for route in self.service.background if route.name == name]
        await route.run()

    async def sweep(self) -> None:
        """Go round the whole store once."""
        for _ in range(len(await self.chunks.tenants()) + 1):
            await self.background("sweeping")

    async def fold(self) -> None:
        """Bring the view up to the log."""
        await fold_view(self.outside.log, self.outside.views, self.service.projections)

    async def ask(self, type_: str, target: str, tenant_id: str = "acme", **parameters: Any) -> Any:
        """Ask a query."""
        (route,) = [route for route in self.service.queries if route.type == type_]
        return await route.handle(TenantId(tenant_id), target, parameters)

    def packs(self) -> int:
        """How many packs the chunk store holds."""
        return sum(path.is_file() for path in (self.root / "chunks").rglob("pack-*"))

    def path_of(self, put: Put) -> Path:
        """The file that is a put's own pack."""
        (path,) = (self.root / "chunks").rglob(put.packs[0].address)
        return path

    def make_old(self, put: Put, age_s: float) -> None:
        """Let a put's own pack have been put so long ago."""
        path = self.path_of(put)
        put_at = path.stat().st_mtime - age_s
        os.utime(path, (put_at, put_at))
