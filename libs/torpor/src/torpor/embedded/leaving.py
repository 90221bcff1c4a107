"""Puts every session to sleep before the whole stops, so that no machine is left that nobody looks after.

`python -m torpor.embedded.leaving OPTIONS` is run by the supervisor when it is told to stop. Sessions with programs
that run are noted, and woken again by the next start: their programs go on. What cannot be put to sleep runs on, and
is adopted by the next start; nothing is ever destroyed here.
"""

import asyncio
import json
import logging
import sys
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Final

from torpor.client.api import Torpor, connect
from torpor.embedded.layout import DataDir
from torpor.errors import Refused
from torpor_contracts.errors import TorporError
from torpor_contracts.scheduling import SessionState, SessionView

AWAKE: Final[tuple[SessionState, ...]] = ("running", "suspending", "starting", "resuming", "terminating")
"""The states in which a session has a machine, or is about to get one."""
SUSPENDS_MAX: Final = 3
"""How often a session is asked to sleep that does not."""
LOOK_S: Final = 0.05
CALL_S: Final = 10.0


async def put_to_sleep(torpor: Torpor, noted: Path, timeout_s: float) -> tuple[int, list[str]]:
    """Suspend what runs until nothing does; how many fell asleep, and which had not after `timeout_s`."""
    asked: Counter[str] = Counter()
    asleep: set[str] = set()
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    awake = await _awake(torpor, 0)
    while awake and asyncio.get_running_loop().time() < deadline_s:
        asleep |= {view.session_id for view in awake}
        ready = [view for view in awake if view.state == "running" and asked[view.session_id] < SUSPENDS_MAX]
        _note(noted, [view.session_id for view in ready if any(program.started_at for program in view.execs)])
        asked.update(view.session_id for view in ready)
        positions = await asyncio.gather(*(_suspend(torpor, view) for view in ready))
        if not ready:
            if all(view.state == "running" for view in awake):
                break  # each has been asked, and did not
            await asyncio.sleep(LOOK_S)
        awake = await _awake(torpor, max(positions, default=0))
    left: list[str] = [view.session_id for view in awake]
    return len(asleep.difference(left)), left


async def wake_again(torpor: Torpor, noted: Path) -> int:
    """Resume the sessions whose programs were interrupted; how many. Those that need it no more are left alone."""
    woken = 0
    for session_id in _read(noted):
        try:
            await torpor.sessions.handle(session_id).resume(wait=False, timeout_s=CALL_S)
        except Refused:  # it runs, or it has ended
            continue
        woken += 1
    await asyncio.to_thread(noted.unlink, missing_ok=True)
    return woken


async def _awake(torpor: Torpor, at_least: int) -> list[SessionView]:
    found: dict[str, SessionView] = {}
    for state in AWAKE:
        async with aclosing(torpor.sessions.list(state=state, at_least=at_least)) as sessions:
            async for view in sessions:
                found[view.session_id] = view
    return list(found.values())


async def _suspend(torpor: Torpor, view: SessionView) -> int:
    """The position of the receipt; 0 when it was refused: what the session is now is looked at again."""
    try:
        receipt = await torpor.sessions.handle(view.session_id).suspend(
            incarnation=view.incarnation, wait=False, timeout_s=CALL_S
        )
    except Refused:
        return 0
    return receipt.position


def _read(noted: Path) -> list[str]:
    try:
        found = json.loads(noted.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _note(noted: Path, session_ids: list[str]) -> None:
    if session_ids:
        fresh = noted.with_suffix(".new")
        fresh.write_text(json.dumps(sorted({*_read(noted), *session_ids})), encoding="utf-8")
        fresh.replace(noted)


async def _leave(data: DataDir, timeout_s: float) -> tuple[int, list[str]]:
    async with connect(data_dir=data.root) as torpor:
        return await put_to_sleep(torpor, data.interrupted, timeout_s)


def main() -> int:
    """Read the options, put to sleep, tell; the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    options = json.loads(sys.argv[1])
    try:
        asleep, left = asyncio.run(_leave(DataDir(Path(options["data_dir"])), float(options["timeout_s"])))
    except (TorporError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps({"asleep": asleep, "left": left}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
