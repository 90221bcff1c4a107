"""What a guest does before anybody needs it, so that programs lie in its memory and, emulated, are translated."""

from collections.abc import Iterable
from typing import Any, Final

from torpor_contracts.ids import ExecId
from torpor_guest_agent.frames import Frame
from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import GuestChannel
from torpor_vm_host.ports import DriverError, Output

EXERCISE_S: Final = 60.0

Exercise = dict[str, Any]
"""The header of an `exec` request."""

EXERCISES: Final[tuple[Exercise, ...]] = (
    {"argv": ["true"]},
    {"argv": ["sh", "-c", "env; cat /etc/hostname; ls /; id"]},
    {"argv": ["sh", "-c", "true"], "user": "user"},
    {"argv": ["bash", "-lc", "echo; sleep 0"]},
    {"argv": ["python3", "-c", "import asyncio, json, os, pathlib, re, subprocess, tempfile, uuid; uuid.uuid4()"]},
    {"argv": ["git", "--version"]},
)
"""For a template: what sessions mostly run. What an image does not have is left out."""

FIRST: Final[tuple[Exercise, ...]] = ({"argv": ["sh", "-c", "echo"]}, {"argv": ["true"]})
"""For a machine that waits: enough that the way to a program and back is translated."""


async def exercise(guest: GuestChannel, exercises: Iterable[Exercise]) -> None:
    """Run programs one after the other, and let the guest forget them; raises `DriverError` when it is silent."""
    followers = Followers(guest)
    for number, header in enumerate(exercises):
        exec_id = ExecId(f"exercise-{number}")

        async def begin(header: Exercise = header, exec_id: ExecId = exec_id) -> Frame:
            return await guest.request("exec", {"exec_id": exec_id, "timeout_s": EXERCISE_S, **header})

        try:
            await followers.follow(exec_id, begin, _nobody)
        except DriverError as error:
            if error.code not in {"not-found", "no-such-user", "no-such-directory"}:
                raise
            continue
        await guest.request("forget", {"exec_id": exec_id})


async def _nobody(output: Output) -> None:
    """Takes output that nobody wants."""
