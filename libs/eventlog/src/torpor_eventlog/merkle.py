"""The Merkle tree over the log (RFC 9162, section 2.1): its growing edge, its stored nodes, proofs and their checks.

Only nodes of level 8, 16, … are stored, one for every 256 of the stored level below; all others are computed from
at most 255 of those. Everything here is pure: a proof says which digests it needs, and whoever keeps them brings them.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 32
TILE_LEVELS: Final = 8
"""How many levels lie between stored ones: a stored node covers 2**8 of the stored level below it."""

EMPTY_ROOT: Final = sha256(b"").digest()
"""The root of the tree without leaves."""


class Node(NamedTuple):
    """A stored node: the root of the perfect subtree number `number` (from 0) of height `level`."""

    level: int
    number: int
    digest: bytes


class Span(NamedTuple):
    """`size` stored digests of one level, from number `first` (from 0).

    Level 0 are the rows: number n is the digest of the row at position n + 1.
    """

    level: int
    first: int
    size: int


def leaf_hash(data: bytes) -> bytes:
    """The hash of a leaf."""
    return sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node."""
    return sha256(b"\x01" + left + right).digest()


class Frontier:
    """The growing edge: the roots of the perfect subtrees that make up the tree, largest first."""

    __slots__ = ("_roots", "size")

    def __init__(self, size: int = 0, roots: Iterable[bytes] = ()) -> None:
        self.size = size
        self._roots = list(roots)
        if len(self._roots) != size.bit_count():
            raise ValueError(f"a tree of {size} leaves has {size.bit_count()} perfect subtrees, not {len(self._roots)}")

    @classmethod
    def from_bytes(cls, size: int, packed: bytes) -> "Frontier":
        """What `to_bytes` packed."""
        return cls(size, (packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)))

    def to_bytes(self) -> bytes:
        """The roots, one after the other."""
        return b"".join(self._roots)

    def copy(self) -> "Frontier":
        """An independent copy."""
        return Frontier(self.size, self._roots)

    def extend(self, leaves: Iterable[bytes]) -> list[Node]:
        """Add leaf hashes; the nodes that are complete now and must be stored."""
        complete: list[Node] = []
        grown: list[bytes] = []
        pending, number, level = list(leaves), self.size, 0
        self.size += len(pending)
        while pending:
            if number & 1:
                number -= 1
                pending.insert(0, self._roots.pop())
            if len(pending) & 1:
                grown.append(pending.pop())
            pairs = iter(pending)
            pending = [sha256(b"\x01" + left + right).digest() for left, right in zip(pairs, pairs, strict=True)]
            number >>= 1
            level += 1
            if level % TILE_LEVELS == 0:
                complete += [Node(level, number + at, digest) for at, digest in enumerate(pending)]
        self._roots += reversed(grown)
        return complete

    def root(self) -> bytes:
        """The root over all leaves."""
        return _fold(self._roots)


class Subtree(NamedTuple):
    """The perfect subtree number `number` (from 0) of height `level`."""

    level: int
    number: int

    def span(self) -> Span:
        """The stored digests it is computed from."""
        stored = self.level // TILE_LEVELS * TILE_LEVELS
        spread = self.level - stored
        return Span(stored, self.number << spread, 1 << spread)


class ProofPlan(NamedTuple):
    """A proof yet without digests: each element is the root over these adjoining perfect subtrees, largest first."""

    elements: tuple[tuple[Subtree, ...], ...]

    def spans(self) -> list[Span]:
        """The stored digests that `resolve` needs, each span once."""
        return list(dict.fromkeys(subtree.span() for element in self.elements for subtree in element))

    def resolve(self, digests: Mapping[Span, Sequence[bytes]]) -> list[bytes]:
        """The proof."""
        return [_fold([_perfect_root(digests[subtree.span()]) for subtree in element]) for element in self.elements]


def inclusion_plan(index: int, size: int) -> ProofPlan:
    """PATH(index, D[size]) of RFC 9162, section 2.1.3.1; `index` counts from 0."""
    if not 0 <= index < size:
        raise ValueError(f"there is no leaf {index} in a tree of {size}")
    elements: list[tuple[Subtree, ...]] = []
    start, end = 0, size
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            elements.append(_perfect_subtrees(middle, end))
            end = middle
        else:
            elements.append(_perfect_subtrees(start, middle))
            start = middle
    return ProofPlan(tuple(reversed(elements)))


def consistency_plan(old_size: int, new_size: int) -> ProofPlan:
    """PROOF(old_size, D[new_size]) of RFC 9162, section 2.1.4.1; empty when the sizes are equal or the old is 0."""
    if not 0 <= old_size <= new_size:
        raise ValueError(f"a tree of {old_size} is no earlier state of a tree of {new_size}")
    elements: list[tuple[Subtree, ...]] = []
    start, end, whole = 0, new_size, True
    while 0 < old_size < end:
        middle = start + _split(end - start)
        if old_size <= middle:
            elements.append(_perfect_subtrees(middle, end))
            end = middle
        else:
            elements.append(_perfect_subtrees(start, middle))
            start, whole = middle, False
    if not whole:
        elements.append(_perfect_subtrees(start, end))
    return ProofPlan(tuple(reversed(elements)))


def root_plan(size: int) -> ProofPlan:
    """The root over the first `size` leaves as a plan of one element; only for a tree that is not empty."""
    return ProofPlan((_perfect_subtrees(0, size),))


def inclusion_holds(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether the proof shows leaf hash `leaf` at `index` (from 0) under `root` (RFC 9162, section 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    number, last, digest = index, size - 1, leaf
    for step in proof:
        if last == 0:
            return False
        if number & 1 or number == last:
            digest = node_hash(step, digest)
            while not number & 1 and number:
                number, last = number >> 1, last >> 1
        else:
            digest = node_hash(digest, step)
        number, last = number >> 1, last >> 1
    return last == 0 and digest == root


def consistency_holds(old_size: int, new_size: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> bool:
    """Whether the proof shows the old tree to be a prefix of the new one (RFC 9162, section 2.1.4.2)."""
    if not 0 <= old_size <= new_size:
        return False
    if old_size == new_size:
        return not proof and old_root == new_root
    if old_size == 0:
        return not proof and old_root == EMPTY_ROOT
    path = [old_root, *proof] if old_size.bit_count() == 1 else list(proof)
    return bool(path) and _replayed(old_size, new_size, path) == (old_root, new_root)


def _replayed(old_size: int, new_size: int, path: Sequence[bytes]) -> tuple[bytes, bytes] | None:
    """The old and the new root that a consistency path leads to; None if it is too long or too short."""
    number, last = old_size - 1, new_size - 1
    while number & 1:
        number, last = number >> 1, last >> 1
    old, new = path[0], path[0]
    for step in path[1:]:
        if last == 0:
            return None
        if number & 1 or number == last:
            old, new = node_hash(step, old), node_hash(step, new)
            while not number & 1 and number:
                number, last = number >> 1, last >> 1
        else:
            new = node_hash(new, step)
        number, last = number >> 1, last >> 1
    return (old, new) if last == 0 else None


def _split(size: int) -> int:
    """The largest power of two below `size`."""
    return 1 << (size - 1).bit_length() - 1


def _perfect_subtrees(start: int, end: int) -> tuple[Subtree, ...]:
    """The perfect subtrees that cover leaves [start, end), a range that RFC 9162's splits have aligned."""
    found = []
    while start < end:
        level = (end - start).bit_length() - 1
        found.append(Subtree(level, start >> level))
        start += 1 << level
    return tuple(found)


def _perfect_root(digests: Sequence[bytes]) -> bytes:
    level = list(digests)
    while len(level) > 1:
        level = [node_hash(level[at], level[at + 1]) for at in range(0, len(level), 2)]
    return level[0]


def _fold(roots: Sequence[bytes]) -> bytes:
    """The root over adjoining perfect subtrees, largest first."""
    if not roots:
        return EMPTY_ROOT
    digest = roots[-1]
    for left in reversed(roots[:-1]):
        digest = node_hash(left, digest)
    return digest
