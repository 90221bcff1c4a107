"""Waits until an effect that was asked for is seen in the log, or until it is seen that it will not come."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec

from torpor.client import events
from torpor.client.connection import Connection
from torpor.client.models import Event
from torpor.errors import NotYet, SessionEnded, SuspendFailed, Unavailable
from torpor_contracts import session as contract
from torpor_contracts.replies import Receipt

UP = (contract.SessionStarted, contract.SessionResumed, contract.SessionRecovered)
"""The events that say that a session's machine runs."""

Seen = TypeVar("Seen")
Kinds = tuple[type[msgspec.Struct], ...]


async def observed(
    connection: Connection, session_id: str, since: Receipt | int, done: Kinds, timeout_s: float
) -> Event:
    """The first of these events of the session since a receipt, whose own event may be it already, or a position.

    `SessionEnded` when the session went elsewhere; after `timeout_s` `NotYet`, and without a receipt `Unavailable`.
    """
    receipt, position = (None, since) if isinstance(since, int) else (since, since.position)

    def judged(event: Event) -> Event | None:
        if isinstance(event.body, done):
            return event
        raise_if_elsewhere(event, done)
        return None

    subject = events.session_subject(connection.tenant, session_id)
    what = f"session {session_id} has not come to {_names(done)}"
    return await judged_so(connection, subject, (receipt, position), judged, (timeout_s, what))


async def judged_so(
    connection: Connection,
    subject: str,
    since: tuple[Receipt | None, int],
    judged: Callable[[Event], Seen | None],
    patience: tuple[float, str],
) -> Seen:
    """What `judged` makes of the first event that it does not answer None for, from the position on.

    `since` is the receipt and the position; `patience` how long to wait, and what to say when that is over.
    """
    (receipt, position), (timeout_s, what) = since, patience
    last: Event | None = None
    stream = events.read_events(connection, subject, position, follow=True)
    try:
        async with asyncio.timeout(timeout_s), aclosing(stream):
            async for event in stream:
                seen = judged(event)
                if seen is not None:
                    return seen
                last = event
    except TimeoutError:
        told = f"{what} within {timeout_s:g} s" + (f"; the last event is {_saying(last)}" if last else "")
        if receipt is None:
            raise Unavailable(told, "see `torpor session show`, and ask again") from None
        raise NotYet(
            told, f"see `torpor session show {receipt.stream}`; what was asked for is on record and goes on", receipt
        ) from None
    raise AssertionError("a stream that is followed has no end")


def raise_if_elsewhere(event: Event, done: Kinds) -> None:
    """Raise when the session will not come to what is waited for."""
    body = event.body
    if isinstance(body, contract.SessionFailed):
        raise SessionEnded(body.code, f"the session failed: {body.detail}", body.way_out, event.position)
    if isinstance(body, contract.SessionTerminated) and contract.SessionTerminated not in done:
        raise SessionEnded("terminated", "the session was terminated meanwhile", "create another", event.position)
    if isinstance(body, contract.SessionLost) and contract.SessionTerminated not in done:
        raise SessionEnded(
            "lost",
            f"the session was lost: {body.cause}",
            "resume it: it goes on from its newest checkpoint, as a new incarnation",
            event.position,
        )
    if isinstance(body, contract.SuspendFailed) and contract.SessionSuspended in done:
        raise SuspendFailed(
            body.code, f"the session could not be suspended: {body.detail}", "it runs on; try again", event.position
        )


def _names(done: Kinds) -> str:
    return " or ".join(str(kind.__struct_config__.tag).partition(".")[0] for kind in done)


def _saying(event: Event) -> str:
    reason = event.data.get("reason") or event.data.get("detail")
    return f"{event.type} at {event.position}" + (f": {reason}" if reason else "")
