"""The agent's event loop: one thread, the channel to the host, and whatever the rooms watch."""

import errno
import os
import selectors
import time
import traceback
from collections.abc import Callable
from typing import Final

from torpor_guest_agent.frames import Frame, Frames, encode

READ_BYTES: Final = 256 * 1024
OUTGOING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Above this, output of programs is not read on: the host is slow or gone."""
HANG_UP_PAUSE_S: Final = 0.01

Handler = Callable[[], None]


class Loop:
    """Reads frames from the host, writes frames to it, and calls whoever watches a descriptor or a moment."""

    def __init__(self, channel: int) -> None:
        os.set_blocking(channel, False)
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._frames = Frames()
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._timers: list[tuple[float, Handler]] = []
        self._running = True
        self.on_frame: Callable[[Frame], None] = lambda _: None
        self._armed = 0
        self._hung_up = False
        self._arm()

    # --- what rooms use ---

    def send(self, frame: Frame) -> None:
        """Queue a frame for the host."""
        data = encode(frame)
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)
        self._write()

    def forget_outgoing(self) -> None:
        """Drop what an earlier host did not read; a zero byte ends the frame that may be half written."""
        self._outgoing = [b"\x00"]
        self._outgoing_bytes = 1

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the host that no more should be produced."""
        return self._outgoing_bytes > OUTGOING_BYTES_MAX

    def watch(self, descriptor: int, handler: Handler, *, write: bool = False) -> None:
        """Call `handler` whenever the descriptor can be read (or written)."""
        self._selector.register(descriptor, selectors.EVENT_WRITE if write else selectors.EVENT_READ, handler)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching; a descriptor that is not watched is fine."""
        try:
            self._selector.unregister(descriptor)
        except KeyError:
            return

    def at(self, moment: float, handler: Handler) -> None:
        """Call `handler` once when `time.monotonic()` reaches `moment`."""
        self._timers.append((moment, handler))
        self._timers.sort(key=lambda timer: timer[0])

    def cancel(self, handler: Handler) -> None:
        """Forget the timers of this handler."""
        self._timers = [timer for timer in self._timers if timer[1] != handler]

    # --- the loop itself ---

    def run(self) -> None:
        """Serve until `stop`."""
        while self._running:
            due = self._timers[0][0] - time.monotonic() if self._timers else None
            for key, _ in self._selector.select(max(0.0, due) if due is not None else None):
                self._call(key.data)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._call(self._timers.pop(0)[1])

    def _call(self, handler: Handler) -> None:
        """Run a handler; the first process must outlive a fault of its own, and the host must hear of it."""
        try:
            handler()
        except Exception:  # noqa: BLE001
            self.send(Frame({"event": "fault", "detail": traceback.format_exc(limit=5)}))

    def stop(self) -> None:
        """Leave `run` after what is being handled."""
        self._running = False

    def _ready(self) -> None:
        self._read()
        if self._outgoing and not self._hung_up:
            self._write()

    def _read(self) -> None:
        try:
            data = os.read(self._channel, READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENODEV):
                raise
            data = b""
        if not data:
            # Nobody has the host's end open. The port stays readable then, so it is looked at again after a pause.
            self._hung_up = True
            self._arm()
            self.at(time.monotonic() + HANG_UP_PAUSE_S, self._look_again)
            return
        for frame in self._frames.feed(data):
            self.on_frame(frame)

    def _look_again(self) -> None:
        self._hung_up = False
        self._arm()

    def _write(self) -> None:
        while self._outgoing:
            try:
                written = os.write(self._channel, self._outgoing[0])
            except OSError:  # full, or nobody has the host's end open: wait until it can be written
                break
            self._outgoing_bytes -= written
            if written == len(self._outgoing[0]):
                self._outgoing.pop(0)
            else:
                self._outgoing[0] = self._outgoing[0][written:]
        self._arm()

    def _arm(self) -> None:
        wanted = 0 if self._hung_up else selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if wanted == self._armed:
            return
        if not wanted:
            self._selector.unregister(self._channel)
        elif self._armed:
            self._selector.modify(self._channel, wanted, self._ready)
        else:
            self._selector.register(self._channel, wanted, self._ready)
        self._armed = wanted
