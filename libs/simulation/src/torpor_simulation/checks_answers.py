"""Laws of what clients were told: one command has one receipt, which the log confirms; no refusal was untrue."""

from collections.abc import Iterator, Mapping

from torpor_contracts.replies import Receipt
from torpor_simulation.broker import Broker
from torpor_simulation.clients import PUT_OFF, Asked, Ledger
from torpor_simulation.history import History, Violation


def answers(ledger: Ledger, history: History, copies: Mapping[str, int]) -> Iterator[Violation]:
    """Hold every answer against the log.

    A command of which there were several copies at a time may be refused once and happen another time: it was sent
    again, or taken up by a second replica when the first was slow. Any other does not happen after it was refused.
    """
    happened = {entry.row.command_id for entry in history.entries}
    for command_id, asked in ledger.asked.items():
        scoped = f"{asked.command.tenant_id}/{command_id}"
        receipts = [reply.receipt for reply in asked.replies if reply.receipt is not None]
        if asked.unanswered:
            yield Violation("answers", f"{command_id} was never answered")
        if len({receipt.position for receipt in receipts}) > 1:
            yield Violation("answers", f"{command_id} has {len(receipts)} different receipts")
        for receipt in receipts[:1]:
            yield from _confirmed(history, receipt, command_id, scoped)
        only_one = copies.get(command_id, 0) <= 1
        if only_one and not receipts and scoped in happened and _last_word(asked) is not None:
            yield Violation("answers", f"{command_id} was refused ({_last_word(asked)}) and has happened")
        yield from _went_back(asked, command_id)


def dead_letters(broker: Broker) -> Iterator[Violation]:
    """Nothing that was sent in earnest is ever buried."""
    for message in broker.streams["DEAD"].messages.values():
        why = message.headers.get("Torpor-Dead-Reason", message.data[:200].decode(errors="replace"))
        source = message.headers.get("Torpor-Dead-Subject", "")
        yield Violation("dead-letters", f"{message.subject} {source}: {why}")


def _confirmed(history: History, receipt: Receipt, command_id: str, scoped: str) -> Iterator[Violation]:
    if receipt.position > len(history.entries):
        yield Violation("answers", f"{command_id} has a receipt for {receipt.position}, beyond the end of the log")
        return
    row = history.entries[receipt.position - 1].row
    said = (receipt.command_id, receipt.stream, receipt.version, receipt.digest)
    if said != (command_id, row.stream, row.version, row.digest.hex()) or row.command_id != scoped:
        yield Violation("answers", f"the receipt of {command_id} is not what the log has at {receipt.position}")


def _last_word(asked: Asked) -> str | None:
    for reply in reversed(asked.replies):
        if reply.refusal is not None and reply.refusal.code not in PUT_OFF:
            return reply.refusal.code
    return None


def _went_back(asked: Asked, command_id: str) -> Iterator[Violation]:
    had_receipt = False
    for reply in asked.replies:
        if (reply.receipt is None) == (reply.refusal is None):
            yield Violation("answers", f"{command_id} was answered neither with a receipt nor with a refusal")
        if had_receipt and reply.refusal is not None and reply.refusal.code not in PUT_OFF:
            yield Violation("answers", f"{command_id} had its receipt and was then refused: {reply.refusal.code}")
        had_receipt = had_receipt or reply.receipt is not None
