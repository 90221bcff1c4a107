import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torpor_chunks.directory import DirectoryChunks
from torpor_chunks.offload import inline
from torpor_chunks.port import NoSpace, StoreUnavailable

WRITER = """
import asyncio, os, sys
from pathlib import Path
import torpor_chunks.directory as directory

real_fsync = os.fsync
def stop_at_fsync(number):
    print("writing", flush=True)
    sys.stdin.read()
    real_fsync(number)
if len(sys.argv) > 3:
    os.fsync = stop_at_fsync
print(asyncio.run(directory.DirectoryChunks(Path(sys.argv[1])).put(Path(sys.argv[2]))).digest, flush=True)
"""


def parts_in(root: Path) -> list[Path]:
    return [path for path in (root / "sha256").rglob("*") if path.is_file()]


def left_aside(root: Path) -> list[Path]:
    return list((root / "aside").iterdir())


def test_nothing_half_written_is_visible_when_there_is_no_room(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 << 20))
    store = DirectoryChunks(tmp_path / "store", offload=inline)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(NoSpace, match="free space"):
            asyncio.run(store.put(source))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert parts_in(tmp_path / "store") == []
    assert left_aside(tmp_path / "store") == []
    assert asyncio.run(store.put(source)).unique_bytes == 3 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_really_full_file_system_is_a_typed_error(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        source = tmp_path / "source"
        source.write_bytes(os.urandom(2 << 20))
        store = DirectoryChunks(small / "store")
        with pytest.raises(NoSpace):
            asyncio.run(store.put(source))
        assert parts_in(small / "store") == left_aside(small / "store") == []
        source.write_bytes(b"small enough")
        digest = asyncio.run(store.put(source)).digest
        asyncio.run(store.verify(digest, len(b"small enough")))
        source.write_bytes(os.urandom(2 << 20))
        big = asyncio.run(DirectoryChunks(tmp_path / "elsewhere").put(source))
        with pytest.raises(NoSpace):
            asyncio.run(DirectoryChunks(tmp_path / "elsewhere").fetch(big.digest, big.size_bytes, small / "into"))
        assert not (small / "into").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_writer_killed_in_the_middle_leaves_no_part_and_its_rest_is_removed(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "store"
    source.write_bytes(b"x" * 300_000)
    store = DirectoryChunks(root)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(source), "stop"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        assert len(left_aside(root)) == 1
        assert asyncio.run(store.remove_abandoned()) == 0, "a writer at work is left alone"
        assert len(left_aside(root)) == 1
        writer.kill()
    assert parts_in(root) == []
    assert asyncio.run(store.remove_abandoned()) == 300_000
    assert left_aside(root) == []
    assert asyncio.run(store.put(source)).unique_bytes == 300_000


def test_a_part_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x")
    asyncio.run(DirectoryChunks(tmp_path / "store").put(tmp_path / "source"))
    (part,) = parts_in(tmp_path / "store")
    assert part.stat().st_mode & 0o777 == 0o400


def test_exclusive_holds_between_processes_and_ends_with_them(tmp_path: Path) -> None:
    holder_code = """
import asyncio, sys
from pathlib import Path
from torpor_chunks.directory import DirectoryChunks
async def main():
    async with DirectoryChunks(Path(sys.argv[1])).exclusive():
        print("held", flush=True)
        sys.stdin.read()
asyncio.run(main())
"""

    async def enter(store: DirectoryChunks) -> None:
        async with store.exclusive():
            pass

    with subprocess.Popen(
        [sys.executable, "-c", holder_code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreUnavailable, match="locked by another process"):
            asyncio.run(enter(DirectoryChunks(tmp_path, exclusive_wait_s=0.1)))
        holder.kill()
    asyncio.run(enter(DirectoryChunks(tmp_path, exclusive_wait_s=5.0)))


def test_a_root_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "source").write_bytes(b"x")
    with pytest.raises(StoreUnavailable):
        asyncio.run(DirectoryChunks(tmp_path / "file" / "store").put(tmp_path / "source"))
