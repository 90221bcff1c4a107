"""Decision records: numbered without gaps, in one form, and all of them in the index."""

from pathlib import Path
from typing import Final

import pytest

ROOM: Final = Path(__file__).resolve().parents[2] / "schemas" / "decisions"
RECORDS: Final = sorted(ROOM.glob("0*.md"))
LINES_MAX: Final = 45


def test_numbers_have_no_gaps_and_the_index_names_every_record() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))
    index = (ROOM / "README.md").read_text()
    for record in RECORDS:
        title = record.read_text().partition("\n")[0].partition(". ")[2]
        assert f"| [{record.name[:4]}]({record.name}) | {title} |" in index


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_is_short_and_says_context_decision_and_consequences(record: Path) -> None:
    lines = record.read_text().splitlines()
    assert lines[0].startswith(f"# {int(record.name[:4])}. ")
    assert [line for line in lines if line.startswith("## ")] == ["## Context", "## Decision", "## Consequences"]
    assert len(lines) <= LINES_MAX
