"""The parts of a checkpoint, and the template below: a changed byte is found before a machine runs."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_templates import FINGERPRINT, small_template
from torpor_contracts.ids import CheckpointId
from torpor_vm_host.adapters.qemu import parts
from torpor_vm_host.adapters.qemu.devices import loadable
from torpor_vm_host.adapters.qemu.memory import PAGE
from torpor_vm_host.adapters.qemu.template import FILES, INFO, MEMORY, Template, open_template, read_info
from torpor_vm_host.ports import CheckpointFiles, DriverError, PartFile, PartKind

RAW = b"QEVM\x00\x00\x00\x03" + b"what the devices were in" * 20
KINDS: tuple[PartKind, ...] = ("memory", "devices", "disk")
REFUSED = {"checkpoint-corrupt", "checkpoint-mismatched"}


@pytest.fixture
def template(tmp_path: Path) -> Iterator[Template]:
    small_template(tmp_path / "template")
    opened = open_template(tmp_path / "template")
    yield opened
    opened.close()


def written(template: Template, to: Path, changes: dict[int, bytes]) -> list[PartFile]:
    to.mkdir()
    (to / "disk").write_bytes(b"what the disk was" * 100)
    captured = [(page, data.ljust(PAGE, b"!")) for page, data in sorted(changes.items())]
    return parts.write(captured, RAW, template, to)


def files_of(made: list[PartFile]) -> CheckpointFiles:
    return CheckpointFiles(checkpoint_id=CheckpointId("ckp-1"), files={one.kind: one.path for one in made})


def refusal(files: CheckpointFiles, fingerprint: str = FINGERPRINT) -> str:
    with pytest.raises(DriverError) as refused:
        parts.check(files, fingerprint)
    assert not refused.value.retryable
    return refused.value.code


def test_what_was_written_is_what_is_loaded(template: Template, tmp_path: Path) -> None:
    made = written(template, tmp_path / "one", {3: b"three", 9: b"nine"})
    assert [one.kind for one in made] == ["memory", "devices", "disk"]
    assert {path.name for path in (tmp_path / "one").iterdir()} == set(KINDS)
    found = parts.check(files_of(made), FINGERPRINT)
    assert found.state == loadable(RAW)
    assert found.template_digest == template.memory.digest
    assert found.memory.stat().st_size == made[0].head_bytes + 2 * PAGE


def test_pages_that_are_as_in_the_template_are_left_out(template: Template, tmp_path: Path) -> None:
    same = b"one 5".ljust(PAGE, b".")
    made = written(template, tmp_path / "one", {5: same, 6: b"other"})
    assert made[0].path.stat().st_size == made[0].head_bytes + PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_byte_is_refused(template: Template, tmp_path: Path, kind: PartKind) -> None:
    files = files_of(written(template, tmp_path / "one", {3: b"three"}))
    whole = files.files[kind].read_bytes()
    step = max(1, len(whole) // 250)
    for at in [*range(min(len(whole), 700)), *range(700, len(whole), step), len(whole) - 1]:
        files.files[kind].write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert refusal(files) in REFUSED, at
    files.files[kind].write_bytes(whole)
    parts.check(files, FINGERPRINT)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_short_long_or_not_there_are_refused(template: Template, tmp_path: Path, kind: PartKind) -> None:
    made = written(template, tmp_path / "one", {3: b"three"})
    files = files_of(made)
    whole = files.files[kind].read_bytes()
    for spoiled in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], whole + b"\0", whole + whole):
        files.files[kind].write_bytes(spoiled)
        assert refusal(files) in REFUSED
    files.files[kind].unlink()
    assert refusal(files) == "checkpoint-corrupt"
    assert refusal(files_of([one for one in made if one.kind != kind])) == "checkpoint-corrupt"


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_another_checkpoint_is_refused(template: Template, tmp_path: Path, kind: PartKind) -> None:
    one = files_of(written(template, tmp_path / "one", {3: b"three"}))
    other_made = written(template, tmp_path / "two", {4: b"four"})
    (tmp_path / "two" / "disk").write_bytes(b"another disk")
    other = files_of(other_made)
    if kind == "devices":  # they are bound to their own, so it is the others that do not fit
        assert refusal(CheckpointFiles(checkpoint_id=one.checkpoint_id, files={**one.files, kind: other.files[kind]}))
    mixed = CheckpointFiles(checkpoint_id=one.checkpoint_id, files={**one.files, kind: other.files[kind]})
    assert refusal(mixed) == "checkpoint-mismatched"


def test_a_checkpoint_of_another_qemu_is_refused(template: Template, tmp_path: Path) -> None:
    files = files_of(written(template, tmp_path / "one", {3: b"three"}))
    with pytest.raises(DriverError) as refused:
        parts.check(files, FINGERPRINT.replace("7.2.0", "8.0.0"))
    assert refused.value.code == "checkpoint-mismatched"
    assert "7.2.0" in refused.value.detail
    assert "8.0.0" in refused.value.detail


@pytest.mark.parametrize("raw", [b"", b"QEVM", b"QEVM\x00\x00\x00\x03", b"MEVQ" + bytes(100)])
def test_what_is_no_device_state_is_not_bound(raw: bytes) -> None:
    with pytest.raises(ValueError, match="no QEMU device state"):
        loadable(raw)


def test_a_full_disk_is_said_and_nothing_is_called_whole(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        written(template, tmp_path / "one", {3: b"three"})


@pytest.mark.parametrize("name", FILES)
def test_a_template_with_a_flipped_byte_is_not_opened(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "template"
    small_template(folder, of=f"spoiled {name}")
    whole = (folder / name).read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DriverError, match="template-corrupt") as refused:
            open_template(folder)
        assert str(folder) in refused.value.detail
    (folder / name).unlink()
    with pytest.raises(DriverError, match="template-corrupt"):
        open_template(folder)


def test_a_template_of_another_release_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "template"
    info = small_template(folder, of="the past")
    assert read_info(folder) == info
    said = (folder / INFO).read_bytes()
    for other in (said.replace(b'"format":', b'"format":9'), b"{", b""):
        (folder / INFO).write_bytes(other)
        assert read_info(folder) is None
    with pytest.raises(DriverError, match="template-corrupt"):
        open_template(folder)
    assert MEMORY in info.digests
