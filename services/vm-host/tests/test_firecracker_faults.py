"""The page-fault handler against a real userfaultfd: what it serves, and what becomes of a machine without one."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.firecracker.userfault import PAGE, userfaults_work
from torpor_vm_host.adapters.firecracker.deltas import write_from_diff
from torpor_vm_host.adapters.firecracker.engine import Engine
from torpor_vm_host.adapters.firecracker.jail import FAULTS_SOCKET, Jail, Jailing
from torpor_vm_host.adapters.firecracker.paging import OUTPUT, Memory, start_handler
from torpor_vm_host.adapters.firecracker.process import Recorded, last_words
from torpor_vm_host.ports import DriverError

pytestmark = pytest.mark.skipif(
    not userfaults_work() or os.geteuid() != 0, reason="needs root and a kernel with userfaultfd"
)
PAGES: Final = 64
WAIT_S: Final = 20.0
ENGINE: Final = Engine(
    firecracker=Path("firecracker"),
    jailer=Path("jailer"),
    version=(1, 17, 0),
    snapshot_version="1",
    cpu="c",
    kernel="k",
)
MACHINE: Final = """
import ctypes, hashlib, pathlib, sys, threading
from tests.support.firecracker.userfault import FaultedMemory
faulted = FaultedMemory({size}, pathlib.Path({socket!r}), {page_size}, {user})
say = lambda *words: print(*words, flush=True)
say("loaded")
for line in sys.stdin:
    exec(line)
"""


class FaultingMachine:
    """A process whose memory is served by a handler; it does what it is told, line by line."""

    def __init__(self, size: int, socket: Path, page_size: int, user: int) -> None:
        code = textwrap.dedent(MACHINE).format(size=size, socket=str(socket), page_size=page_size, user=user)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        # A machine whose handler fails is ended, and may be so before it has said a word.
        assert self.hear() in {b"loaded\n", b""}

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, line: str) -> bytes:
        self.tell(line)
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class World:
    """A base memory, a page file over it, a handler that serves both, and machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jail = Jail(folder, "vm-1", ENGINE, Jailing())
        self.jail.lay_out()
        self.base = folder / "base"
        self.whole = bytearray(os.urandom(PAGES * PAGE))
        self.whole[8 * PAGE : 24 * PAGE] = bytes(16 * PAGE)
        self.base.write_bytes(self.whole)
        self._opened: list[int] = []
        self._machines: list[FaultingMachine] = []

    def page_file(self, changed: dict[int, bytes]) -> Path:
        diff = self.folder / "diff"
        with diff.open("wb") as file:
            file.truncate(len(self.whole))
            for page, data in changed.items():
                os.pwrite(file.fileno(), data, page * PAGE)
                self.whole[page * PAGE : (page + 1) * PAGE] = data
        pages = self.folder / "pages"
        write_from_diff(diff, None, self.base, bytes(32), pages)
        return pages

    def handler(self, pages: Path | None) -> Recorded:
        base = os.open(self.base, os.O_RDONLY)
        self._opened.append(base)
        return start_handler(self.folder, self.jail, Memory(base=base, pages=pages))

    def machine(self, page_size: int = PAGE) -> FaultingMachine:
        self._machines.append(
            FaultingMachine(len(self.whole), self.jail.root / FAULTS_SOCKET, page_size, self.jail.owner)
        )
        return self._machines[-1]

    def close(self) -> None:
        for machine in self._machines:
            machine.close()
        for descriptor in self._opened:
            os.close(descriptor)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)  # what is waited for happens in other processes, which set no event


def test_a_machine_reads_its_base_and_the_pages_over_it(world: World) -> None:
    changed = {page: os.urandom(PAGE) for page in (0, 1, 2, 9, 10, 40, 63)} | {30: bytes(PAGE)}
    handler = world.handler(world.page_file(changed))
    machine = world.machine()
    assert machine.ask(f"say(faulted.memory[{9 * PAGE}] == {changed[9][0]})") == b"True\n"
    found = machine.ask("say(hashlib.sha256(faulted.memory).hexdigest())").decode().strip()
    assert found == hashlib.sha256(world.whole).hexdigest()
    machine.close()
    wait_until(lambda: not handler.alive)
    assert (world.folder / OUTPUT).read_text() == ""


def test_a_machine_without_changed_pages_reads_its_base(world: World) -> None:
    world.handler(None)
    machine = world.machine()
    for page in range(0, PAGES, 7):
        assert machine.ask(f"say(faulted.memory[{page * PAGE}])") == b"%d\n" % world.whole[page * PAGE]


def test_what_a_machine_wrote_stays_and_what_it_gave_back_is_zero(world: World) -> None:
    world.handler(None)
    machine = world.machine()
    machine.tell(f"faulted.memory[{30 * PAGE}] = 7")
    assert (
        machine.ask(f"say(faulted.memory[{30 * PAGE}], faulted.memory[{31 * PAGE}])")
        == b"7 %d\n" % (world.whole[31 * PAGE])
    )
    assert machine.ask(f"faulted.drop({30 * PAGE}, {2 * PAGE}); say(faulted.memory[{30 * PAGE}])") == b"0\n"
    assert (
        machine.ask(f"say(faulted.memory[{31 * PAGE}], faulted.memory[{32 * PAGE}])")
        == b"0 %d\n" % (world.whole[32 * PAGE])
    )


def test_many_threads_fault_at_once(world: World) -> None:
    world.handler(None)
    machine = world.machine()
    size = len(world.whole)
    # ctypes lets go of the interpreter's lock, so the threads really fault side by side.
    machine.tell("move = ctypes.CDLL(None).memcpy")
    machine.tell(f"copies = [ctypes.create_string_buffer({size}) for _ in range(8)]")
    machine.tell(f"work = lambda n: move(copies[n], ctypes.c_void_p(faulted.address), {size})")
    machine.tell("threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]")
    machine.tell("[t.start() for t in threads]; [t.join() for t in threads]; whole = bytes(faulted.memory)")
    assert machine.ask("say(all(c.raw == whole for c in copies))") == b"True\n"
    assert machine.ask(f"say(whole[{40 * PAGE}])") == b"%d\n" % world.whole[40 * PAGE]


def test_a_handler_that_fails_ends_its_machine(world: World) -> None:
    handler = world.handler(None)
    machine = world.machine(page_size=2**21)
    assert machine.process.wait(WAIT_S) == -signal.SIGKILL
    wait_until(lambda: not handler.alive)
    assert "other pages" in last_words(world.folder / OUTPUT)


def test_a_handler_that_cannot_begin_says_why(world: World, tmp_path: Path) -> None:
    world.base.write_bytes(b"")
    with pytest.raises(DriverError, match=r"faults-failed.*empty"):
        world.handler(None)
