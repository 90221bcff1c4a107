"""Which error class a refusal becomes; a code we do not know is a plain `Refused`."""

from collections.abc import Mapping
from typing import Final

from torpor.errors import (
    CheckpointNotFound,
    CommandIdReused,
    FileNotFound,
    FileRefused,
    InvalidRequest,
    NotPermitted,
    Refused,
    SessionExists,
    SessionNotFound,
    StaleIncarnation,
    WrongState,
)
from torpor_contracts.replies import Refusal

_BY_CODE: Final[Mapping[str, type[Refused]]] = {
    "session-not-found": SessionNotFound,
    "session-exists": SessionExists,
    "checkpoint-not-found": CheckpointNotFound,
    "checkpoint-unknown": CheckpointNotFound,
    "checkpoint-too-far": CheckpointNotFound,
    "checkpoint-exists": InvalidRequest,
    "stale-incarnation": StaleIncarnation,
    "command-id-reused": CommandIdReused,
    "foreign-tenant": NotPermitted,
    "operators-only": NotPermitted,
    "not-permitted": NotPermitted,
    "not-running": WrongState,
    "not-draining": WrongState,
    "nothing-to-resume": WrongState,
    "no-checkpoint": WrongState,
    "stdin-closed": WrongState,
    "no-terminal": WrongState,
    "exec-unknown": WrongState,
    "unknown-command": InvalidRequest,
    "malformed-command": InvalidRequest,
    "reason-too-long": InvalidRequest,
}
_BY_BEGINNING: Final = (
    ("illegal-", InvalidRequest),
    ("already-", WrongState),
    ("session-", WrongState),
    ("checkpoint-", WrongState),
)
_BY_END: Final = (("-too-large", InvalidRequest),)


def refused(code: str, message: str, advice: str, retry_after_s: float | None = None) -> Refused:
    """The error for a refusal with this code."""
    kind = _BY_CODE.get(code)
    if kind is None:
        fitting = [found for beginning, found in _BY_BEGINNING if code.startswith(beginning)]
        fitting += [found for end, found in _BY_END if code.endswith(end)]
        kind = fitting[0] if fitting else Refused
    return kind(code, message, advice, retry_after_s)


def refusal_error(refusal: Refusal) -> Refused:
    """The error to raise for a refusal."""
    return refused(refusal.code, refusal.message, refusal.advice, refusal.retry_after_s)


_OF_FILES: Final[Mapping[str, type[Refused]]] = {
    "not-found": FileNotFound,
    **dict.fromkeys(
        (
            "exists",
            "not-a-directory",
            "is-a-directory",
            "not-a-file",
            "not-empty",
            "not-permitted",
            "disk-full",
            "name-too-long",
            "too-many-links",
            "illegal-path",
            "no-such-user",
            "io-error",
            "upload-unknown",
        ),
        FileRefused,
    ),
}
"""What a guest says of a path; elsewhere some of these codes mean something else."""


def guest_refusal(refusal: Refusal) -> Refused:
    """The error to raise for a refusal of something asked of a guest."""
    kind = _OF_FILES.get(refusal.code)
    if kind is None:
        return refusal_error(refusal)
    return kind(refusal.code, refusal.message, refusal.advice, refusal.retry_after_s)
