"""Decides which pieces of a put need not be stored, because an earlier pack has them where they are cheap to read.

Sharing everything would spread the hundredth checkpoint over a hundred packs, a page here and a page there. So a frame
of which little is needed is not shared, nor are more packs than `PACKS_MAX`: such pieces are stored again, together.
That bounds what restoring costs, however long the lineage; there is no chain to be flattened later.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from torpor_chunks.cutting import NO_ID, PieceId
from torpor_chunks.pack_format import Frame, PackEntry

PACKS_MAX: Final = 24
"""How many packs a part may be spread over, its own among them."""

NEEDED_SHARE_MIN: Final = 1 / 4
"""A frame is shared only if at least this share of its pieces is needed."""


class SharedFrame(NamedTuple):
    """A frame that an earlier pack needs, the ids of its pieces, and the places of those that are needed."""

    pack: PackEntry
    frame: Frame
    ids: list[PieceId]
    needed: AbstractSet[int]


class Place(NamedTuple):
    """Where a piece is: a frame's number among those of a put, and the piece's place in the frame."""

    frame: int
    piece: int


class Sharing(NamedTuple):
    """What a put shares: the frames, where in them each shared piece is, and what else earlier packs have."""

    frames: list[SharedFrame]
    places: dict[PieceId, Place]
    known: AbstractSet[PieceId]


NOTHING: Final = Sharing([], {}, frozenset())


def share(wanted: Iterable[PieceId], offered: Sequence[SharedFrame]) -> Sharing:
    """Choose among the frames that are offered."""
    places = _places(offered)
    needed: dict[int, list[PieceId]] = {}
    for piece_id in set(wanted) - {NO_ID}:
        found = places.get(piece_id)
        if found is not None:
            needed.setdefault(found.frame, []).append(piece_id)
    worth = {number: ids for number, ids in needed.items() if len(ids) >= NEEDED_SHARE_MIN * len(offered[number].ids)}
    kept = _fewest_packs(worth, offered)
    renumbered = {number: new for new, number in enumerate(kept)}
    return Sharing(
        frames=[offered[number] for number in kept],
        places={
            piece_id: Place(renumbered[number], places[piece_id].piece) for number in kept for piece_id in worth[number]
        },
        known=places.keys(),
    )


def _places(offered: Sequence[SharedFrame]) -> dict[PieceId, Place]:
    """Where each piece is. Of a piece that was stored again, the place counts that the earlier pack itself uses."""
    places: dict[PieceId, Place] = {}
    for number, offer in enumerate(offered):
        for place in offer.needed:
            places.setdefault(offer.ids[place], Place(number, place))
    for number, offer in enumerate(offered):
        for place, piece_id in enumerate(offer.ids):
            places.setdefault(piece_id, Place(number, place))
    return places


def _fewest_packs(needed: dict[int, list[PieceId]], offered: Sequence[SharedFrame]) -> list[int]:
    """The frames of those packs that give most, in order; room is left for the put's own pack."""
    gives: dict[str, int] = {}
    for number, ids in needed.items():
        address = offered[number].pack.address
        gives[address] = gives.get(address, 0) + len(ids)
    most = sorted(gives, key=lambda address: (-gives[address], address))[: PACKS_MAX - 1]
    return sorted(number for number in needed if offered[number].pack.address in set(most))
