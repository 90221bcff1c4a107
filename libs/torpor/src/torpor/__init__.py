"""Torpor: the place where AI agents run, self-hosted; this is its SDK.

async with torpor.connect() as t:
    session = await t.sessions.create()
    result = await session.exec("echo", "hi")
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.client.api import Sessions, Torpor, connect
    from torpor.client.execs import Exec
    from torpor.client.files import Files
    from torpor.client.models import Checkpoint, Chunk, Event, ExecResult, FileChange, FileInfo, ProgramInfo
    from torpor.client.programs import Program
    from torpor.client.session import Session
    from torpor.errors import (
        CannotStart,
        CheckpointFailed,
        CheckpointNotFound,
        CommandIdReused,
        FileNotFound,
        FileRefused,
        ForkFailed,
        InvalidRequest,
        NotPermitted,
        NotYet,
        Refused,
        SessionEnded,
        SessionExists,
        SessionNotFound,
        StaleIncarnation,
        SuspendFailed,
        TransferBroken,
        Unavailable,
        WrongState,
    )
    from torpor_contracts.errors import TorporError
    from torpor_contracts.replies import Receipt

_HOMES = {
    "torpor.client.api": ("Sessions", "Torpor", "connect"),
    "torpor.client.execs": ("Exec",),
    "torpor.client.files": ("Files",),
    "torpor.client.models": ("Checkpoint", "Chunk", "Event", "ExecResult", "FileChange", "FileInfo", "ProgramInfo"),
    "torpor.client.programs": ("Program",),
    "torpor.client.session": ("Session",),
    "torpor.errors": (
        "CannotStart",
        "CheckpointFailed",
        "CheckpointNotFound",
        "CommandIdReused",
        "FileNotFound",
        "FileRefused",
        "ForkFailed",
        "InvalidRequest",
        "NotPermitted",
        "NotYet",
        "Refused",
        "SessionEnded",
        "SessionExists",
        "SessionNotFound",
        "StaleIncarnation",
        "SuspendFailed",
        "TransferBroken",
        "Unavailable",
        "WrongState",
    ),
    "torpor_contracts.errors": ("TorporError",),
    "torpor_contracts.replies": ("Receipt",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CannotStart",
    "Checkpoint",
    "CheckpointFailed",
    "CheckpointNotFound",
    "Chunk",
    "CommandIdReused",
    "Event",
    "Exec",
    "ExecResult",
    "FileChange",
    "FileInfo",
    "FileNotFound",
    "FileRefused",
    "Files",
    "ForkFailed",
    "InvalidRequest",
    "NotPermitted",
    "NotYet",
    "Program",
    "ProgramInfo",
    "Receipt",
    "Refused",
    "Session",
    "SessionEnded",
    "SessionExists",
    "SessionNotFound",
    "Sessions",
    "StaleIncarnation",
    "SuspendFailed",
    "Torpor",
    "TorporError",
    "TransferBroken",
    "Unavailable",
    "WrongState",
    "connect",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the supervisor and `torpor --help` need none of them."""
    from importlib import import_module  # noqa: PLC0415

    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
