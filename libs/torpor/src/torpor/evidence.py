"""The audit of one whole: which log, copies, views and keys belong to its data directory, and what is done with them.

What proves and rebuilds is in `torpor_eventlog.audit`; here is only where to find things.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from torpor.embedded import runfile
from torpor.embedded.answering import operator
from torpor.embedded.layout import DataDir
from torpor.embedded.runfile import Run
from torpor.embedded.settings import sqlite_dsn, views_file
from torpor.errors import Refused, Unavailable
from torpor_contracts.ids import SessionId
from torpor_eventlog.audit.bundle import BundleVerified, Exported, export_session, verify_bundle
from torpor_eventlog.audit.findings import Finding, OnProgress
from torpor_eventlog.audit.rebuild_stream import StreamRebuilt, rebuild_stream
from torpor_eventlog.audit.rebuild_views import ViewRebuilt, rebuild_view
from torpor_eventlog.audit.replay import Step, replay
from torpor_eventlog.audit.verify import KeptHead, Verified, open_heads, verify
from torpor_eventlog.heads import HeadsFile
from torpor_eventlog.notes import SigningKey, VerifierKey
from torpor_eventlog.opening import open_log
from torpor_eventlog.port import EventLog
from torpor_eventlog.views_port import Projection
from torpor_messaging.nats_events import NatsEventStream
from torpor_messaging.nats_link import Identity, Link

CONNECT_S: Final = 5.0
HEAD_WAIT_S: Final = 15.0
"""How long an export waits for a signed head that covers the session; heads are signed every few seconds."""


class Evidence:
    """The evidence of one data directory, whether its whole runs or not."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        run = runfile.read(data)
        self._run = run if run is not None and run.supervisor_runs() else None

    async def verify(self, on_progress: OnProgress) -> tuple[Verified, bool]:
        """Verify the log, and the stream when there is a server to read it from; whether there was."""
        kept, refused = await self._kept_heads()
        async with self._log() as log:
            if self._run is None:
                return await verify(log, kept, refused=refused, on_progress=on_progress), False
            async with _link(self._run, operator(self._run.operator_seed_file)) as link:
                stream = NatsEventStream(link)
                return await verify(log, kept, stream, refused=refused, on_progress=on_progress), True

    async def rebuild_stream(self, on_progress: OnProgress) -> StreamRebuilt:
        """Make the stream afresh, with the administrator's key."""
        if self._run is None:
            raise Unavailable(
                f"no Torpor runs on {self._data.root}, so there is no stream to make", "start it: `torpor up`"
            )
        admin = Identity("admin", "_INBOX.system.admin", Path(self._run.admin_seed_file))
        async with self._log() as log, _link(self._run, admin) as link:
            return await rebuild_stream(log, NatsEventStream(link), on_progress)

    async def rebuild_views(self, on_progress: OnProgress) -> list[tuple[str, ViewRebuilt]]:
        """Refold every view of every service that has been made here, and put right what differs."""
        from torpor_eventlog.views_sqlite import SqliteViewStore  # noqa: PLC0415

        rebuilt = []
        async with self._log() as log:
            for service, projection in projections():
                file = views_file(self._data, service)
                if not file.exists():
                    continue
                live = SqliteViewStore(file)
                with tempfile.TemporaryDirectory(dir=self._data.root, prefix=".refold-") as place:
                    scratch = SqliteViewStore(Path(place) / "views.db")
                    try:
                        found = await rebuild_view(log, projection, live, scratch, on_progress=on_progress)
                    finally:
                        await scratch.close()
                        await live.close()
                rebuilt.append((service, found))
        return rebuilt

    async def export(self, session_id: str, on_progress: OnProgress) -> Exported:
        """A session's evidence under the newest signed head; waits a little for one that covers all of it."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + (HEAD_WAIT_S if self._run else 0.0)
        key = self.public_key()
        async with self._log() as log:
            while True:
                note, size = await self._newest_head(key)
                covers = size >= (await log.head()).position or loop.time() >= give_up_at_s
                if covers or await self._covers(log, session_id, size):
                    return await export_session(log, SessionId(session_id), note, size, on_progress)
                await asyncio.sleep(0.2)

    def verify_bundle(self, content: bytes, key: VerifierKey | None) -> BundleVerified:
        """Check a bundle with the public key given, or with this directory's."""
        return verify_bundle(content, (key or self.public_key()).open_checkpoint)

    def public_key(self) -> VerifierKey:
        """The key that this directory's log is signed with."""
        if not self._data.signing_key.exists():
            raise Refused(
                "no-public-key",
                f"{self._data.root} has no signing key, so nothing here can be checked against it",
                "give the log's public key with --public-key, as `torpor audit export` has printed it",
            )
        return SigningKey.load(self._data.signing_key).verifier

    async def _newest_head(self, key: VerifierKey) -> tuple[str, int]:
        note = await HeadsFile(self._data.heads_file).newest()
        if note is None:
            raise Refused(
                "no-signed-head", "no head of this log has been signed yet", "wait some seconds while `torpor up` runs"
            )
        return note, key.open_checkpoint(note).size

    async def _kept_heads(self) -> tuple[list[KeptHead], list[Finding]]:
        """Every head in the file, opened; one that our key has not signed is a finding of its own."""
        notes = await HeadsFile(self._data.heads_file).all()
        if not notes:
            return [], []
        return open_heads(notes, self.public_key().open_checkpoint, str(self._data.heads_file))

    @staticmethod
    async def _covers(log: EventLog, session_id: str, size: int) -> bool:
        rows = await log.load(session_id)
        return bool(rows) and rows[-1].position <= size

    async def replay(self, session_id: str, up_to_version: int | None) -> AsyncGenerator[Step[Any], None]:
        """A session's events with the state after each."""
        from torpor_scheduler.domain.folding import evolve  # noqa: PLC0415
        from torpor_scheduler.domain.session import Session  # noqa: PLC0415

        async with self._log() as log:
            found = False
            async for step in replay(log, session_id, Session(), evolve, up_to_version=up_to_version):
                found = True
                yield step
            if not found:
                raise Refused(
                    "session-not-found", f"the log knows no session {session_id}", "see `torpor session list`"
                )

    @asynccontextmanager
    async def _log(self) -> AsyncIterator[EventLog]:
        if self._run is None and not self._data.log_database.exists():
            raise Refused("no-log", f"there is no log in {self._data.root}", "name a whole's directory with --data-dir")
        log = await open_log(self._run.log_dsn if self._run else sqlite_dsn(self._data.log_database))
        try:
            yield log
        finally:
            await log.close()


@asynccontextmanager
async def _link(run: Run, identity: Identity) -> AsyncIterator[Link]:
    link = await Link.open(run.nats_url, identity, timeout_s=CONNECT_S)
    try:
        yield link
    finally:
        await link.close()


def projections() -> list[tuple[str, Projection]]:
    """Every projection of every service, with the service whose views it makes."""
    from torpor_billing.projections import Meters  # noqa: PLC0415  (only a rebuild needs them all)
    from torpor_reaper.projections import Resources  # noqa: PLC0415
    from torpor_scheduler.projections import Views  # noqa: PLC0415
    from torpor_snapshot_store.projections import Checkpoints  # noqa: PLC0415
    from torpor_vm_host.projections import Vms  # noqa: PLC0415

    return [
        ("scheduler", Views()),
        ("vm-host", Vms()),
        ("snapshot-store", Checkpoints()),
        ("billing", Meters()),
        ("reaper", Resources()),
    ]
