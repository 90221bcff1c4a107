"""What a command is answered with: its receipt, or a typed refusal."""

import msgspec

from torpor_contracts.ids import CommandId


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that a command took effect: where its last event stands in the log.

    The same command id is answered with the same receipt for ever. `digest` is the hex row digest,
    which is also the RFC 9162 leaf hash of the event at `position`.
    """

    command_id: CommandId
    stream: str
    version: int
    position: int
    digest: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a command was not accepted. `code` is stable; `advice` says what to do; nothing was recorded."""

    code: str
    message: str
    advice: str
    retry_after_s: float | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message sent to a command's `Torpor-Reply` subject: exactly one of `receipt` and `refusal` is set."""

    receipt: Receipt | None = None
    refusal: Refusal | None = None
