"""The agent's composition: the first process of the machine, serving one host at a time.

Requests are `{"op", "id", …}`; each is answered once with `{"re": id, "ok": true, …}` or `{"re": id, "ok": false,
"code", "message"}`. Events (`output`, `end`, `watch`, `fault`) come unasked. The first request of every host is
`hello`; what an earlier host had not read by then is dropped, for it belongs to another time.
"""

import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any, Final

from torpor_guest_agent import files
from torpor_guest_agent.frames import Frame
from torpor_guest_agent.identity import Self
from torpor_guest_agent.loop import Loop
from torpor_guest_agent.programs import Programs
from torpor_guest_agent.refusal import Refused, refusal
from torpor_guest_agent.watching import Watches

VERSION: Final = 1

Answer = dict[str, Any] | tuple[dict[str, Any], bytes] | None
Operation = Callable[[dict[str, Any], bytes], Answer]


class Agent:
    """Answers the host's requests."""

    def __init__(self, channel: int | socket.socket, myself: Self) -> None:
        # Programs inherit what is ignored, and whoever started the agent may have ignored any of these.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        self._loop = Loop(channel)
        self._self = myself
        self._programs = Programs(self._loop)
        self._watches = Watches(self._loop)
        self._loop.on_frame = self._answer
        self._operations = self._program_operations() | self._file_operations() | self._machine_operations()

    def run(self) -> None:
        """Serve for ever."""
        self._loop.run()

    def _machine_operations(self) -> dict[str, Operation]:
        return {
            "hello": self._hello,
            "ping": lambda _, __: None,
            "clock": lambda r, _: self._self.step_clock(int(r["clock_ns"])),
            "sync": lambda _, __: os.sync(),
        }

    def _program_operations(self) -> dict[str, Operation]:
        programs = self._programs
        return {
            "exec": programs.start,
            "stdin": lambda r, body: programs.feed(
                r["exec_id"], body, ends=bool(r.get("ends", False)), offset=r.get("offset")
            ),
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
        }

    def _answer(self, frame: Frame) -> None:
        header = frame.header
        body = b""
        try:
            operation = self._operations.get(header.get("op", ""), _unknown)
            found = operation(header, frame.body)
            found, body = found if isinstance(found, tuple) else (found, b"")
            answer = {"re": header.get("id"), "ok": True, **(found or {})}
        except Refused as refused:
            answer = _refusal(header, refused)
        except OSError as error:
            answer = _refusal(header, refusal(error))
        except Exception:  # noqa: BLE001  (the first process must not die of a request; the host hears of it)
            answer = _refusal(header, Refused("malformed-request", traceback.format_exc(limit=3)))
        if header.get("id") is not None:
            self._loop.send(Frame(answer, body))
        if not self._loop.crowded:
            self._programs.resume_all()

    def _hello(self, header: dict[str, Any], entropy: bytes) -> dict[str, Any]:
        self._loop.forget_outgoing()
        self._watches.clear()
        self._self.become(header, entropy)
        self._programs.environment.update(
            TORPOR_SESSION_ID=str(header["session_id"]),
            TORPOR_INCARNATION=str(header["incarnation"]),
            TORPOR_EPOCH_FILE=self._self.epoch_file,
        )
        return {"version": VERSION, "epoch": header["epoch"], "programs": self._programs.listing()}


def _unknown(header: dict[str, Any], _: bytes) -> Answer:
    raise Refused("unknown-operation", f"the agent (version {VERSION}) does not know {header.get('op')!r}")


def _refusal(header: dict[str, Any], refused: Refused) -> dict[str, Any]:
    return {"re": header.get("id"), "ok": False, "code": refused.code, "message": str(refused)}


def main() -> None:
    """Run as the first process of the machine."""
    from torpor_guest_agent import machine  # noqa: PLC0415  (only a guest has what it needs)

    while (descriptor := os.open("/dev/null", os.O_RDWR)) <= 2:  # noqa: PLR2004  (may start without stdio)
        pass
    os.close(descriptor)
    machine.prepare()
    Agent(machine.open_channel(), Self()).run()
