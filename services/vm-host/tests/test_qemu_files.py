"""Files of machines: copies that keep holes, digests that skip them, and memory that nobody can change any more."""

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torpor_vm_host.adapters.qemu import digests, disks
from torpor_vm_host.adapters.qemu.digests import PIECE, SparseDigest, digest_of, pieces_with_data, verify
from torpor_vm_host.adapters.qemu.sealed import copy_sparse, seal

NUMBERS = random.Random(7)


def sparse_file(path: Path, size: int, written: dict[int, bytes]) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
        for at, data in written.items():
            file.seek(at)
            file.write(data)
    return path


def digest_read_whole(content: bytes) -> str:
    digest = SparseDigest()
    for at in range(0, len(content), PIECE):
        digest.update(at, content[at : at + PIECE])
    return digest.finished(len(content))


@pytest.fixture
def holey(tmp_path: Path) -> Path:
    written = {0: b"begins", 5 * PIECE - 3: NUMBERS.randbytes(PIECE), 12 * PIECE + 17: b"ends"}
    return sparse_file(tmp_path / "holey", 12 * PIECE + 100_000, written)


def test_a_copy_holds_the_same_and_no_more_of_the_disk(holey: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.write_bytes(b"older and longer " * PIECE)
    before = target.stat().st_ino
    disks.copy_over(holey, target)
    assert target.read_bytes() == holey.read_bytes()
    assert target.stat().st_ino == before, "whoever has it open sees the new content"
    assert target.stat().st_blocks <= holey.stat().st_blocks + 16


@pytest.mark.parametrize("content", [b"", b"x", bytes(3 * PIECE)])
def test_copies_of_small_and_empty_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "one").write_bytes(content)
    disks.copy_over(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == content
    assert (tmp_path / "two").stat().st_mode & 0o777 == 0o600


def test_a_file_only_holes_is_copied_as_such(tmp_path: Path) -> None:
    disks.copy_over(sparse_file(tmp_path / "one", 50 * PIECE, {}), tmp_path / "two")
    assert (tmp_path / "two").stat().st_size == 50 * PIECE
    assert (tmp_path / "two").stat().st_blocks == 0


def test_a_link_is_another_name(holey: Path, tmp_path: Path) -> None:
    disks.link_or_copy(holey, tmp_path / "link")
    assert (tmp_path / "link").stat().st_ino == holey.stat().st_ino


def test_where_there_are_no_links_it_is_a_copy(holey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    disks.link_or_copy(holey, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_ino != holey.stat().st_ino
    assert (tmp_path / "copy").read_bytes() == holey.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(
    st.integers(0, 4 * PIECE),
    st.dictionaries(st.integers(0, 4 * PIECE), st.binary(min_size=1, max_size=64), max_size=6),
)
def test_a_sparse_digest_is_that_of_the_content_wherever_the_holes_are(
    tmp_path: Path, size: int, written: dict[int, bytes]
) -> None:
    path = sparse_file(tmp_path / "file", size, {at: data for at, data in written.items() if at + len(data) <= size})
    source, target = os.open(path, os.O_RDONLY), os.memfd_create("target")
    try:
        assert copy_sparse(source, target) == digest_read_whole(path.read_bytes())
        assert os.pread(target, size + 1, 0) == path.read_bytes()
    finally:
        os.close(source)
        os.close(target)


def test_pieces_are_named_once_and_holes_not_at_all(holey: Path) -> None:
    descriptor = os.open(holey, os.O_RDONLY)
    found = pieces_with_data(descriptor, holey.stat().st_size)
    os.close(descriptor)
    assert found == sorted(set(found))
    assert {0, 4 * PIECE, 5 * PIECE, 12 * PIECE} <= set(found)
    assert 8 * PIECE not in found


def test_zeros_moved_to_another_place_are_another_file(tmp_path: Path) -> None:
    one = digest_read_whole(b"x" * PIECE + bytes(PIECE))
    assert len({one, digest_read_whole(bytes(PIECE) + b"x" * PIECE), digest_read_whole(b"x" * PIECE)}) == 3


def test_a_verified_file_is_read_again_only_when_it_was_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    wanted, read = digest_of(path), 0
    real = digest_of

    def counted(one: Path) -> str:
        nonlocal read
        read += 1
        return real(one)

    monkeypatch.setattr(digests, "digest_of", counted)
    for _ in range(3):
        verify(path, wanted)
    assert read == 1
    path.write_bytes(b"Content")
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match="digest"):
        verify(path, wanted)


@pytest.fixture
def memory(tmp_path: Path) -> tuple[Path, str]:
    path = sparse_file(tmp_path / "memory", 3 * PIECE, {PIECE: NUMBERS.randbytes(1000)})
    return path, digest_read_whole(path.read_bytes())


def test_sealed_memory_cannot_be_changed_by_anybody(memory: tuple[Path, str]) -> None:
    path, digest = memory
    sealed = seal(path, digest)
    assert seal(path, digest) is sealed, "who needs the same memory shares it"
    assert os.pread(sealed.descriptor, 3 * PIECE, 0) == path.read_bytes()
    with pytest.raises(PermissionError):
        os.pwrite(sealed.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed.descriptor, 1)
    path.write_bytes(b"what becomes of the file is nothing to it")
    assert os.fstat(sealed.descriptor).st_size == 3 * PIECE


def test_memory_of_another_digest_is_not_sealed(memory: tuple[Path, str]) -> None:
    path, digest = memory
    with path.open("r+b") as file:
        file.seek(2 * PIECE)
        file.write(b"\x01")
    with pytest.raises(ValueError, match="digest"):
        seal(path, digest)
