"""The agent's composition: the first process of the machine, serving one host at a time.

Requests are `{"op", "id", …}`; each is answered once with `{"re": id, "ok": true, …}` or `{"re": id, "ok": false,
"code", "message"}`. Events (`output`, `end`, `watch`) come unasked. The first request of every host is `hello`; what an
earlier host had not read by then is dropped, for it belongs to another time.
"""

import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any, Final

from torpor_guest_agent import files, identity, machine
from torpor_guest_agent.frames import Frame
from torpor_guest_agent.loop import Loop
from torpor_guest_agent.programs import Programs, Refused
from torpor_guest_agent.watching import Watches

VERSION: Final = 1

Answer = dict[str, Any] | tuple[dict[str, Any], bytes] | None
Operation = Callable[[dict[str, Any], bytes], Answer]


class Agent:
    """Answers the host's requests."""

    def __init__(self, channel: int) -> None:
        self._loop = Loop(channel)
        self._programs = Programs(self._loop)
        self._watches = Watches(self._loop)
        self._loop.on_frame = self._answer
        self._operations = self._program_operations() | self._file_operations() | {"hello": self._hello}
        self._catch_children()

    def run(self) -> None:
        """Serve for ever."""
        self._loop.run()

    def _program_operations(self) -> dict[str, Operation]:
        programs = self._programs
        return {
            "ping": lambda _, __: None,
            "clock": lambda r, _: identity.step_clock(int(r["clock_ns"])),
            "exec": programs.start,
            "stdin": lambda r, body: programs.feed(r["exec_id"], body, ends=bool(r.get("ends", False))),
            "signal": lambda r, _: programs.kill(r["exec_id"], int(r["signal"]), group=bool(r.get("group", True))),
            "resize": lambda r, _: programs.resize(r["exec_id"], int(r["rows"]), int(r["columns"])),
            "confirm": lambda r, _: programs.confirm(r["exec_id"], int(r["offset"])),
            "attach": lambda r, _: programs.attach(r["exec_id"], r.get("offset")),
            "forget": lambda r, _: programs.forget(r["exec_id"]),
            "programs": lambda _, __: {"programs": programs.listing()},
        }

    def _file_operations(self) -> dict[str, Operation]:
        return {
            "read": lambda r, _: files.read(r),
            "write": files.write,
            "stat": lambda r, _: files.describe(r),
            "list": lambda r, _: files.listing(r),
            "make-directory": lambda r, _: files.make_directory(r),
            "move": lambda r, _: files.move(r),
            "remove": lambda r, _: files.remove(r),
            "watch": lambda r, _: self._watches.add(r),
            "unwatch": lambda r, _: self._watches.remove(r),
            "sync": lambda _, __: os.sync(),
        }

    def _catch_children(self) -> None:
        woken, wakes = socket.socketpair()
        for end in (woken, wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._sockets = (woken, wakes)
        self._loop.watch(woken.fileno(), self._child_ended)

    def _child_ended(self) -> None:
        try:
            self._sockets[0].recv(4096)
        except BlockingIOError:
            return
        self._programs.reap()

    def _answer(self, frame: Frame) -> None:
        header = frame.header
        answer: dict[str, Any]
        body = b""
        try:
            operation = self._operations.get(str(header.get("op")))
            if operation is None:
                raise Refused("unknown-operation", f"the agent (version {VERSION}) does not know {header.get('op')!r}")
            found = operation(header, frame.body)
            found, body = found if isinstance(found, tuple) else (found, b"")
            answer = {"re": header.get("id"), "ok": True, **(found or {})}
        except Refused as refused:
            answer = {"re": header.get("id"), "ok": False, "code": refused.code, "message": str(refused)}
        except OSError as error:
            code = files.refusal(error).code
            answer = {"re": header.get("id"), "ok": False, "code": code, "message": str(error)}
        except Exception:  # noqa: BLE001  (the first process must not die of a request; the host hears of it)
            message = traceback.format_exc(limit=3)
            answer = {"re": header.get("id"), "ok": False, "code": "malformed-request", "message": message}
        self._loop.send(Frame(answer, body))
        if not self._loop.crowded:
            self._programs.resume_all()

    def _hello(self, header: dict[str, Any], entropy: bytes) -> dict[str, Any]:
        self._loop.forget_outgoing()
        self._watches.clear()
        identity.take(header, entropy)
        self._programs.environment = {
            "TORPOR_SESSION_ID": str(header["session_id"]),
            "TORPOR_INCARNATION": str(header["incarnation"]),
            "TORPOR_EPOCH_FILE": str(identity.EPOCH_FILE),
        }
        return {"version": VERSION, "epoch": header["epoch"], "programs": self._programs.listing()}


def main() -> None:
    """Run as the first process of the machine."""
    while (descriptor := os.open("/dev/null", os.O_RDWR)) <= 2:  # noqa: PLR2004  (may start without stdio)
        pass
    os.close(descriptor)
    machine.prepare()
    Agent(machine.open_channel()).run()
