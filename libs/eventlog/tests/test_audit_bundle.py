"""A bundle proves what it holds with the public key alone: nothing in it can be changed, or left out in between."""

from collections.abc import Callable

import msgspec
import pytest

from tests.support.histories import Machine, append, checkpoint_recorded, session_over
from torpor_contracts.errors import Rejected
from torpor_contracts.ids import CommandId, SessionId, TenantId, VmId
from torpor_eventlog.audit.bundle import BundleVerified, Exported, export_session, verify_bundle
from torpor_eventlog.memory import MemoryLog
from torpor_eventlog.notes import SigningKey
from torpor_eventlog.port import Commit, NewEvent

pytestmark = pytest.mark.anyio
KEY = SigningKey("torpor.example/log", bytes(range(32)))
SESSION = SessionId("s-1")


async def signed(log: MemoryLog) -> tuple[str, int]:
    head = await log.head()
    return KEY.sign_checkpoint(head), head.position


opened = KEY.verifier.open_checkpoint


@pytest.fixture
async def log() -> MemoryLog:
    """Two sessions, their machines and a checkpoint, mixed."""
    log = MemoryLog()
    ours, theirs = Machine(), Machine(vm_id=VmId("vm-2"), session_id=SessionId("s-2"))
    for second in range(3):
        for machine in (theirs, ours):
            await append(log, machine.asked_for(second) if second == 0 else machine.lost(second), machine.session_id)
            event = (machine.claimed(second), machine.started(second), machine.suspended(second))[second]
            await append(log, event, machine.vm_id)
    await append(log, checkpoint_recorded(3, 100, checkpoint="ckp-of-vm-1"), "ckp-of-vm-1")
    await append(log, session_over(4), SESSION)
    return log


async def exported(log: MemoryLog) -> Exported:
    return await export_session(log, SESSION, *await signed(log))


async def test_all_streams_of_the_session_are_in_and_no_others(log: MemoryLog) -> None:
    export = await exported(log)
    verified = verify_bundle(export.content, opened)
    assert verified.ok
    assert verified.findings == []
    assert verified.streams == {"ckp-of-vm-1": 1, "s-1": 4, "vm-1": 3}
    assert (verified.session_id, verified.events, verified.head_size) == ("s-1", 8, 14)
    assert (export.events, export.streams, export.left_out) == (8, 3, 0)


async def test_it_is_a_readable_file(log: MemoryLog) -> None:
    content = (await exported(log)).content
    decoded = msgspec.json.decode(content)
    assert msgspec.json.decode(decoded["events"][0]["data"])["type"] == "vm-start-requested.v1"
    assert content.count(b"\n") > 50


async def test_what_is_newer_than_the_head_is_left_out_and_said(log: MemoryLog) -> None:
    note, size = await signed(log)
    await append(log, session_over(5), SESSION)
    export = await export_session(log, SESSION, note, size)
    assert export.left_out == 1
    assert verify_bundle(export.content, opened).ok


async def test_a_stream_that_is_only_named_is_listed_as_empty() -> None:
    log = MemoryLog()
    await append(log, Machine().asked_for(0), SESSION)
    verified = verify_bundle((await exported(log)).content, opened)
    assert verified.ok
    assert verified.streams == {"s-1": 1, "vm-1": 0}


async def test_a_session_that_is_not_there_is_refused(log: MemoryLog) -> None:
    note, size = await signed(log)
    with pytest.raises(Rejected, match="session-unknown"):
        await export_session(log, SessionId("s-9"), note, size)
    await append(log, session_over(5), "s-9")
    with pytest.raises(Rejected, match="wait for the next signed head"):
        await export_session(log, SessionId("s-9"), note, size)


async def test_every_changed_byte_is_found(log: MemoryLog) -> None:
    content = (await exported(log)).content
    missed = []
    for at in range(len(content)):
        for change in (content[at] ^ 1, content[at] ^ 0x20):
            forged = bytearray(content)
            forged[at] = change
            if seems_sound(bytes(forged)):
                missed.append((at, content[max(0, at - 20) : at + 20], change))
    assert missed == []


async def test_every_missing_or_added_byte_is_found(log: MemoryLog) -> None:
    content = (await exported(log)).content
    missed = [at for at in range(len(content)) if seems_sound(content[:at] + content[at + 1 :])]
    missed += [at for at in range(len(content) + 1) if seems_sound(content[:at] + b" " + content[at:])]
    assert missed == []


def seems_sound(content: bytes) -> bool:
    try:
        return verify_bundle(content, opened).ok
    except Rejected:
        return False


Edit = Callable[[dict[str, object]], object]


def edited(content: bytes, edit: Edit) -> BundleVerified:
    decoded = msgspec.json.decode(content)
    edit(decoded)
    return verify_bundle(msgspec.json.format(msgspec.json.encode(decoded), indent=1) + b"\n", opened)


async def test_an_event_left_out_is_named_by_what_follows_it(log: MemoryLog) -> None:
    def leave_out(bundle: dict[str, object]) -> None:
        events = bundle["events"]
        assert isinstance(events, list)
        events[:] = [event for event in events if (event["stream"], event["version"]) != ("vm-1", 2)]

    verified = edited((await exported(log)).content, leave_out)
    assert not verified.ok
    (finding,) = [finding for finding in verified.findings if "version 2 of vm-1 is not here" in finding.detail]
    assert (finding.kind, finding.position) == ("missing", 12)


async def test_a_whole_stream_left_out_is_found_from_the_events_that_name_it(log: MemoryLog) -> None:
    def leave_out(bundle: dict[str, object]) -> None:
        events, streams = bundle["events"], bundle["streams"]
        assert isinstance(events, list)
        assert isinstance(streams, dict)
        events[:] = [event for event in events if event["stream"] != "vm-1"]
        del streams["vm-1"]

    verified = edited((await exported(log)).content, leave_out)
    assert {finding.kind for finding in verified.findings} == {"missing"}
    assert any("stream vm-1 is not as complete" in finding.detail for finding in verified.findings)


async def test_a_foreign_stream_slipped_in_is_found(log: MemoryLog) -> None:
    foreign = await export_session(log, SessionId("s-2"), *await signed(log))
    theirs = msgspec.json.decode(foreign.content)

    def slip_in(bundle: dict[str, object]) -> None:
        events, streams = bundle["events"], bundle["streams"]
        assert isinstance(events, list)
        assert isinstance(streams, dict)
        events += theirs["events"]
        events.sort(key=lambda event: event["position"])
        streams.update(theirs["streams"])
        bundle["streams"] = dict(sorted(streams.items()))

    verified = edited((await exported(log)).content, slip_in)
    assert {finding.kind for finding in verified.findings} == {"missing"}
    assert verified.findings_total == 3


async def test_a_changed_event_is_named(log: MemoryLog) -> None:
    def change(bundle: dict[str, object]) -> None:
        events = bundle["events"]
        assert isinstance(events, list)
        events[3]["tenant_id"] = "other"

    verified = edited((await exported(log)).content, change)
    assert [(finding.kind, finding.place) for finding in verified.findings] == [("changed", "bundle")]
    assert verified.findings[0].position == 8


async def test_another_key_proves_nothing(log: MemoryLog) -> None:
    other = SigningKey("torpor.example/log", bytes(32))
    verified = verify_bundle((await exported(log)).content, other.verifier.open_checkpoint)
    assert [(finding.place, finding.kind) for finding in verified.findings] == [("head", "changed")]


async def test_data_that_is_no_text_is_proved_too() -> None:
    raw = await with_bytes(b"\xff\xfe\x00")
    export = await export_session(raw, SESSION, *await signed(raw))
    assert b'"base64"' in export.content
    assert verify_bundle(export.content, opened).ok


async def with_bytes(data: bytes) -> MemoryLog:
    log = MemoryLog()
    await log.append(
        Commit(
            command_id=CommandId("c"),
            tenant_id=TenantId("t"),
            causation_id="c",
            correlation_id="c",
            request_digest=bytes(32),
            occurred_at_us=1,
            expected={SESSION: 0},
            events=[NewEvent(stream=SESSION, tag="raw.v1", data=data)],
        )
    )
    return log


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"format":"torpor-session-bundle.v2"}'])
def test_a_file_that_is_no_bundle_is_refused(content: bytes) -> None:
    with pytest.raises(Rejected, match="bundle-unreadable"):
        verify_bundle(content, opened)
