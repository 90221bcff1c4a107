"""What a simulated machine is: its memory, its disk and its programs, as one value that can be written down."""

from typing import Final, Literal

import msgspec

from torpor_contracts.ids import ExecId, SessionId, TenantId, VmId
from torpor_contracts.session import MachineSpec, TerminalSize

PIPE_BYTES_MAX: Final = 256 * 1024
"""Output that nobody has taken; a program that has written so much waits."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One simple command of a program. `only_after_success`: it was joined by `&&`."""

    argv: list[str]
    only_after_success: bool = False
    into: str | None = None
    appends: bool = False


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Output that nobody has taken yet."""

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    outcome: Literal["exited", "signaled", "timed-out"]
    exit_code: int | None
    detail: str = ""


class Process(msgspec.Struct, kw_only=True):
    """A program. It has run up to `at_us`, sleeps until `wakes_us`, and is ended at `times_out_us`.

    Instants are microseconds since the Unix epoch of a clock that stands still while the machine is paused. `given` is
    input it has not read, of `given_bytes` in all; it `reads` while it waits for more, unless that has ended. `shell`:
    it takes each line of its input for a command.
    """

    exec_id: ExecId
    steps: list[Step]
    env: dict[str, str]
    cwd: str
    user: str
    stdin: str
    at_us: int
    times_out_us: int
    wakes_us: int | None = None
    next_step: int = 0
    status: int = 0
    written: list[Written] = []
    written_bytes: int = 0
    end: End | None = None
    stdin_open: bool = False
    terminal: TerminalSize | None = None
    given: bytes = b""
    given_bytes: int = 0
    reads: bool = False
    shell: bool = False

    @property
    def held_up(self) -> bool:
        """Whether it waits for somebody to take its output."""
        return sum(len(one.data) for one in self.written) >= PIPE_BYTES_MAX

    @property
    def can_read(self) -> bool:
        """Whether there is input for it: a line for a shell, else anything."""
        return b"\n" in self.given if self.shell else bool(self.given)

    def due_us(self) -> int | None:
        """When something happens to it next, None when it has ended."""
        if self.end is not None:
            return None
        if self.held_up or (self.reads and self.stdin_open and not self.can_read):
            return self.times_out_us
        return min(self.times_out_us, self.at_us if self.wakes_us is None else self.wakes_us)

    def shift(self, by_us: int) -> None:
        """Move it in time, as its machine did not run meanwhile."""
        self.at_us += by_us
        self.times_out_us += by_us
        if self.wakes_us is not None:
            self.wakes_us += by_us


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file or folder beside its content."""

    mode: int
    user: str
    modified_us: int


class Machine(msgspec.Struct, kw_only=True):
    """A machine. `generation` counts its checkpoints, which build on `base`; `paused_us` is set while it does not run.

    `files` and `folders` are named by the keys of `tree.key_of`; `uploads` are files that are not whole yet.
    """

    vm_id: VmId
    tenant_id: TenantId
    session_id: SessionId
    incarnation: int
    spec: MachineSpec
    state: Literal["starting", "running", "paused"]
    paused_us: int | None = None
    generation: int = 0
    base: str = ""
    counter: int = 0
    variables: dict[str, str] = {}
    files: dict[str, bytes] = {}
    folders: dict[str, Meta] = {}
    metas: dict[str, Meta] = {}
    uploads: dict[str, bytes] = {}
    processes: dict[ExecId, Process] = {}

    def pause(self, now_us: int) -> None:
        """Let nothing in it run from now on."""
        if self.state == "running":
            self.state, self.paused_us = "paused", now_us

    def run(self, now_us: int) -> None:
        """Let everything in it run on from where it was."""
        if self.paused_us is not None:
            for process in self.processes.values():
                process.shift(now_us - self.paused_us)
        self.state, self.paused_us = "running", None
