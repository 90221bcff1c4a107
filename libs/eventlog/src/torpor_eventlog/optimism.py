"""What a writer knows between batches, so that a batch of which every commit will be placed needs no look-up.

It is only hope: the database's unique indexes decide. A writer whose hope fails starts again and looks everything up.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from torpor_contracts.replies import Receipt
from torpor_eventlog.planning import START, End, Known, Plan, Prepared
from torpor_eventlog.port import Commit

STREAMS_KEPT_MAX: Final = 8192
"""How many streams' versions are kept between batches."""

NONE_KNOWN: Final[Mapping[str, Known]] = {}
"""The hope that no command of a batch is in the log yet."""


class Kept:
    """The end this writer left the log at, and versions of streams as of then; void once another writer appended."""

    def __init__(self) -> None:
        self.end = START
        self._versions: dict[str, int] = {}

    def versions_at(self, end: End, batch: Sequence[Prepared]) -> tuple[dict[str, int], set[str]]:
        """The versions of the batch's streams as far as they are kept, and the streams that must be looked up.

        A stream whose first version is inserted needs no look: the insert fails when the stream exists. An insert of
        a later version would not fail when the version before is missing, and nothing fails when nothing is written.
        """
        kept = self._versions if end.digest == self.end.digest else {}
        sure: dict[str, int] = {}
        unsure: set[str] = set()
        for prepared in batch:
            commit = prepared.commit
            for stream, version in commit.expected.items():
                known_version = kept.get(stream)
                if known_version is not None:
                    sure[stream] = known_version
                elif version != 0 or not _writes(commit, stream):
                    unsure.add(stream)
        return sure, unsure

    def remember(self, written: Plan) -> None:
        """Keep what is known after a batch that is durable now."""
        if self.end.digest != written.before.digest or len(self._versions) > STREAMS_KEPT_MAX:
            self._versions.clear()
        self._versions.update(written.versions)
        self.end = written.end


def _writes(commit: Commit, stream: str) -> bool:
    return any(event.stream == stream for event in commit.events)


def all_placed(planned: Plan) -> bool:
    """Whether every commit of the batch got its place; else some of it must be looked up."""
    return set(map(type, planned.outcomes)) <= {Receipt}


def streams_of(batch: Sequence[Prepared]) -> Mapping[str, None]:
    """The streams a batch expects something of, each once, in order."""
    return dict.fromkeys(stream for prepared in batch for stream in prepared.commit.expected)
