"""`torpor checkpoint …`."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.client.api import Torpor
from torpor_contracts.checkpoint import CheckpointVerification, CheckpointView

DAMAGED: Final = 1
SHOWN_MAX: Final = 10_000
"""Checkpoints that a tree is made of, at most."""

SessionId = Annotated[str | None, Parameter(help="Only those of this session.")]


def list_(session_id: SessionId = None, *, common: Common = DEFAULTS) -> int:
    """List checkpoints: what each is of, what it takes, and what keeps it."""

    async def work() -> int:
        async with common.connect() as t:
            views = [view async for view in t.checkpoints.list(session_id or "-")]
        if common.json:
            printing.emit(views)
            return 0
        rows = [
            (
                view.checkpoint_id,
                f"{view.session_id}/{view.incarnation}",
                view.state,
                view.label,
                _mib(view.size_bytes),
                _mib(view.stored_bytes),
                view.recorded_at,
                ", ".join(view.pinned_by),
            )
            for view in views
        ]
        printing.table(
            ("checkpoint", "session", "state", "label", "MiB", "stored MiB", "made", "kept for"),
            rows,
            "no checkpoints yet; a session makes one when it falls asleep, or by `torpor checkpoint create`",
        )
        return 0

    return asyncio.run(work())


def tree_(session_id: SessionId = None, *, common: Common = DEFAULTS) -> int:
    """Show which checkpoint was made after which, across forks; with a session, the trees it has a part in."""

    async def work() -> int:
        async with common.connect() as t:
            views = await _all(t)
        trees = list(_trees(views, session_id))
        if common.json:
            printing.emit([_fields(depth, view) for tree in trees for depth, view in _walk(*tree)])
            return 0
        for root, children in trees:
            for line in _drawn(root, children):
                printing.say(line)
        if not trees:
            printing.say(
                "no checkpoints yet; a session makes one when it falls asleep, or by `torpor checkpoint create`"
            )
        return 0

    return asyncio.run(work())


def verify_(
    *checkpoint_ids: Annotated[str, Parameter(help="The checkpoints to read; by default all that are kept.")],
    common: Common = DEFAULTS,
) -> int:
    """Read checkpoints whole, and compare every chunk and every part with its digest.

    Exit code 1 when anything is damaged or missing.
    """

    async def work() -> int:
        async with common.connect() as t:
            wanted = list(checkpoint_ids) or [view.checkpoint_id for view in await _all(t) if view.state == "kept"]
            found: list[CheckpointVerification] = []
            for checkpoint_id in wanted:
                one = await t.checkpoints.verify(checkpoint_id)
                found.append(one)
                if not common.json:
                    verdict = "whole" if one.ok else f"{one.code}: {one.detail}"
                    size = f"{_mib(one.size_bytes)} MiB in {len(one.packs)} packs, {one.took_ms} ms"
                    printing.say(f"{one.checkpoint_id}  {verdict}  ({size})")
        if common.json:
            printing.emit({"ok": all(one.ok for one in found), "checkpoints": found})
        elif not found:
            printing.say("no checkpoints are kept")
        return 0 if all(one.ok for one in found) else DAMAGED

    return asyncio.run(work())


async def _all(t: Torpor) -> list[CheckpointView]:
    views: list[CheckpointView] = []
    async for view in t.checkpoints.list():
        views.append(view)
        if len(views) == SHOWN_MAX:
            printing.note(f"only the first {SHOWN_MAX} checkpoints are looked at")
            break
    return views


Children = Mapping[str, Sequence[CheckpointView]]


def _trees(views: Iterable[CheckpointView], session_id: str | None) -> Iterator[tuple[CheckpointView, Children]]:
    """The roots, the oldest first, with the children of every checkpoint."""
    known = {view.checkpoint_id: view for view in views}
    children: dict[str, list[CheckpointView]] = {}
    roots = []
    for view in sorted(known.values(), key=lambda one: (one.recorded_at, one.checkpoint_id)):
        if view.parent_id is not None and view.parent_id in known:
            children.setdefault(view.parent_id, []).append(view)
        else:
            roots.append(view)
    for root in roots:
        if session_id is None or any(one.session_id == session_id for _, one in _walk(root, children)):
            yield root, children


def _walk(root: CheckpointView, children: Children) -> Iterator[tuple[int, CheckpointView]]:
    """A tree from its root on, every checkpoint before its children, with its depth."""
    waiting = [(0, root)]
    while waiting:
        depth, view = waiting.pop()
        yield depth, view
        waiting.extend((depth + 1, child) for child in reversed(children.get(view.checkpoint_id, ())))


def _drawn(root: CheckpointView, children: Children) -> Iterator[str]:
    """The lines of a tree. A line of descent without branches stays in one column, however long it is."""
    waiting: list[tuple[CheckpointView, str, str]] = [(root, "", "")]
    while waiting:
        view, lead, below = waiting.pop()
        yield f"{lead}{_line(view)}"
        after = children.get(view.checkpoint_id, ())
        if len(after) == 1:
            waiting.append((after[0], f"{below}└ ", below))
            continue
        for number, child in enumerate(reversed(after)):
            last = number == 0
            waiting.append((child, f"{below}{'└─ ' if last else '├─ '}", f"{below}{'   ' if last else '│  '}"))


def _line(view: CheckpointView) -> str:
    state = "" if view.state == "kept" else f"  {view.state}"
    made = view.recorded_at.strftime("%Y-%m-%d %H:%M:%S")
    label = f"  {view.label}" if view.label else ""
    stored = f"+{_mib(view.stored_bytes)} MiB"
    return f"{view.checkpoint_id}  {view.session_id}/{view.incarnation}  {made}  {stored}{state}{label}"


def _fields(depth: int, view: CheckpointView) -> dict[str, object]:
    return {
        "checkpoint_id": view.checkpoint_id,
        "parent_id": view.parent_id,
        "depth": depth,
        "session_id": view.session_id,
        "incarnation": view.incarnation,
        "state": view.state,
        "recorded_at": view.recorded_at,
        "stored_bytes": view.stored_bytes,
        "label": view.label,
    }


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"
