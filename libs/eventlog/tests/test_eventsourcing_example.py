"""The example of docs/eventsourcing.md does what it says."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from torpor_contracts.ids import SessionId, TenantId
from torpor_contracts.session import MachineSpec, RetryRule, SessionFailed, SessionRequested, SessionTerminated
from torpor_eventlog.sqlite import SqliteLog

Grow = Callable[..., Awaitable[None]]
DOCUMENT = Path(__file__).parents[1] / "docs" / "eventsourcing.md"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BOUND_S = 10.0


def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


def requested(session: str, tenant: str = "acme") -> SessionRequested:
    return SessionRequested(
        session_id=SessionId(session),
        tenant_id=TenantId(tenant),
        machine=MachineSpec(),
        idle_after_s=None,
        start_retry=RetryRule(),
        metadata={},
        requested_at=NOON,
    )


def terminated() -> SessionTerminated:
    return SessionTerminated(incarnation=1, cause="client", observed_at=NOON)


def failed() -> SessionFailed:
    return SessionFailed(incarnation=1, code="x", detail="", way_out="", observed_at=NOON)


def test_the_example_follows_sessions_and_goes_on_where_it_was(tmp_path: Path, grow: Grow) -> None:
    def write(stream: str, *events: msgspec.Struct) -> int:
        async def append() -> int:
            log = await SqliteLog.open(tmp_path / "log.db")
            await grow(log, stream, *events)
            position = (await log.head()).position
            await log.close()
            return position

        return asyncio.run(append())

    following = example()["following"]
    write("s-1", requested("s-1"))
    write("s-2", requested("s-2"))
    position = write("s-3", requested("s-3", tenant="other"))
    place = f"sqlite:///{tmp_path / 'log.db'}", str(tmp_path / "view.db")
    with following(*place) as runner:
        runner.wait(position, timeout=BOUND_S)
        assert runner.projection.view.of("acme") == ["s-1", "s-2"]
        position = write("s-1", terminated())
        runner.wait(position, timeout=BOUND_S)
        assert runner.projection.view.of("acme") == ["s-2"]
    position = write("s-2", failed())
    with following(*place) as runner:
        runner.wait(position, timeout=BOUND_S)
        assert runner.projection.view.of("acme") == []
        assert runner.projection.view.of("other") == ["s-3"]
