"""`torpor audit …`."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.errors import InvalidRequest

if TYPE_CHECKING:
    from torpor_eventlog.audit.findings import Finding, OnProgress

REFUSED: Final = 1
_PROGRESS_EVERY_S: Final = 1.0


def verify_(
    file: Annotated[Path | None, Parameter(help="A bundle to check instead, off-line.")] = None,
    *,
    public_key: Annotated[
        str | None,
        Parameter(help="The log's public key, or a file with it, to check a bundle (by default the data directory's)."),
    ] = None,
    common: Common = DEFAULTS,
) -> int:
    """Check the whole log against its digests and signed heads, and its copy in NATS when that runs.

    Exit code 1 when anything is found.
    """
    if file is not None:
        return _verify_bundle(file, public_key, common)
    from torpor.evidence import Evidence  # noqa: PLC0415

    verified, with_stream = asyncio.run(Evidence(common.data).verify(_progress(common)))
    if common.json:
        printing.emit(
            {
                **_fields(verified),
                "ok": verified.ok,
                "first_bad_position": verified.first_bad_position,
                "stream": with_stream,
            }
        )
    else:
        printing.pairs(
            {
                "log": f"{verified.rows} events, up to position {verified.position}",
                "root": verified.root,
                "signed heads": f"{verified.heads} kept outside the log",
                "stream": f"{verified.stream_messages} messages" if with_stream else "not read: nothing runs here",
            }
        )
        _show_findings(verified.findings, verified.findings_total)
    return 0 if verified.ok else REFUSED


def _text_of(public_key: str) -> str:
    named = Path(public_key)
    return named.read_text(encoding="utf-8") if "+" not in public_key or named.is_file() else public_key


def _verify_bundle(file: Path, public_key: str | None, common: Common) -> int:
    from torpor.evidence import Evidence  # noqa: PLC0415
    from torpor_eventlog.notes import VerifierKey  # noqa: PLC0415

    key = None if public_key is None else VerifierKey.parse(_text_of(public_key))
    verified = Evidence(common.data).verify_bundle(file.read_bytes(), key)
    if common.json:
        printing.emit({**_fields(verified), "ok": verified.ok})
    else:
        printing.pairs(
            {
                "session": verified.session_id,
                "events": f"{verified.events} in {len(verified.streams)} streams",
                "signed head": f"over {verified.head_size} events of the log",
            }
        )
        _show_findings(verified.findings, verified.findings_total)
    return 0 if verified.ok else REFUSED


def export_(
    file: Annotated[Path, Parameter(help="Where to write the bundle.", show_default=False)],
    *,
    session: Annotated[str, Parameter(help="Whose events.", show_default=False)],
    common: Common = DEFAULTS,
) -> int:
    """Write a session's events with their proofs, which `torpor audit verify FILE` checks with the public key alone."""
    from torpor.evidence import Evidence  # noqa: PLC0415

    evidence = Evidence(common.data)
    exported = asyncio.run(evidence.export(session, _progress(common)))
    file.write_bytes(exported.content)
    answer = {
        "file": str(file.absolute()),
        "session_id": exported.session_id,
        "events": exported.events,
        "streams": exported.streams,
        "head_size": exported.head_size,
        "left_out": exported.left_out,
        "public_key": str(evidence.public_key()),
    }
    if common.json:
        printing.emit(answer)
    else:
        printing.say(f"{file}: {exported.events} events of {exported.streams} streams, proved by a signed head")
        printing.say(f"anybody can check it: torpor audit verify {file} --public-key {answer['public_key']}")
        if exported.left_out:
            printing.note(f"torpor: {exported.left_out} newer events are not covered by a signed head yet")
    return 0


def rebuild_(
    *,
    stream: Annotated[bool, Parameter(negative=(), help="The copy of the log in NATS.")] = False,
    views: Annotated[bool, Parameter(negative=(), help="The views of every service.")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Make the stream, or all views, afresh from the log; reports what was different. Services may be running."""
    if not stream and not views:
        raise InvalidRequest("nothing-named", "say what to rebuild", "torpor audit rebuild --stream, or --views")
    from torpor.evidence import Evidence  # noqa: PLC0415

    evidence, sound = Evidence(common.data), True
    answer: dict[str, object] = {}
    if stream:
        rebuilt = asyncio.run(evidence.rebuild_stream(_progress(common)))
        answer |= _fields(rebuilt)
        if not common.json:
            printing.say(f"stream EVENTS: made afresh, {rebuilt.position} messages")
    if views:
        found = asyncio.run(evidence.rebuild_views(_progress(common)))
        sound = all(view.ok for _, view in found)
        answer["views"] = [{"service": service, **_fields(view)} for service, view in found]
        if not common.json:
            rows = [
                (service, view.projection, view.rows, view.position, view.differences_total, view.unfoldable_total)
                for service, view in found
            ]
            headings = ("service", "view", "rows", "position", "differences", "unfoldable")
            printing.table(headings, rows, "no service has made a view here yet")
            for service, view in found:
                for difference in view.differences:
                    printing.say(f"{service}: {difference.table} {difference.key}: was {difference.live}")
    if common.json:
        printing.emit({**answer, "ok": sound})
    return 0 if sound else REFUSED


def replay_(
    session: Annotated[str, Parameter(help="Whose history.", show_default=False)],
    *,
    up_to_version: Annotated[int | None, Parameter(help="Stop after this version of the session.")] = None,
    common: Common = DEFAULTS,
) -> int:
    """Print a session's events with the state after each, folded by today's code; with `--json` one object a line."""
    from torpor.evidence import Evidence  # noqa: PLC0415

    async def work() -> None:
        async for step in Evidence(common.data).replay(session, up_to_version):
            row = step.recorded
            if common.json:
                printing.emit({
                    "position": row.position, "version": row.version, "type": row.tag, "event": step.event,
                    "state": step.state,
                })  # fmt: skip
            else:
                printing.say(f"{row.position:>6}  {row.version:>4}  {row.tag:<26}  {step.state.phase}")

    asyncio.run(work())
    return 0


def _progress(common: Common) -> "OnProgress":
    shown_s = time.monotonic()

    def progress(what: str, done: int, of: int) -> None:
        nonlocal shown_s
        if not common.json and time.monotonic() - shown_s >= _PROGRESS_EVERY_S:
            shown_s = time.monotonic()
            printing.note(f"{what}: {done} of {of}")

    return progress


def _show_findings(findings: "list[Finding]", total: int) -> None:
    if not total:
        printing.say("nothing is wrong")
        return
    for finding in findings:
        printing.say(f"{finding.place} at {finding.position}: {finding.kind}: {finding.detail}")
    if total > len(findings):
        printing.say(f"and {total - len(findings)} more")


def _fields(struct: object) -> dict[str, object]:
    from msgspec import structs  # noqa: PLC0415

    return structs.asdict(struct)  # type: ignore[arg-type]
