"""Prints the diagram of a session's life from the one table of transitions: `python -m torpor_scheduler.diagram`."""

import sys
from collections import defaultdict

from torpor_scheduler.domain.session import TRANSITIONS, Phase


def diagram() -> str:
    """A Mermaid state diagram; events that lead from one phase to another share an arrow, in the table's order."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.ABSENT}"]
    for phase, after in TRANSITIONS.items():
        arrows: dict[Phase, list[str]] = defaultdict(list)
        for event, target in after.items():
            arrows[target].append(str(event.__struct_config__.tag).partition(".")[0])
        lines += [f"    {phase} --> {target}: {', '.join(events)}" for target, events in arrows.items()]
    lines += [f"    {phase} --> [*]" for phase, after in TRANSITIONS.items() if not after]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(diagram())
