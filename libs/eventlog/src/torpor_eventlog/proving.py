"""Which proofs a log of a given length can give; anything else is refused with the reason."""

from torpor_contracts.errors import Rejected
from torpor_eventlog.merkle import ProofPlan, consistency_plan, inclusion_plan

_ADVICE = "ask within the log's present head"


def checked_inclusion_plan(position: int, tree_size: int, last_position: int) -> ProofPlan:
    """The plan of an inclusion proof; `Rejected("illegal-proof")` when the log holds no such row or tree."""
    if not 1 <= position <= tree_size <= last_position:
        raise Rejected(
            "illegal-proof",
            f"position {position} is not in a tree of {tree_size} rows, in a log of {last_position}",
            _ADVICE,
        )
    return inclusion_plan(position - 1, tree_size)


def checked_consistency_plan(old_size: int, new_size: int, last_position: int) -> ProofPlan:
    """The plan of a consistency proof; `Rejected("illegal-proof")` when the log never had such trees."""
    if not 0 <= old_size <= new_size <= last_position:
        raise Rejected(
            "illegal-proof",
            f"a tree of {old_size} rows is no earlier state of one of {new_size}, in a log of {last_position}",
            _ADVICE,
        )
    return consistency_plan(old_size, new_size)
