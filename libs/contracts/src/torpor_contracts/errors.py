"""Errors, sorted by who must act; `torpor_messaging.policy` holds the one mapping from each to an acknowledgement."""


class TorporError(Exception):
    """Base of every error Torpor raises on purpose."""


class Rejected(TorporError):  # noqa: N818  (a refusal is an answer, not a failure)
    """The caller must act: the command is refused, nothing was recorded.

    `code` is stable and for programs, `message` says what is wrong, `advice` what to do about it.
    """

    def __init__(self, code: str, message: str, advice: str) -> None:
        super().__init__(f"{code}: {message} ({advice})")
        self.code = code
        self.message = message
        self.advice = advice


class VersionConflict(TorporError):  # noqa: N818
    """Nobody must act: another writer appended to `stream` first; decide again, a bounded number of times."""

    def __init__(self, stream: str, expected: int, actual: int) -> None:
        super().__init__(f"stream {stream} is at version {actual}, not {expected}")
        self.stream = stream
        self.expected = expected
        self.actual = actual


class Transient(TorporError):  # noqa: N818
    """Time must pass: something Torpor depends on is away; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Poison(TorporError):  # noqa: N818
    """An operator must act: this message can never be handled; it goes to `dead`, then is terminated."""


class InvariantViolation(TorporError):  # noqa: N818
    """We must act: the code is wrong; the process dies, the message is redelivered and in the end lands in `dead`."""
