"""`torpor events`, `usage` and `resources`: what happened, what it cost, what is held."""

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Final

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.client.models import Event

_SUMMARY_MAX: Final = 110
_SHOWN_ELSEWHERE: Final = frozenset({"type", "tenant_id", "boot_id", "fingerprint"})

Session = Annotated[str | None, Parameter(name="--session", help="Only this session's.")]


def events(
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative=(), help="Go on with what comes.")] = False,
    from_: Annotated[int, Parameter(name="--from", help="The first position wanted.")] = 1,
    session: Session = None,
    system: Annotated[bool, Parameter(negative=(), help="The operator's own events: hosts.")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Print the events of the log from a position on; with `--json` one object a line."""

    async def work() -> int:
        async with common.connect("operator" if system else "tenant") as t:
            async for event in t.events(from_position=from_, follow=follow, session_id=session):
                if common.json:
                    printing.emit(_as_json(event))
                else:
                    printing.say(_line(event))
        return 0

    return asyncio.run(work())


def _as_json(event: Event) -> dict[str, object]:
    return {
        "position": event.position,
        "stream": event.stream,
        "version": event.version,
        "type": event.type,
        "occurred_at": event.occurred_at,
        "tenant_id": event.tenant_id,
        "command_id": event.command_id,
        "causation_id": event.causation_id,
        "correlation_id": event.correlation_id,
        "digest": event.digest,
        "data": event.data,
    }


def _line(event: Event) -> str:
    time = event.occurred_at.strftime("%H:%M:%S.%f")[:-3]
    summary = " ".join(f"{key}={value}" for key, value in _told(event))
    if len(summary) > _SUMMARY_MAX:
        summary = summary[: _SUMMARY_MAX - 1] + "…"
    return f"{event.position:>6}  {time}  {event.type:<24}  {event.stream:<36}  {summary}".rstrip()


def _told(event: Event) -> Iterator[tuple[str, object]]:
    """What a line has room for: plain values that no other column shows; all of it is in `--json`."""
    for key, value in event.data.items():
        if key == "program" and isinstance(value, dict):
            yield "argv", " ".join(value.get("argv", []))
            continue
        plain = not isinstance(value, dict | list) and value not in (None, "", event.stream)
        if plain and key not in _SHOWN_ELSEWHERE and not key.endswith("_at"):
            yield key, value


def usage(
    session: Annotated[str | None, Parameter(help="One session; by default all.")] = None, *, common: Common = DEFAULTS
) -> int:
    """Show what was used, line by line, and what it costs."""

    async def work() -> int:
        async with common.connect() as t:
            pages = [page async for page in t.usage(session or "-")]
        if common.json:
            printing.emit(pages)
            return 0
        lines = [line for page in pages for line in page.lines]
        rows = [
            (
                line.session_id,
                line.kind,
                line.charged_from,
                line.charged_until,
                _short(line.seconds),
                _short(line.vcpu_seconds),
                _short(line.gib_seconds),
                f"{line.opened_position}-{line.closed_position or ''}",
                _short(line.amount, 6),
            )
            for line in lines
        ]
        headings = ("session", "kind", "from", "until", "seconds", "vcpu s", "GiB s", "positions", "amount")
        printing.table(headings, rows, "nothing was used yet")
        total = sum((page.totals.amount for page in pages), Decimal(0))
        printing.say(f"total {_short(total, 6)} {pages[0].currency}, up to position {pages[-1].position} of the log")
        for alarm in (alarm for page in pages for alarm in page.alarms):
            printing.note(f"torpor: {alarm.meter_id}: {alarm.cause}\n  {alarm.advice}")
        return 0

    return asyncio.run(work())


def _short(number: Decimal, digits: int = 1) -> str:
    return f"{number:.{digits}f}"


def resources(
    session: Annotated[str | None, Parameter(help="One session; by default all.")] = None,
    *,
    held: Annotated[bool, Parameter(negative=(), help="Only what is still held.")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Show what machines hold or held on their hosts, and why what is over is still there."""

    async def work() -> int:
        async with common.connect() as t:
            pages = [page async for page in t.resources(session or "-", held_only=held)]
        if common.json:
            printing.emit(pages)
            return 0
        rows = [
            (r.kind, r.name, r.session_id, r.vm_id, r.claimed_at, r.released_at or "held", r.why_not_yet)
            for page in pages
            for r in page.resources
        ]
        headings = ("kind", "name", "session", "vm", "claimed", "released", "waits for")
        printing.table(headings, rows, "no machine holds anything")
        return 0

    return asyncio.run(work())
