"""The agent's event loop: one thread, the channel to the host, and whatever the rooms watch.

Under emulation every line that runs costs, so it stands on `epoll` itself and reads the clock only when it must.
"""

import errno
import fcntl
import os
import select
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

from torpor_guest_agent.frames import Frame, Frames, encode

READ_BYTES: Final = 256 * 1024
OUTGOING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Above this, output of programs is not read on: the host is slow or gone."""
HANG_UP_PAUSE_S: Final = 1.0
"""How often a port is looked at that nobody on the host has open; the kernel's signal mostly comes first."""

NOBODY: Final = -1
"""The channel while nobody is connected."""

Handler = Callable[[], None]


class Loop:
    """Reads frames from the host, writes frames to it, and calls whoever watches a descriptor, signal or moment."""

    def __init__(self, channel: int | socket.socket) -> None:
        """Speak on `channel`: a port, or a socket that listens, on which the host may come and go."""
        self._channel = NOBODY if isinstance(channel, socket.socket) else channel
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._frames = Frames()
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._timers: list[tuple[float, Handler]] = []
        self._running = True
        self.on_frame: Callable[[Frame], None] = lambda _: None
        self._armed = 0
        self._hung_up = False
        self._woken, self._signals = self._catch_signals(), dict[int, Handler]()
        self._listening = channel if isinstance(channel, socket.socket) else None
        if self._listening is not None:
            self._listening.setblocking(False)
            self.watch(self._listening.fileno(), self._accept)
        else:
            os.set_blocking(self._channel, False)
            self._arm()

    # --- what rooms use ---

    def send(self, frame: Frame) -> None:
        """Queue a frame for the host."""
        data = encode(frame)
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)
        if len(self._outgoing) == 1:
            self._write()

    def forget_outgoing(self) -> None:
        """Drop what an earlier host did not read; a zero byte ends the frame that may be half written."""
        self._outgoing = deque([b"\x00"])
        self._outgoing_bytes = 1

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the host that no more should be produced."""
        return self._outgoing_bytes > OUTGOING_BYTES_MAX

    def watch(self, descriptor: int, handler: Handler, *, write: bool = False) -> None:
        """Call `handler` whenever the descriptor can be read (or written)."""
        self._epoll.register(descriptor, select.EPOLLOUT if write else select.EPOLLIN)
        self._handlers[descriptor] = handler

    def unwatch(self, descriptor: int) -> None:
        """Stop watching; a descriptor that is not watched is fine."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def at(self, moment: float, handler: Handler) -> None:
        """Call `handler` once when `time.monotonic()` reaches `moment`."""
        self._timers.append((moment, handler))
        self._timers.sort(key=lambda timer: timer[0])

    def cancel(self, handler: Handler) -> None:
        """Forget the timers of this handler."""
        self._timers = [timer for timer in self._timers if timer[1] != handler]

    def on_signal(self, number: int, handler: Handler) -> None:
        """Call `handler`, in the loop, whenever the signal arrives."""
        self._signals[number] = handler
        signal.signal(number, lambda *_: None)

    # --- the loop itself ---

    def run(self) -> None:
        """Serve until `stop`."""
        while self._running:
            pause = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for descriptor, _ in self._epoll.poll(pause):
                handler = self._handlers.get(descriptor)
                if handler is not None:  # an earlier one of this round may have ended its watch
                    self._call(handler)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._call(self._timers.pop(0)[1])

    def stop(self) -> None:
        """Leave `run` after what is being handled."""
        self._running = False

    def _call(self, handler: Handler) -> None:
        """Run a handler; the first process must outlive a fault of its own, and the host must hear of it."""
        try:
            handler()
        except Exception:  # noqa: BLE001
            self.send(Frame({"event": "fault", "detail": traceback.format_exc(limit=5)}))

    # --- signals ---

    def _catch_signals(self) -> socket.socket:
        woken, wakes = socket.socketpair()
        for end in (woken, wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(wakes.detach(), warn_on_full_buffer=False)
        self.watch(woken.fileno(), self._signalled)
        return woken

    def _signalled(self) -> None:
        for number in set(self._woken.recv(4096)):
            handler = self._signals.get(number)
            if handler is not None:
                self._call(handler)

    # --- the channel ---

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
            if error.errno not in {errno.EPIPE, errno.EIO, errno.ENODEV, errno.ECONNRESET}:
                raise
            data = b""
        if not data:
            self._hang_up()
            return
        for frame in self._frames.feed(data):
            self.on_frame(frame)

    def _accept(self) -> None:
        """Whoever comes is the host; the one before is cut off, with all that it had not read."""
        if self._listening is None:
            return
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it has gone already
            return
        self._leave()
        connection.setblocking(False)
        self._channel = connection.detach()
        self._frames = Frames()
        self.forget_outgoing()
        self._arm()

    def _leave(self) -> None:
        if self._channel != NOBODY:
            if self._armed:
                self.unwatch(self._channel)
            os.close(self._channel)
            self._channel, self._armed = NOBODY, 0

    def _hang_up(self) -> None:
        """Nobody has the host's end open, and the port stays readable: wait until the kernel says that it changed."""
        if self._listening is not None:
            self._leave()
            return
        self._hung_up = True
        self._arm()
        self.on_signal(signal.SIGIO, self._look_again)
        fcntl.fcntl(self._channel, fcntl.F_SETOWN, os.getpid())
        self._ask_for_signals(asked=True)
        self.at(time.monotonic() + HANG_UP_PAUSE_S, self._look_again)
        # A host that came back before the kernel was asked is not signalled.
        if self._has_host():
            self._look_again()

    def _look_again(self) -> None:
        if self._hung_up:
            self.cancel(self._look_again)
            # Only while waiting: the port would signal every byte that arrives.
            self._ask_for_signals(asked=False)
            self._hung_up = False
            self._arm()

    def _has_host(self) -> bool:
        ready = select.poll()
        ready.register(self._channel, 0)
        return not ready.poll(0)  # otherwise: hung up

    def _ask_for_signals(self, *, asked: bool) -> None:
        flags = fcntl.fcntl(self._channel, fcntl.F_GETFL)
        fcntl.fcntl(self._channel, fcntl.F_SETFL, flags | os.O_ASYNC if asked else flags & ~os.O_ASYNC)

    def _write(self) -> None:
        while self._outgoing and self._channel != NOBODY:
            try:
                written = os.write(self._channel, self._outgoing[0])
            except OSError:  # full, or nobody has the host's end open: wait until it can be written
                break
            self._outgoing_bytes -= written
            if written == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][written:]
        self._arm()

    def _arm(self) -> None:
        if self._channel == NOBODY:
            return
        wanted = 0 if self._hung_up else select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0)
        if wanted == self._armed:
            return
        if not wanted:
            self._epoll.unregister(self._channel)
            del self._handlers[self._channel]
        elif self._armed:
            self._epoll.modify(self._channel, wanted)
        else:
            self._epoll.register(self._channel, wanted)
            self._handlers[self._channel] = self._ready
        self._armed = wanted
