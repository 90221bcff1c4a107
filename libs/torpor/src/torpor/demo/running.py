"""The demo from beginning to end: a directory, a whole, the story, what the log proves, and nothing left behind."""

import shutil
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from torpor.client.api import Torpor, connect
from torpor.demo.stage import Stage, raised
from torpor.demo.story import Story, timeline_lines
from torpor.demo.telling import Telling
from torpor.embedded.layout import DataDir, default_data_dir
from torpor.errors import CannotStart
from torpor.evidence import Evidence
from torpor_eventlog.audit.findings import silent


def own_directory(given: Path | None) -> DataDir:
    """A directory for this demo alone: an earlier demo's is emptied, another whole's is refused."""
    data = DataDir.choose(given or default_data_dir().with_name("torpor-demo"))
    if data.root.exists() and any(data.root.iterdir()):
        mark = data.root / MARK
        if not mark.exists():
            raise CannotStart(
                "not-a-demo", f"{data.root} is no demo's directory", "name an empty one, or a new one, with --data-dir"
            )
        from torpor.embedded import runfile  # noqa: PLC0415

        run = runfile.read(data)
        if run is not None and run.supervisor_runs():
            raise CannotStart(
                "demo-runs", f"a demo runs on {data.root}", f"stop it: torpor down --data-dir {data.root}"
            )
        shutil.rmtree(data.root)
    data.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    (data.root / MARK).touch()
    return data


MARK: Final = "this-is-a-demo"


async def demo(data: DataDir, driver: str, *, keep: bool, as_json: bool) -> dict[str, Any]:
    """Tell the story on a whole of its own; all of it as data. Raises `NotSo`, `CannotStart`, or the SDK's errors."""
    telling = Telling(to=sys.stderr if as_json else sys.stdout)
    telling.chapter(f"Torpor, on {data.root}")
    async with raised(data, driver, telling, keep=keep) as stage:
        telling.say("server and services are ready", telling.figure("up_s", time.monotonic() - telling.began_s))
        async with connect(data_dir=data.root) as torpor:
            story = Story(torpor, stage, telling)
            facts = await story.tell()
            facts |= await _proved(story)
    if not keep:
        left = stage.left()
        telling.claim("nothing is left running", holds=not left, found=left or "nothing")
    telling.figure("all_s", time.monotonic() - telling.began_s)
    _farewell(data, telling, stage, keep=keep)
    return {**facts, "figures": telling.figures, "claims": telling.claims, "data_dir": str(data.root), "kept_up": keep}


async def _proved(story: Story) -> dict[str, Any]:
    telling = story.telling
    telling.chapter("What happened, as the log has it (position, time, who, what)")
    events = await story.timeline()
    for line in timeline_lines(events):
        telling.say(line)
    telling.chapter("The evidence, and the bill so far")
    began_s = time.monotonic()
    verified, with_stream = await Evidence(story.stage.data).verify(silent)
    sound = verified.ok and with_stream
    telling.claim("the log proves itself", holds=sound, found=[str(one) for one in verified.findings] or "sound")
    told = (
        f"audit: {verified.rows} events, {verified.heads} signed heads, {verified.stream_messages} messages: all sound"
    )
    telling.say(told, time.monotonic() - began_s)
    bill = await _bill(story.torpor)
    telling.say(
        f"used: {bill['running_s']} s of machines, {bill['gib_s']} GiB s of memory: {bill['amount']} {bill['currency']}"
    )
    timeline = [
        {"position": one.position, "at": one.occurred_at.isoformat(), "session": one.stream, "type": one.type}
        for one in events
    ]
    return {
        "timeline": timeline,
        "audit": {"ok": sound, "events": verified.rows, "root": verified.root, "signed_heads": verified.heads},
        "bill": bill,
    }


async def _bill(torpor: Torpor) -> dict[str, str]:
    running, gib, amount, currency = Decimal(0), Decimal(0), Decimal(0), ""
    async for page in torpor.usage():
        running += page.totals.running_seconds
        gib += page.totals.gib_seconds
        amount += page.totals.amount
        currency = page.currency
    return {"running_s": f"{running:.1f}", "gib_s": f"{gib:.1f}", "amount": f"{amount:.6f}", "currency": currency}


def _farewell(data: DataDir, telling: Telling, stage: Stage, *, keep: bool) -> None:
    telling.chapter(f"All {len(telling.claims)} statements were checked, and are so")
    telling.say("from the first line to this one", telling.figures["all_s"])
    if keep:
        telling.say(f"it goes on: torpor session list --data-dir {data.root}")
        telling.say(f"stop it with: torpor down --data-dir {data.root}")
    else:
        telling.say(f"nothing is left running; the log and its proofs stay in {stage.data.root}")
