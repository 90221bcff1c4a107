"""The Merkle tree against the recursive definitions of RFC 9162, and against published vectors."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor_eventlog.merkle import (
    EMPTY_ROOT,
    Frontier,
    Node,
    ProofPlan,
    Span,
    consistency_holds,
    consistency_plan,
    inclusion_holds,
    inclusion_plan,
    leaf_hash,
    root_plan,
)

SIZE_MAX: Final = 700

# The inputs and the roots of certificate-transparency's reference tests.
INPUTS: Final = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS: Final = (
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)


def defined_root(leaves: Sequence[bytes]) -> bytes:
    """MTH of RFC 9162, section 2.1.1, over leaf hashes, as it is written there."""
    if not leaves:
        return sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = defined_split(len(leaves))
    return sha256(b"\x01" + defined_root(leaves[:split]) + defined_root(leaves[split:])).digest()


def defined_path(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """PATH of section 2.1.3.1."""
    if len(leaves) == 1:
        return []
    split = defined_split(len(leaves))
    if index < split:
        return [*defined_path(index, leaves[:split]), defined_root(leaves[split:])]
    return [*defined_path(index - split, leaves[split:]), defined_root(leaves[:split])]


def defined_proof(old: int, leaves: Sequence[bytes], *, whole: bool = True) -> list[bytes]:
    """SUBPROOF of section 2.1.4.1."""
    if old == len(leaves):
        return [] if whole else [defined_root(leaves)]
    split = defined_split(len(leaves))
    if old <= split:
        return [*defined_proof(old, leaves[:split], whole=whole), defined_root(leaves[split:])]
    return [*defined_proof(old - split, leaves[split:], whole=False), defined_root(leaves[:split])]


def defined_split(size: int) -> int:
    split = 1
    while split * 2 < size:
        split *= 2
    return split


LEAVES: Final = [leaf_hash(str(number).encode()) for number in range(SIZE_MAX)]


class Stored:
    """What a log stores of a tree: its leaves, and the nodes that the frontier told it to store."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self.leaves = leaves
        self.nodes = {(node.level, node.number): node.digest for node in Frontier().extend(leaves)}

    def resolve(self, plan: ProofPlan) -> list[bytes]:
        return plan.resolve({span: self._digests(span) for span in plan.spans()})

    def _digests(self, span: Span) -> list[bytes]:
        numbers = range(span.first, span.first + span.size)
        if span.level == 0:
            return [self.leaves[number] for number in numbers]
        return [self.nodes[span.level, number] for number in numbers]


STORED: Final = Stored(LEAVES)

sizes = st.integers(1, SIZE_MAX)


@pytest.mark.parametrize("size", range(1, 9))
def test_the_roots_are_the_published_ones(size: int) -> None:
    tree = Frontier()
    tree.extend(map(leaf_hash, INPUTS[:size]))
    assert tree.root().hex() == ROOTS[size - 1]


def test_the_root_of_no_leaves_is_the_published_one() -> None:
    assert Frontier().root() == EMPTY_ROOT
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_published_path_holds() -> None:
    """PATH(0, D[7]) of the example in RFC 9162, section 2.1.5: [b, h, l]."""
    hashes = [leaf_hash(data) for data in INPUTS[:7]]
    b, h, last = hashes[1], defined_root(hashes[2:4]), defined_root(hashes[4:7])
    assert Stored(hashes).resolve(inclusion_plan(0, 7)) == [b, h, last]


@given(st.lists(st.integers(0, 300), max_size=8))
def test_a_frontier_grows_to_the_defined_root_whatever_the_batches(batches: list[int]) -> None:
    tree, size = Frontier(), 0
    for batch in batches:
        tree.extend(LEAVES[:batch] if size == 0 else [LEAVES[(size + at) % SIZE_MAX] for at in range(batch)])
        size += batch
    at_once = Frontier()
    at_once.extend(LEAVES[at % SIZE_MAX] for at in range(size))
    assert tree.size == size
    assert tree.to_bytes() == at_once.to_bytes()
    assert Frontier.from_bytes(size, tree.to_bytes()).root() == tree.root()


@given(sizes)
def test_the_root_is_the_defined_one(size: int) -> None:
    tree = Frontier()
    tree.extend(LEAVES[:size])
    assert tree.root() == defined_root(LEAVES[:size])
    assert STORED.resolve(root_plan(size)) == [tree.root()]


def test_one_node_is_stored_for_every_256_of_the_level_below() -> None:
    nodes = Frontier().extend(LEAVES)
    assert [(node.level, node.number) for node in nodes] == [(8, 0), (8, 1)]
    assert nodes[1] == Node(8, 1, defined_root(LEAVES[256:512]))


def test_higher_levels_are_stored_too() -> None:
    tree = Frontier()
    nodes = [node for _ in range(257) for node in tree.extend([leaf_hash(b"x")] * 256)]
    assert [(node.level, node.number) for node in nodes if node.level > 8] == [(16, 0)]
    assert sum(node.level == 8 for node in nodes) == 257
    assert inclusion_plan(65_791, 65_792).spans()[-1] == Span(16, 0, 1)


@given(st.data(), sizes)
def test_inclusion_is_proved_as_defined(data: st.DataObject, size: int) -> None:
    index = data.draw(st.integers(0, size - 1))
    proof, root = STORED.resolve(inclusion_plan(index, size)), defined_root(LEAVES[:size])
    assert proof == defined_path(index, LEAVES[:size])
    assert inclusion_holds(LEAVES[index], index, size, proof, root)


@given(st.data(), sizes)
def test_consistency_is_proved_as_defined(data: st.DataObject, new: int) -> None:
    old = data.draw(st.integers(1, new))
    proof = STORED.resolve(consistency_plan(old, new))
    assert proof == defined_proof(old, LEAVES[:new])
    assert consistency_holds(old, new, proof, defined_root(LEAVES[:old]), defined_root(LEAVES[:new]))


@given(st.data(), sizes)
def test_nothing_else_is_included(data: st.DataObject, size: int) -> None:
    index = data.draw(st.integers(0, size - 1))
    proof, root = STORED.resolve(inclusion_plan(index, size)), defined_root(LEAVES[:size])
    other_index = data.draw(st.integers(0, size + 2).filter(lambda other: other != index))
    assert not inclusion_holds(LEAVES[index], other_index, size, proof, root)
    assert not inclusion_holds(leaf_hash(b"another"), index, size, proof, root)
    assert not inclusion_holds(LEAVES[index], index, size, [*proof, root], root)
    assert not inclusion_holds(LEAVES[index], -1, size, proof, root)
    if proof:
        at = data.draw(st.integers(0, len(proof) - 1))
        assert not inclusion_holds(LEAVES[index], index, size, [*proof[:at], root, *proof[at + 1 :]], root)
        assert not inclusion_holds(LEAVES[index], index, size, proof[:-1], root)


@given(st.data(), st.integers(2, SIZE_MAX))
def test_nothing_else_is_consistent(data: st.DataObject, new: int) -> None:
    old = data.draw(st.integers(1, new - 1))
    proof = STORED.resolve(consistency_plan(old, new))
    old_root, new_root = defined_root(LEAVES[:old]), defined_root(LEAVES[:new])
    assert not consistency_holds(old, new, proof, new_root, new_root)
    assert not consistency_holds(old, new, proof, old_root, old_root)
    assert not consistency_holds(old, new, [*proof, new_root], old_root, new_root)
    assert not consistency_holds(old, new, proof[:-1], old_root, new_root)
    assert not consistency_holds(new, old, proof, new_root, old_root)
    at = data.draw(st.integers(0, len(proof) - 1))
    assert not consistency_holds(old, new, [*proof[:at], EMPTY_ROOT, *proof[at + 1 :]], old_root, new_root)


def test_a_tree_is_consistent_with_itself_and_with_none() -> None:
    root = defined_root(LEAVES[:5])
    assert consistency_holds(5, 5, [], root, root)
    assert not consistency_holds(5, 5, [root], root, root)
    assert not consistency_holds(5, 5, [], EMPTY_ROOT, root)
    assert consistency_holds(0, 5, [], EMPTY_ROOT, root)
    assert not consistency_holds(0, 5, [], root, root)


@pytest.mark.parametrize(("index", "size"), [(0, 0), (5, 5), (-1, 5)])
def test_there_is_no_plan_for_a_leaf_that_is_not_there(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="no leaf"):
        inclusion_plan(index, size)


@pytest.mark.parametrize(("old", "new"), [(6, 5), (-1, 5)])
def test_there_is_no_plan_for_a_tree_that_never_was(old: int, new: int) -> None:
    with pytest.raises(ValueError, match="no earlier state"):
        consistency_plan(old, new)


def test_a_frontier_that_does_not_fit_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="perfect subtrees"):
        Frontier(3, [EMPTY_ROOT])
