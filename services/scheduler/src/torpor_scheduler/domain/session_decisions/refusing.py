"""The refusals that several commands of clients share, each with what to do instead."""

from torpor_contracts.errors import InvariantViolation, Rejected
from torpor_scheduler.domain.session import Phase, Session

SESSION_QUERY = "see `torpor session show`"


def refuse_ended(session: Session) -> None:
    """Nothing can be asked of a session that is over."""
    if session.phase is Phase.TERMINATING:
        raise Rejected("session-terminating", "the session is being terminated", "create another session")
    if session.phase is Phase.TERMINATED:
        raise Rejected("session-terminated", "the session was terminated", "create another session")


def refuse_stale(session: Session, given: int | None) -> None:
    """Who names an incarnation means that one and no other."""
    if given is not None and given != session.incarnation:
        raise Rejected(
            "stale-incarnation",
            f"the session is at incarnation {session.incarnation}, not {given}",
            f"look at the session again ({SESSION_QUERY}), then act for the incarnation it has now",
        )


def failed(session: Session) -> Rejected:
    """The session failed, and why."""
    problem = session.problem
    if problem is None:
        raise InvariantViolation(f"session {session.session_id} failed without a reason")
    return Rejected("session-failed", f"the session failed: {problem.code}: {problem.detail}", problem.way_out)
