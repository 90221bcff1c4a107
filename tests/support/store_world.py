"""A snapshot store over a real chunk store and a log in memory."""

import itertools
from pathlib import Path
from typing import Any

import msgspec

from tests.support.fakes import Outside
from tests.support.points import PointedLog, Points
from tests.support.vm_host_world import fold_view
from torpor_chunks.directory import DirectoryChunks
from torpor_chunks.offload import inline
from torpor_contracts.checkpoint import CheckpointManifest, CheckpointPart, FreeCheckpoint, RegisterCheckpoint
from torpor_contracts.ids import CheckpointId, CommandId, HostId, SessionId, TenantId
from torpor_contracts.replies import Receipt
from torpor_contracts.session import SessionSuspended, SessionTerminated
from torpor_eventlog.codec import decode_event, encode_event
from torpor_eventlog.memory import MemoryDatabase
from torpor_eventlog.port import Commit
from torpor_messaging.service import Incoming
from torpor_snapshot_store import assembly
from torpor_snapshot_store.settings import SnapshotStoreSettings

ACME = TenantId("acme")


class PointedStore(DirectoryChunks):
    """The chunk store, with a point before each deletion and after each verification."""

    points: Points

    async def delete(self, digest: str) -> bool:
        self.points.reach("delete")
        return await super().delete(digest)

    async def verify(self, digest: str, size_bytes: int) -> None:
        await super().verify(digest, size_bytes)
        self.points.reach("verified")


class StoreWorld:
    """Everything a snapshot store lives on, and a host that puts parts. Views are folded when a test says so."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.points = Points()
        self.outside = Outside(PointedLog(MemoryDatabase(), self.points))
        self.chunks = PointedStore(root / "store", offload=inline)
        self.chunks.points = self.points
        self.service = assembly.build(SnapshotStoreSettings(), self.outside.ports(), self.chunks)
        self._numbers = itertools.count(1)

    async def put(self, *contents: bytes) -> list[CheckpointPart]:
        """Put parts as a host would."""
        parts = []
        for kind, content in zip(("memory", "devices", "disk"), contents, strict=True):
            path = self.root / f"part-{next(self._numbers)}"
            path.write_bytes(content)
            stored = await self.chunks.put(path)
            parts.append(
                CheckpointPart(
                    kind=kind,  # type: ignore[arg-type]
                    digest=stored.digest,
                    size_bytes=stored.size_bytes,
                    unique_bytes=stored.unique_bytes,
                )
            )
        return parts

    async def register(
        self, checkpoint_id: str, parts: list[CheckpointPart], parent: str | None = None, **envelope: Any
    ) -> Receipt | None:
        """Register a checkpoint of session `s-1`."""
        manifest = CheckpointManifest(
            session_id=SessionId(envelope.pop("session_id", "s-1")),
            incarnation=1,
            parent_id=None if parent is None else CheckpointId(parent),
            fingerprint="simulated-1",
            parts=parts,
        )
        return await self.command(
            checkpoint_id, RegisterCheckpoint(host_id=HostId("host-a"), manifest=manifest), **envelope
        )

    async def kept(self, checkpoint_id: str, *contents: bytes, parent: str | None = None) -> list[CheckpointPart]:
        """Put and register."""
        parts = await self.put(*contents)
        assert await self.register(checkpoint_id, parts, parent) is not None
        return parts

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

    async def fold(self) -> None:
        """Bring the view up to the log."""
        await fold_view(self.outside.log, self.outside.views, self.service.projections)

    async def ask(self, type_: str, target: str, tenant_id: str = "acme", **parameters: Any) -> Any:
        """Ask a query."""
        (route,) = [route for route in self.service.queries if route.type == type_]
        return await route.handle(TenantId(tenant_id), target, parameters)

    def parts(self) -> int:
        """How many parts the chunk store holds."""
        return sum(path.is_file() for path in (self.root / "store" / "sha256").rglob("*"))

    def path_of(self, part: CheckpointPart) -> Path:
        """The file that holds a part."""
        (path,) = (self.root / "store" / "sha256").rglob(part.digest.removeprefix("sha256:"))
        return path
