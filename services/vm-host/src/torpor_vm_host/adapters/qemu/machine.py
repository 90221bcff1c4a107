"""A machine this driver object is in charge of: its process, what it was started for, and the way to its guest."""

import asyncio
from typing import Any, Final

from torpor_vm_host.adapters.qemu.following import Followers
from torpor_vm_host.adapters.qemu.guest import GuestChannel, WallClock
from torpor_vm_host.adapters.qemu.process import AGENT_SOCKET, QemuProcess
from torpor_vm_host.adapters.qemu.records import KeptSpec
from torpor_vm_host.adapters.qemu.template import Template
from torpor_vm_host.ports import VM_GONE, DriverError

HELLO_S: Final = 30.0


class Machine:
    """`kept` is None when what the machine was started for cannot be read; it can be frozen and ended then."""

    def __init__(
        self,
        process: QemuProcess,
        kept: KeptSpec | None,
        wall_ns: WallClock,
        *,
        paused: bool,
        guest: GuestChannel | None = None,
    ) -> None:
        self.process = process
        self.paused = paused
        self.template: Template | None = None
        self.jobs: dict[str, asyncio.Event] = {}
        """Jobs of QEMU by their id: set when one has come to its end."""
        self.checkpointing = asyncio.Lock()
        self._kept = kept
        self._wall_ns = wall_ns
        self._guest = guest
        self._talking: tuple[GuestChannel, Followers] | None = None
        self._greeting = asyncio.Lock()
        process.on_event = self._event

    @property
    def kept(self) -> KeptSpec:
        """What the machine was started for; `DriverError("vm-unknown")` when that cannot be read."""
        if self._kept is None:
            directory = self.process.directory
            raise DriverError("vm-unknown", f"nothing says what the machine in {directory} is for", retryable=False)
        return self._kept

    async def talk(self) -> tuple[GuestChannel, Followers]:
        """The open channel to the guest; opens it, and greets the guest as who it is, when there is none."""
        if self.paused:
            raise DriverError("vm-not-running", f"{self.kept.vm_id} is paused", retryable=True)
        async with self._greeting:
            if self._talking is not None and self._talking[0].is_open:
                return self._talking
            if not self.process.alive:
                raise DriverError(VM_GONE, self.process.how_it_ended(), retryable=False)
            guest, self._guest = self._guest or GuestChannel.connect(self.process.directory / AGENT_SOCKET), None
            followers = Followers(guest)
            try:
                await guest.hello(self.kept.identity, self._wall_ns, HELLO_S)
            except BaseException:
                guest.close()
                raise
            self._talking = guest, followers
            return self._talking

    def hang_up(self) -> None:
        """Cut the channel to the guest."""
        for guest in (self._guest, self._talking[0] if self._talking else None):
            if guest is not None:
                guest.close()
        self._guest = self._talking = None

    def let_go(self) -> None:
        """Cut every connection; the machine goes on."""
        self.hang_up()
        self.process.let_go()

    def _event(self, name: str, data: dict[str, Any]) -> None:
        match name:
            case "STOP":
                self.paused = True
            case "RESUME":
                self.paused = False
            case "JOB_STATUS_CHANGE" if data.get("status") in {"concluded", "null"}:
                ended = self.jobs.get(str(data.get("id")))
                if ended is not None:
                    ended.set()
            case _:
                return
