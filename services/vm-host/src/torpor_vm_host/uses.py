"""When each machine was last used through this host: what nobody uses may be put to sleep, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager

from torpor_contracts.ids import VmId
from torpor_messaging.ports import Clock


class Uses:
    """Remembers the last use of machines, in memory: a process that has just started knows of none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now: dict[VmId, int] = {}
        self._last_s: dict[VmId, float] = {}

    @contextmanager
    def using(self, vm_id: VmId) -> Iterator[None]:
        """The machine is in use until this ends."""
        self._now[vm_id] = self._now.get(vm_id, 0) + 1
        try:
            yield
        finally:
            self._now[vm_id] -= 1
            if not self._now[vm_id]:
                del self._now[vm_id]
            self._last_s[vm_id] = self._clock.monotonic_s()

    def unused_s(self, vm_id: VmId) -> float | None:
        """For how long nobody has used the machine; 0 while somebody does, None when nobody ever has."""
        if vm_id in self._now:
            return 0.0
        last_s = self._last_s.get(vm_id)
        return None if last_s is None else max(0.0, self._clock.monotonic_s() - last_s)

    def forget(self, vm_id: VmId) -> None:
        """The machine is gone."""
        self._last_s.pop(vm_id, None)
