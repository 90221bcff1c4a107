"""Pages that draw the life of all that has one from the tables that the code obeys."""

from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

import msgspec

from torpor_reaper.domain.cleanup import TRANSITIONS as CLEANUP
from torpor_scheduler.diagram import diagram as session_diagram
from torpor_scheduler.domain.host import HOST_TRANSITIONS as HOST
from torpor_scheduler.domain.session import TRANSITIONS as SESSION
from torpor_snapshot_store.domain.checkpoint import TRANSITIONS as CHECKPOINT
from torpor_vm_host.domain.vm import TRANSITIONS as VM

Table = Mapping[str, Mapping[type[msgspec.Struct], str]]
Phase = TypeVar("Phase", bound=StrEnum)


class _Page(NamedTuple):
    name: str
    title: str
    table_of: str
    table: Table
    diagram: str


def pages() -> dict[str, str]:
    """File name -> Markdown."""
    session, host = _plain(SESSION), _plain(HOST)
    drawn = [
        _Page("session", "The life of a session", "torpor_scheduler.domain.session", session, session_diagram()),
        _Page("host", "The life of a host", "torpor_scheduler.domain.host", host, _diagram(host)),
        _Page("vm", "The life of a machine", "torpor_vm_host.domain.vm", VM, _diagram(VM)),
        _Page(
            "checkpoint",
            "The life of a checkpoint",
            "torpor_snapshot_store.domain.checkpoint",
            CHECKPOINT,
            _diagram(CHECKPOINT),
        ),
        _Page("cleanup", "The life of a clean-up", "torpor_reaper.domain.cleanup", CLEANUP, _diagram(CLEANUP)),
    ]
    return {f"{page.name}-lifecycle.md": _markdown(page) for page in drawn}


def _plain(table: Mapping[Phase, Mapping[type[msgspec.Struct], Phase]]) -> Table:
    return {str(phase): {event: str(target) for event, target in after.items()} for phase, after in table.items()}


def _markdown(page: _Page) -> str:
    rows = [
        f"| {state} | `{_name(event)}` | {target} | {_first_line(event)} |"
        for state, after in page.table.items()
        for event, target in after.items()
    ]
    return "\n".join(
        [
            f"# {page.title}",
            "",
            f"Made from the table in `{page.table_of}` by `python -m schemas.generator`; do not edit. What is not",
            "in the table cannot happen: an event that would need it is never recorded, and one found in the log stops",
            "the fold.",
            "",
            "```mermaid",
            page.diagram.rstrip("\n"),
            "```",
            "",
            "| from | event | to | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _diagram(table: Table) -> str:
    """A Mermaid state diagram; events that lead from one state to another share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {_id(next(iter(table)))}"]
    for state, after in table.items():
        arrows: dict[str, list[str]] = defaultdict(list)
        for event, target in after.items():
            arrows[target].append(_name(event))
        lines += [f"    {_id(state)} --> {_id(target)}: {', '.join(events)}" for target, events in arrows.items()]
    return "\n".join(lines) + "\n"


def _id(state: str) -> str:
    return state.replace("-", "_")


def _name(event: type[msgspec.Struct]) -> str:
    return str(event.__struct_config__.tag).partition(".")[0]


def _first_line(event: type[msgspec.Struct]) -> str:
    return (event.__doc__ or "").strip().partition("\n")[0]
