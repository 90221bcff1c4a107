"""Publishes what programs write, piece by piece, each stored before the next is taken from the guest.

A piece may be published twice; its offset says so. Bytes are bytes: nothing is decoded, so nothing is torn.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from torpor_contracts.errors import Transient
from torpor_contracts.ids import ExecId
from torpor_contracts.session import RetryRule
from torpor_contracts.vm import VmExecEnded
from torpor_messaging import subjects
from torpor_messaging.ports import Bus, Clock
from torpor_vm_host.domain.vm import Claim
from torpor_vm_host.ports import Output

PIECE_BYTES_MAX: Final = 64 * 1024
STORE_RETRY: Final = RetryRule(attempts_max=10, backoff_s=0.1, backoff_s_max=5.0, deadline_s=60.0)
"""How a piece is stored again while the bus is away; then the program is let go of, to be followed again later."""


class OutputStalled(Transient):
    """Output cannot be stored now. The guest keeps it, and holds the program up."""


class OutputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`exec_bytes_max`: output of one program that is kept; what it writes beyond is dropped, and said to be."""

    exec_bytes_max: int = 64 * 1024 * 1024


class OutputSink:
    """Takes the output of one program in one incarnation."""

    def __init__(self, bus: Bus, clock: Clock, claim: Claim, exec_id: ExecId, limits: OutputLimits) -> None:
        self._bus = bus
        self._clock = clock
        self._subject = subjects.output(claim.tenant_id, claim.session_id, exec_id)
        self._incarnation = str(claim.incarnation)
        self._limits = limits
        self.kept_bytes = 0
        """Up to here output has been stored, as far as this sink has seen."""

    async def take(self, output: Output) -> None:
        """Store output, as far as the limit lets it; raises `OutputStalled`."""
        for offset, piece in self._pieces(output):
            await self._store(piece, {"Torpor-Stream": output.stream, "Torpor-Offset": str(offset)})
            self.kept_bytes = max(self.kept_bytes, offset + len(piece))

    async def end(self, ended: VmExecEnded) -> None:
        """Say that no more will come; raises `OutputStalled`."""
        headers = {"Torpor-End": ended.outcome, "Torpor-Offset": str(ended.output_bytes)}
        if ended.exit_code is not None:
            headers["Torpor-Exit-Code"] = str(ended.exit_code)
        await self._store(b"", headers)

    def kept_of(self, output_bytes: int) -> int:
        """How much of so many bytes of output is kept."""
        return min(output_bytes, self._limits.exec_bytes_max)

    def _pieces(self, output: Output) -> Iterator[tuple[int, bytes]]:
        data = output.data[: max(0, self._limits.exec_bytes_max - output.offset)]
        for start in range(0, len(data), PIECE_BYTES_MAX):
            yield output.offset + start, data[start : start + PIECE_BYTES_MAX]

    async def _store(self, data: bytes, headers: dict[str, str]) -> None:
        headers = {**headers, "Torpor-Incarnation": self._incarnation}
        pause_s = STORE_RETRY.backoff_s
        for attempt in range(1, STORE_RETRY.attempts_max + 1):
            try:
                await self._bus.publish_stored(self._subject, data, headers)
            except Transient as error:
                if attempt == STORE_RETRY.attempts_max:
                    raise OutputStalled(f"{self._subject}: {error}") from error
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, STORE_RETRY.backoff_s_max)
            else:
                return
