"""Starting a process for the host: as which user, where, with which streams, in a session of its own."""

import fcntl
import os
import pty
import pwd
import struct
import subprocess
import termios
from typing import Any, Final

from torpor_guest_agent.program import Streams
from torpor_guest_agent.refusal import Refused, refusal

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSWORDS: Final = "/etc/passwd"


class Users:
    """The guest's users; what was looked up holds until the file of them changes."""

    def __init__(self) -> None:
        self._known: dict[str, pwd.struct_passwd] = {}
        self._as_of = 0

    def find(self, name: str | None) -> pwd.struct_passwd:
        """The user of that name, root when none is given; `Refused` when there is none."""
        changed = os.stat(PASSWORDS).st_mtime_ns  # noqa: PTH116  (on the way of every program)
        if changed != self._as_of:
            self._known, self._as_of = {}, changed
        wanted = name or "root"
        found = self._known.get(wanted)
        if found is None:
            try:
                found = self._known[wanted] = pwd.getpwnam(wanted)
            except KeyError:
                raise Refused("no-such-user", f"the guest has no user {wanted!r}") from None
        return found


class Spawning:
    """Starts processes."""

    def __init__(self) -> None:
        self._users = Users()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.environment: dict[str, str] = {}
        """Added to every program's environment (identity, proxies)."""

    def start(self, request: dict[str, Any], *, input_follows: bool) -> tuple[int, Streams]:
        """Start what an `exec` request asks for; its pid, and our ends of its streams."""
        argv = list(request["argv"])
        if not argv:
            raise Refused("cannot-start", "there is no program to start")
        user = self._users.find(request.get("user"))
        cwd = request.get("cwd") or user.pw_dir
        options: dict[str, Any] = {
            "cwd": cwd,
            "env": self._environment(user, request.get("env", {})),
            "start_new_session": True,
            "close_fds": False,  # every descriptor of ours closes by itself when a program is run
        }
        if user.pw_uid != os.getuid():
            groups = os.getgrouplist(user.pw_name, user.pw_gid)
            options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
        size = request.get("pty")
        if size is not None:
            options["preexec_fn"] = _take_terminal
            options["env"].setdefault("TERM", "xterm-256color")
            streams, theirs = _terminal(size, user.pw_uid)
        else:
            streams, theirs = self._pipes(input_follows=input_follows)
        try:
            # Not waited for here: the agent reaps all children of the machine.
            process = subprocess.Popen(argv, stdin=theirs[0], stdout=theirs[1], stderr=theirs[2], **options)  # noqa: S603
        except Exception as error:
            for descriptor in {*streams.outputs, *([] if streams.stdin is None else [streams.stdin])}:
                os.close(descriptor)
            raise _not_started(error, argv[0], cwd) from error
        finally:
            for descriptor in {*theirs} - {self._nothing}:
                os.close(descriptor)
        process.returncode = 0
        return process.pid, streams

    def _environment(self, user: pwd.struct_passwd, asked: dict[str, str]) -> dict[str, str]:
        own = {
            "PATH": PATH,
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "SHELL": user.pw_shell,
            "LANG": "C.UTF-8",
        }
        return {**own, **self.environment, **asked}

    def _pipes(self, *, input_follows: bool) -> tuple[Streams, tuple[int, int, int]]:
        stdin, ours = os.pipe() if input_follows else (self._nothing, None)
        stdout, output_end = os.pipe()
        stderr, error_end = os.pipe()
        for descriptor in (stdout, stderr, *([] if ours is None else [ours])):
            os.set_blocking(descriptor, False)
        return Streams(ours, {stdout: "stdout", stderr: "stderr"}, None), (stdin, output_end, error_end)


def set_size(terminal: int, rows: int, columns: int) -> None:
    """Set the size of a terminal; who reads it is told by the kernel."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _terminal(size: dict[str, int], owner: int) -> tuple[Streams, tuple[int, int, int]]:
    ours, theirs = pty.openpty()
    set_size(ours, size["rows"], size["columns"])
    os.fchown(theirs, owner, -1)
    os.set_blocking(ours, False)
    return Streams(ours, {ours: "stdout"}, ours), (theirs, theirs, theirs)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _not_started(error: Exception, program: str, cwd: str) -> Refused:
    if isinstance(error, OSError):
        if error.filename == cwd and program != cwd:
            return Refused("no-such-directory", f"the program's directory {cwd!r}: {error.strerror}")
        return refusal(error)
    return Refused("cannot-start", f"{type(error).__name__}: {error}")
