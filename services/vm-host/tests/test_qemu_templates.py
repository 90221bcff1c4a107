"""Templates that come from another host: moved among the kept ones when they are what they should be, else refused."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.digests import sparse_digest_of
from torpor_vm_host.adapters.qemu.template import FILES, FORMAT, INFO, MEMORY, TemplateInfo, read_info
from torpor_vm_host.adapters.qemu.templates import receive
from torpor_vm_host.ports import DriverError


def arrived(directory: Path) -> str:
    """A small template in a directory; the digest of its memory."""
    directory.mkdir()
    for name in FILES:
        (directory / name).write_bytes(f"the {name}".encode() * 1000)
    digests = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}
    digests[MEMORY] = sparse_digest_of(directory / MEMORY)
    info = TemplateInfo(
        format=FORMAT,
        key="1" * 64,
        fingerprint="qemu",
        image="default",
        image_key="2" * 64,
        machine=MachineSpec(),
        digests=digests,
    )
    (directory / INFO).write_bytes(msgspec.json.encode(info))
    return digests[MEMORY]


def test_a_template_is_kept_and_open(tmp_path: Path) -> None:
    digest = arrived(tmp_path / "here")
    template = receive(digest, tmp_path / "here", tmp_path / "kept")
    assert template.memory.digest == digest
    assert template.folder.parent == tmp_path / "kept"
    assert not (tmp_path / "here").exists()
    assert all(path.stat().st_mode & 0o222 == 0 for path in template.folder.iterdir())
    template.close()


def test_one_that_is_there_already_is_as_good(tmp_path: Path) -> None:
    digest = arrived(tmp_path / "first")
    arrived(tmp_path / "second")
    receive(digest, tmp_path / "first", tmp_path / "kept").close()
    receive(digest, tmp_path / "second", tmp_path / "kept").close()
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found_and_nothing_kept(tmp_path: Path, name: str, damage: str) -> None:
    whole = arrived(tmp_path / "whole")
    template = receive(whole, tmp_path / "whole", tmp_path / "another-host")
    digest = arrived(tmp_path / "here")
    content = (tmp_path / "here" / name).read_bytes()
    if damage == "missing":
        (tmp_path / "here" / name).unlink()
    else:
        at = len(content) // 2
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        (tmp_path / "here" / name).write_bytes(content[:at] if damage == "cut" else flipped)
    with pytest.raises(DriverError) as refused:
        receive(digest, tmp_path / "here", tmp_path / "kept")
    assert refused.value.code == "template-corrupt"
    assert not (tmp_path / "kept").exists()
    template.close()


def test_another_template_or_none_is_refused(tmp_path: Path) -> None:
    arrived(tmp_path / "here")
    (tmp_path / "empty").mkdir()
    for directory in ("here", "empty"):
        with pytest.raises(DriverError) as refused:
            receive("0" * 64, tmp_path / directory, tmp_path / "kept")
        assert refused.value.code == "template-corrupt"
    assert read_info(tmp_path / "empty") is None


def test_a_disk_that_takes_nothing_is_said_so_and_nothing_kept(tmp_path: Path) -> None:
    digest = arrived(tmp_path / "here")
    (tmp_path / "kept").write_bytes(b"a file where a directory should be")
    with pytest.raises(DriverError) as refused:
        receive(digest, tmp_path / "here", tmp_path / "kept")
    assert (refused.value.code, refused.value.retryable) == ("template-failed", True)
