"""`torpor doctor`, `bench`, `completion` and `version`."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.errors import CannotStart, InvalidRequest

if TYPE_CHECKING:
    from torpor.bench.figures import Figure

REFUSED: Final = 1


def doctor(*, common: Common = DEFAULTS) -> int:
    """Say what this machine can run, and what to do about what it cannot; exit code 1 when the whole cannot start."""
    from torpor.doctor import examine  # noqa: PLC0415

    findings = asyncio.run(examine(common.data))
    sound = all(finding.state != "broken" for finding in findings)
    if common.json:
        printing.emit({"ok": sound, "findings": findings})
        return 0 if sound else REFUSED
    for finding in findings:
        mark = {"ok": "ok    ", "absent": "absent", "broken": "BROKEN"}[finding.state]
        printing.say(f"{mark}  {finding.name}: {finding.detail}")
        if finding.advice:
            printing.say(f"        {finding.advice}")
    printing.say("this machine can run the whole" if sound else "this machine cannot run the whole as it is")
    return 0 if sound else REFUSED


def bench(
    name: Annotated[str, Parameter(help="What to measure, or all.", show_default=False)],
    *,
    common: Common = DEFAULTS,
) -> int:
    """Measure, beside a floor measured in the same run; exit code 1 when a goal was missed."""
    from torpor.bench.figures import Figure, machine  # noqa: PLC0415
    from torpor.bench.finding import find_benches  # noqa: PLC0415

    benches = find_benches()
    if name != "all" and name not in benches:
        raise InvalidRequest(
            "unknown-bench", f"there is no benchmark {name!r}", f"there are: {', '.join(sorted(benches))}, all"
        )
    where = machine()
    figures: list[Figure] = []
    lacking: list[CannotStart] = []
    chosen = [bench for key in sorted(benches) if name in {"all", key} for bench in benches[key]]
    began_s = time.monotonic()

    def say(text: str) -> None:
        printing.note(f"[{time.monotonic() - began_s:6.1f} s] {text}")

    for measure in chosen:
        try:
            found = asyncio.run(measure(say))
        except CannotStart as error:
            lacking.append(error)
            say(f"left out: {error.message}; {error.advice}")
            continue
        fresh = [found] if isinstance(found, Figure) else list(found)
        for figure in fresh:
            say(f"{figure.name}: {figure.value:,.3g} {figure.unit}")
        figures += fresh
    if common.json:
        left_out = [{"code": error.code, "message": error.message, "advice": error.advice} for error in lacking]
        printing.emit({"machine": where, "figures": figures, **({"left_out": left_out} if left_out else {})})
    else:
        _table(figures)
    return 0 if figures and all(figure.ok for figure in figures) else REFUSED


def _table(figures: "list[Figure]") -> None:
    def short(value: float | None) -> str | None:
        return None if value is None else f"{value:,.4g}"

    rows = [
        (
            f.name,
            short(f.value),
            f.unit,
            short(f.floor),
            short(f.ratio),
            f.goal,
            "yes" if f.ok else "NO",
            f.n,
            short(f.p50),
            short(f.p99),
        )
        for f in figures
    ]
    headings = ("figure", "value", "unit", "floor", "ratio", "goal", "met", "n", "p50", "p99")
    printing.table(headings, rows, "nothing was measured")


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Whose script to print.", show_default=False)],
    *,
    common: Common = DEFAULTS,
) -> int:
    """Print the completion script of a shell: `source <(torpor completion bash)`."""
    from torpor.cli.app import app  # noqa: PLC0415

    script = app.generate_completion(prog_name="torpor", shell=shell)
    if common.json:
        printing.emit({"shell": shell, "script": script})
    else:
        printing.say(script)
    return 0


def version(*, common: Common = DEFAULTS) -> int:
    """Print the version."""
    from importlib.metadata import version as installed  # noqa: PLC0415

    if common.json:
        printing.emit({"version": installed("torpor")})
    else:
        printing.say(installed("torpor"))
    return 0
