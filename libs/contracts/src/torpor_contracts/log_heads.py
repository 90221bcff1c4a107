"""What the log-relay answers to queries: the newest signed head of the log, by which receipts can be proved."""

import msgspec


class HeadQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`head`: the newest signed head; it has no parameters."""


class HeadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`note` is a C2SP checkpoint, signed with `public_key` (a C2SP verifier key), over the log's first `size` rows.

    `relayed` is the last position known to be in the stream EVENTS.
    """

    note: str
    size: int
    public_key: str
    relayed: int
