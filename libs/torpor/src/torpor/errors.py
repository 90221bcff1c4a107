"""The errors users of Torpor meet, sorted by what they can do about them; each says what to do."""

from typing import Final

from torpor_contracts.errors import Rejected, TorporError
from torpor_contracts.replies import Receipt


class Refused(Rejected):
    """The command or question was refused: nothing was recorded, and asking again the same way is refused again.

    `code` is stable and for programs; `retry_after_s`, when set, is when asking again may help.
    """

    def __init__(self, code: str, message: str, advice: str, retry_after_s: float | None = None) -> None:
        super().__init__(code, message, advice)
        self.retry_after_s = retry_after_s


class SessionNotFound(Refused):
    """There is no session with this id in this tenant."""


class SessionExists(Refused):
    """Another command has already created a session with this id."""


class CheckpointNotFound(Refused):
    """There is no such checkpoint, or it is not of this session's tree."""


class FileRefused(Refused):
    """The guest would not do it with this path; `code` says why: `not-empty`, `is-a-directory`, `disk-full`, …."""


class FileNotFound(FileRefused):
    """There is nothing under this path in the guest."""


class StaleIncarnation(Refused):
    """The incarnation named is no longer the session's current one."""


class WrongState(Refused):
    """The session's present state does not allow this."""


class CommandIdReused(Refused):
    """The command id was used before, for another request."""


class InvalidRequest(Refused):
    """The request itself is malformed: an illegal id, an unknown field, a value out of its limits."""


class NotPermitted(Refused):
    """Our key, or our tenant, may not do this."""


class Unavailable(TorporError):  # noqa: N818  (names what is so, as the errors of the contracts do)
    """Nobody answered in time, or the whole is not running; a command may or may not have happened.

    Asking again with the same `command_id` is safe: it happens at most once.
    """

    code: Final = "unavailable"

    def __init__(self, message: str, advice: str, command_id: str | None = None) -> None:
        super().__init__(f"{message} ({advice})")
        self.message = message
        self.advice = advice
        self.command_id = command_id


class NotYet(TorporError):  # noqa: N818
    """The command is on record (`receipt`), but its effect was not observed in the time given; it may still come."""

    code: Final = "not-yet"

    def __init__(self, message: str, advice: str, receipt: Receipt) -> None:
        super().__init__(f"{message} ({advice})")
        self.message = message
        self.advice = advice
        self.receipt = receipt


class SessionEnded(TorporError):  # noqa: N818
    """The session went where it cannot do what was asked: it failed, was lost or was terminated meanwhile."""

    def __init__(self, code: str, message: str, advice: str, position: int) -> None:
        super().__init__(f"{message} ({advice})")
        self.code = code
        self.message = message
        self.advice = advice
        self.position = position


class SuspendFailed(SessionEnded):
    """The machine could not be checkpointed; it runs on."""


class CheckpointFailed(SessionEnded):
    """The checkpoint could not be made; the session goes on."""


class ForkFailed(SessionEnded):
    """None of the sessions was made (`session_ids` is empty), or some of those in `session_ids` did not start."""

    def __init__(
        self, code: str, message: str, advice: str, position: int, *, session_ids: tuple[str, ...] = ()
    ) -> None:
        super().__init__(code, message, advice, position)
        self.session_ids = session_ids


class TransferBroken(TorporError):  # noqa: N818
    """A file changed while it was read, or what was written of it was lost with its machine; at `offset`."""

    def __init__(self, code: str, message: str, advice: str, offset: int) -> None:
        super().__init__(f"{message} ({advice})")
        self.code = code
        self.message = message
        self.advice = advice
        self.offset = offset


class CannotStart(TorporError):  # noqa: N818
    """The embedded whole, or one of its parts, cannot start on this machine as it is."""

    def __init__(self, code: str, message: str, advice: str) -> None:
        super().__init__(f"{message} ({advice})")
        self.code = code
        self.message = message
        self.advice = advice
