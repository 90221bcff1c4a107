"""Clients of a simulated world: they ask until they are answered, and remember every question and every answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from torpor_contracts.errors import Transient
from torpor_contracts.ids import CommandId, TenantId
from torpor_contracts.replies import Reply
from torpor_messaging.ports import Clock, OutgoingCommand
from torpor_simulation.bus import SimBus

ANSWER_TIMEOUT_S: Final = 6.0
ASK_MAX: Final = 60
"""How often one question is asked before its client gives up; the bound of a client's patience."""

PUT_OFF: Final = frozenset({"unavailable", "given up"})
"""Refusals that say nothing of the command: it may be sent again with the same id."""


@dataclass
class Asked:
    """One command, and every reply that came to it."""

    command: OutgoingCommand
    asked_at_s: float
    replies: list[Reply] = field(default_factory=list)
    unanswered: bool = False


class Ledger:
    """What all clients of a world asked and heard, by command id."""

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}

    def open(self, command: OutgoingCommand, at_s: float) -> Asked:
        """The entry of a command; the same for a repeated id."""
        return self.asked.setdefault(command.command_id, Asked(command, at_s))


class Client:
    """Somebody with a connection to the bus, of one tenant."""

    def __init__(  # noqa: PLR0917  (who it is, then what it has)
        self,
        tenant_id: TenantId,
        name: str,
        bus: SimBus,
        clock: Clock,
        ledger: Ledger,
        heard: Callable[[OutgoingCommand, Reply], None],
    ) -> None:
        self.tenant_id = tenant_id
        self._name = name
        self._bus = bus
        self._clock = clock
        self._ledger = ledger
        self._heard = heard
        self._asked = 0

    def new_id(self, what: str) -> CommandId:
        """A command id nobody else uses."""
        self._asked += 1
        return CommandId(f"{self._name}-{self._asked}-{what}")

    async def ask(
        self, target: str, command: msgspec.Struct, command_id: CommandId, service: str = "scheduler"
    ) -> Reply | None:
        """Send a command to a service until it is answered; None when patience ended first."""
        outgoing = OutgoingCommand(
            tenant_id=self.tenant_id, service=service, target=target, command=command, command_id=command_id
        )
        entry = self._ledger.open(outgoing, self._clock.monotonic_s())
        for _ in range(ASK_MAX):
            try:
                reply = msgspec.json.decode(await self._bus.call(outgoing, ANSWER_TIMEOUT_S), type=Reply)
            except Transient as error:
                await self._clock.sleep(error.retry_after_s)
                continue
            entry.replies.append(reply)
            self._heard(outgoing, reply)
            if reply.refusal is None or reply.refusal.code not in PUT_OFF:
                return reply
            await self._clock.sleep(1.0)
        entry.unanswered = True
        return None


def told(reply: Reply) -> str:
    """A reply in a few words."""
    if reply.receipt is not None:
        return f"receipt {reply.receipt.stream}@{reply.receipt.version}"
    return f"refused {reply.refusal.code}" if reply.refusal is not None else "nothing"
