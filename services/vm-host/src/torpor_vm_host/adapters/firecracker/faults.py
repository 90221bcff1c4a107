"""The page-fault handler: a process of its own that gives one machine the pages of its memory when it needs them.

It serves a userfaultfd (kernel: Documentation/admin-guide/mm/userfaultfd.rst) that Firecracker hands over, from a base
memory that never changes and a page file with what differs from it. A machine whose handler is gone would stand still
at its next fault and nobody would know: whatever goes wrong here ends the machine too. Standard library only, and run
as a file, so that a machine's handler is small; it opens nothing itself, so it needs no rights.
"""

import argparse
import array
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys

PAGE = 4096
WINDOW = 16
"""Pages served with the one that was asked for, its neighbours most likely being needed next."""
CONNECT_S_MAX = 60.0
MESSAGE_BYTES_MAX = 64 * 1024
EVENT = struct.Struct("<B7xQQ8x")
"""struct uffd_msg: what happened, then for a page fault flags and address, for a removal start and end."""
EVENTS_READ = 64
PAGEFAULT = 0x12
REMOVE = 0x15
RANGE = struct.Struct("<QQ")
COPY = struct.Struct("<QQQQq")
ZERO = struct.Struct("<QQQq")
UFFDIO_WAKE = 0x8010AA02
UFFDIO_COPY = 0xC028AA03
UFFDIO_ZEROPAGE = 0xC020AA04
PR_SET_NO_NEW_PRIVS = 38
MISSING, SERVED, REMOVED = 0, 1, 2
NOTHING = bytes(PAGE)


class MachineGone(Exception):  # noqa: N818  (an end)
    """The machine has ended; nothing is left to do."""


class Source:
    """The machine's memory as it was checkpointed: `base`, and over it the pages of a page file."""

    def __init__(self, base: int, pages: int, count: int, numbers_at: int) -> None:
        # Private and writable only so that ctypes says where they are; nothing ever writes to them.
        self._base = mmap.mmap(base, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.base_at = ctypes.addressof(ctypes.c_char.from_buffer(self._base))
        self.size = len(self._base)
        self.slots = array.array("I", bytes(self.size // PAGE * 4))
        """Page number -> one more than its place in the page file, 0 for a page of the base."""
        self.pages_at = 0
        if count:
            self._pages = mmap.mmap(pages, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self.pages_at = ctypes.addressof(ctypes.c_char.from_buffer(self._pages)) + numbers_at + 4 * count
            numbers = array.array("I", self._pages[numbers_at : numbers_at + 4 * count])
            for place, number in enumerate(numbers, 1):
                self.slots[number] = place

    def run(self, page: int, end: int) -> tuple[int | None, int]:
        """Where the bytes of `page` are (None: they are zero), and how many pages until `end` follow there."""
        slot, count = self.slots[page], 1
        if slot:
            while page + count < end and self.slots[page + count] == slot + count:
                count += 1
            return self.pages_at + (slot - 1) * PAGE, count
        while page + count < end and not self.slots[page + count]:
            count += 1
        whole = self._base[page * PAGE : (page + count) * PAGE]
        if whole == bytes(len(whole)):
            return None, count
        if whole[:PAGE] == NOTHING:
            return None, 1
        return self.base_at + page * PAGE, count


class Region:
    """A part of the machine's memory: `address` in Firecracker, `first` page in the source, how many pages."""

    def __init__(self, mapping: dict[str, int]) -> None:
        self.address = mapping["base_host_virt_addr"]
        self.size = mapping["size"]
        self.first = mapping["offset"] // PAGE
        self.state = bytearray(self.size // PAGE)
        # Releases before 1.13 know only the name with "kib", which has always been bytes.
        if mapping.get("page_size", mapping.get("page_size_kib", PAGE)) != PAGE or mapping["offset"] % PAGE:
            raise ValueError(f"memory of other pages than {PAGE} bytes is not served: {mapping}")


class Server:
    """Serves one userfaultfd."""

    def __init__(self, uffd: int, regions: list[Region], source: Source) -> None:
        self._uffd = uffd
        self._regions = regions
        self._source = source
        self._waiting: list[int] = []
        """Addresses whose pages could not be given because the memory was just being changed."""

    def serve(self) -> None:
        """Take what has happened and answer it."""
        try:
            data = os.read(self._uffd, EVENTS_READ * EVENT.size)
        except BlockingIOError:
            data = b""
        faults, self._waiting = self._waiting, []
        for kind, first, second in EVENT.iter_unpack(data):
            if kind == PAGEFAULT:
                faults.append(second)
            elif kind == REMOVE:
                self._remove(first, second)
            else:
                raise ValueError(f"the kernel tells of an event {kind:#x} that nobody asked for")
        for address in faults:
            self._give(address)

    @property
    def waiting(self) -> bool:
        """Whether a page is owed that could not be given yet."""
        return bool(self._waiting)

    def _region(self, address: int) -> Region:
        for region in self._regions:
            if region.address <= address < region.address + region.size:
                return region
        raise ValueError(f"a fault at {address:#x} is in no memory of the machine")

    def _remove(self, start: int, end: int) -> None:
        region = self._region(start)
        first, last = (start - region.address) // PAGE, (end - region.address) // PAGE
        region.state[first:last] = bytes([REMOVED]) * (last - first)

    def _give(self, address: int) -> None:
        region = self._region(address)
        asked = (address - region.address) // PAGE
        if region.state[asked] != MISSING:
            # Removed: it reads as zero from now on. Served: two faults met; the second is given nothing, but woken.
            self._put(region, asked, None, 1)
            return
        start = asked - asked % WINDOW
        end = min(start + WINDOW, len(region.state))
        page = start
        while page < end:
            if region.state[page] != MISSING:
                page += 1
                continue
            stop = next((at for at in range(page, end) if region.state[at] != MISSING), end)
            where, count = self._source.run(region.first + page, region.first + stop)
            self._put(region, page, where, count)
            page += count

    def _put(self, region: Region, page: int, where: int | None, count: int) -> None:
        """Put pages in place; those that are there already stay, and whoever waits for them is woken."""
        at = region.address + page * PAGE
        done = 0
        while done < count:
            begin, length = at + done * PAGE, (count - done) * PAGE
            if where is None:
                request = bytearray(ZERO.pack(begin, length, 0, 0))
                number = UFFDIO_ZEROPAGE
            else:
                request = bytearray(COPY.pack(begin, where + done * PAGE, length, 0, 0))
                number = UFFDIO_COPY
            try:
                fcntl.ioctl(self._uffd, number, request)
                done = count
            except OSError as error:
                put = struct.unpack_from("<q", request, len(request) - 8)[0]
                done += max(0, put) // PAGE
                if error.errno == errno.EEXIST or put == -errno.EEXIST:
                    fcntl.ioctl(self._uffd, UFFDIO_WAKE, RANGE.pack(at + done * PAGE, PAGE))
                    done += 1
                elif error.errno == errno.EAGAIN:
                    if put <= 0:
                        self._waiting.append(at + done * PAGE)
                        break
                elif error.errno == errno.ESRCH:
                    raise MachineGone from error
                else:
                    raise
        for given in range(page, page + done):
            if region.state[given] == MISSING:
                region.state[given] = SERVED


def receive(stream: socket.socket) -> tuple[int, list[Region]]:
    """Firecracker's userfaultfd, and where the machine's memory is."""
    message, descriptors, _, _ = socket.recv_fds(stream, MESSAGE_BYTES_MAX, 1)
    if not descriptors:
        raise MachineGone
    # One sendmsg carries both; what is longer than a socket's buffer would come in parts.
    while not message.endswith(b"]"):
        more = stream.recv(MESSAGE_BYTES_MAX)
        if not more or len(message) > MESSAGE_BYTES_MAX:
            raise MachineGone
        message += more
    return descriptors[0], [Region(mapping) for mapping in json.loads(message)]


def peer(stream: socket.socket) -> int:
    """A descriptor of the process at the other end."""
    pid, _, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return os.pidfd_open(pid)


def work(listening: socket.socket, source: Source) -> None:
    """Serve until the machine ends; when that fails, end the machine."""
    listening.settimeout(CONNECT_S_MAX)
    stream, _ = listening.accept()
    stream.settimeout(CONNECT_S_MAX)
    machine = peer(stream)
    try:
        uffd, regions = receive(stream)
        os.set_blocking(uffd, False)
        server = Server(uffd, regions, source)
        polling = select.poll()
        polling.register(uffd, select.POLLIN)
        polling.register(machine, select.POLLIN)
        while True:
            ready = dict(polling.poll(1 if server.waiting else None))
            if machine in ready:
                return
            server.serve()
    except MachineGone:
        return
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(machine, signal.SIGKILL)
        raise


def drop_rights(user: int) -> None:
    """Become an ordinary user for good."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")


def go_on_alone() -> None:
    """Go on as a process that nobody has to wait for; the one that was started prints its pid and ends."""
    child = os.fork()
    if child:
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os._exit(0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def main() -> None:
    """Run on descriptors that were inherited: a listening socket, the base memory, a page file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--base", type=int, required=True)
    parser.add_argument("--pages", type=int, default=-1, help="a page file, of which ...")
    parser.add_argument("--count", type=int, default=0, help="... so many page numbers ...")
    parser.add_argument("--numbers-at", type=int, default=0, help="... begin at this byte")
    parser.add_argument("--user", type=int, required=True)
    options = parser.parse_args()
    drop_rights(options.user)
    source = Source(options.base, options.pages, options.count, options.numbers_at)
    go_on_alone()
    try:
        work(socket.socket(fileno=options.socket), source)
    except (TimeoutError, MachineGone):
        sys.exit(f"no machine came within {CONNECT_S_MAX} s")


if __name__ == "__main__":
    main()
