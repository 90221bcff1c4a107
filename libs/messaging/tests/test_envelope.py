import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor_contracts.errors import Poison, Rejected
from torpor_contracts.ids import CommandId, ExecId, TenantId
from torpor_contracts.session import CreateSession, ExecSession, ExecSpec, MachineSpec, SuspendSession
from torpor_eventlog.port import Recorded
from torpor_messaging import envelope
from torpor_messaging.ports import OutgoingCommand

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TEXT = st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable())


def test_a_command_that_holds_no_text_is_refused_before_it_is_sent() -> None:
    outgoing = OutgoingCommand(
        tenant_id=TenantId("default"),
        service="scheduler",
        target="ses-1",
        command=ExecSession(exec_id=ExecId("exe-1"), program=ExecSpec(argv=["echo", "\udcff"])),
        command_id=CommandId("c-1"),
    )
    with pytest.raises(Rejected) as refused:
        envelope.encode_command(outgoing, "torpor/test", NOON)
    assert refused.value.code == "malformed-command"


def row(**changes: Any) -> Recorded:
    fields: dict[str, Any] = {
        "position": 12,
        "stream": "ses-1",
        "version": 3,
        "tag": "session-suspended.v1",
        "data": b'{"type":"session-suspended.v1"}',
        "occurred_at_us": 1_767_268_800_000_001,
        "command_id": "default/c-1",
        "causation_id": "default/c-1",
        "correlation_id": "goal 1",
        "tenant_id": "default",
        "digest": hashlib.sha256(b"row").digest(),
    }
    return Recorded(**(fields | changes))


def refusal(delivery: Any) -> Rejected:
    with pytest.raises(Rejected) as refused:
        envelope.decode_command(delivery)
    assert refused.value.advice
    return refused.value


def test_a_command_arrives_as_it_was_sent(delivered: Callable[..., Any]) -> None:
    command = ExecSession(exec_id=ExecId("exe-1"), program=ExecSpec(argv=["echo", "ä%"], timeout_s=1.5))
    outgoing = OutgoingCommand(
        tenant_id=TenantId("default"),
        service="scheduler",
        target="ses-1",
        command=command,
        command_id=CommandId("c-1"),
        causation_id="default/c 0",
        correlation_id="goal-1",
    )
    message = envelope.encode_command(outgoing, "torpor/test", NOON)
    incoming = envelope.decode_command(delivered(message.subject, message.headers, message.data, attempt=4))
    assert incoming.command == command
    assert (incoming.tenant_id, incoming.service, incoming.target) == ("default", "scheduler", "ses-1")
    assert incoming.command_id == "default/c-1"
    assert envelope.id_as_sent("default", incoming.command_id) == "c-1"
    assert (incoming.causation_id, incoming.correlation_id) == ("default/c 0", "goal-1")
    assert incoming.attempt == 4
    assert message.headers["ce-specversion"] == "1.0"
    assert message.headers["ce-type"] == "exec-session.v1"
    assert message.headers["ce-time"] == "2026-01-01T12:00:00.000000Z"
    assert message.headers["ce-causation"] == "default/c%200"


def test_a_plain_client_need_send_nothing_but_json(delivered: Callable[..., Any]) -> None:
    incoming = envelope.decode_command(
        delivered("cmd.default.scheduler.create-session.ses-1", data=b'{"machine": {"vcpus": 2}}', sequence=41)
    )
    assert incoming.command == CreateSession(machine=MachineSpec(vcpus=2))
    assert incoming.command_id == "default/seq-41"
    assert incoming.causation_id == incoming.correlation_id == incoming.command_id


def test_no_payload_is_an_empty_object(delivered: Callable[..., Any]) -> None:
    assert envelope.decode_command(delivered(data=b"")).command == SuspendSession()


def test_the_message_id_stands_in_for_the_command_id(delivered: Callable[..., Any]) -> None:
    assert envelope.decode_command(delivered(headers={"Nats-Msg-Id": "m-1"})).command_id == "default/m-1"
    both = {"Nats-Msg-Id": "m-1", "ce-id": "c-1"}
    assert envelope.decode_command(delivered(headers=both)).command_id == "default/c-1"


def test_ids_of_two_tenants_never_meet(delivered: Callable[..., Any]) -> None:
    headers = {"ce-id": "c-1"}
    one = envelope.decode_command(delivered("cmd.one.scheduler.suspend-session.ses-1", headers))
    two = envelope.decode_command(delivered("cmd.two.scheduler.suspend-session.ses-1", headers))
    assert one.command_id != two.command_id


def test_the_request_digest_covers_subject_type_and_payload(delivered: Callable[..., Any]) -> None:
    subject = "cmd.default.scheduler.suspend-session.ses-1"
    first = envelope.decode_command(delivered(subject, {"ce-id": "a"}, b"{}"))
    again = envelope.decode_command(delivered(subject, {"ce-id": "b"}, b"{}", sequence=99, attempt=2))
    assert first.request_digest == again.request_digest
    assert len(first.request_digest) == 32
    others = [
        delivered("cmd.default.scheduler.suspend-session.ses-2", {}, b"{}"),
        delivered("cmd.other.scheduler.suspend-session.ses-1", {}, b"{}"),
        delivered(subject, {}, b'{"incarnation": 1}'),
    ]
    digests = {envelope.decode_command(other).request_digest for other in others}
    assert len(digests | {first.request_digest}) == 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "truncated"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"\xff\xfe", "malformed"),
        (b'{"machine": {"vcpus": "2"}}', "$.machine.vcpus"),
        (b'{"machine": {"vcpus": 1, "gpu": 1}}', "gpu"),
        (b'{"colour": "red"}', "colour"),
        (b'{"idle_after_s": NaN}', "malformed"),
        (b'{"type": "suspend-session.v1"}', "$.type"),
        (b"[" * 200_000, "object"),
        (b'{"metadata":' * 100_000, "str"),
    ],
)
def test_a_malformed_command_is_refused_and_the_place_named(
    data: bytes, says: str, delivered: Callable[..., Any]
) -> None:
    if len(data) > envelope.COMMAND_BYTES_MAX:
        data = data[: envelope.COMMAND_BYTES_MAX]
    refused = refusal(delivered("cmd.default.scheduler.create-session.ses-1", data=data))
    assert refused.code == "malformed-command"
    assert says in refused.message


@pytest.mark.parametrize(
    ("subject", "headers", "code"),
    [
        ("cmd.default.scheduler.fly-session.ses-1", {}, "unknown-command"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-type": "suspend-session.v9"}, "unknown-command"),
        ("cmd.default.nobody.suspend-session.ses-1", {}, "unknown-command"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-type": "resume-session.v1"}, "malformed-command"),
        ("cmd.default.scheduler.drain-host.host-1", {}, "foreign-tenant"),
        ("cmd.system.scheduler.suspend-session.ses-1", {}, "foreign-tenant"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-id": "a b"}, "illegal-command-id"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-id": "a" * 129}, "illegal-command-id"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-id": "a%0D%0Ab"}, "illegal-command-id"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-goal": "g" * 256}, "illegal-headers"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-causation": "a%00"}, "illegal-headers"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"ce-position": "1"}, "illegal-headers"),
        ("cmd.default.scheduler.suspend-session.ses-1", {"Torpor-Stream": "stdout"}, "illegal-headers"),
        ("cmd.default.scheduler.suspend-session.SES", {}, "illegal-subject"),
    ],
)
def test_other_bad_input_is_refused(
    subject: str, headers: dict[str, str], code: str, delivered: Callable[..., Any]
) -> None:
    assert refusal(delivered(subject, headers)).code == code


def test_an_unknown_command_is_told_what_there_is(delivered: Callable[..., Any]) -> None:
    assert "suspend-session.v1" in refusal(delivered("cmd.default.scheduler.fly.ses-1")).advice


def test_a_large_payload_is_refused_at_both_ends(delivered: Callable[..., Any]) -> None:
    data = msgspec.json.encode({"metadata": {"a": "x" * envelope.COMMAND_BYTES_MAX}})
    assert refusal(delivered("cmd.default.scheduler.create-session.ses-1", data=data)).code == "payload-too-large"
    outgoing = OutgoingCommand(
        tenant_id=TenantId("default"),
        service="scheduler",
        target="ses-1",
        command=CreateSession(metadata={"a": "x" * envelope.COMMAND_BYTES_MAX}),
        command_id=CommandId("c-1"),
    )
    with pytest.raises(Rejected) as refused:
        envelope.encode_command(outgoing, "torpor/test", NOON)
    assert refused.value.code == "payload-too-large"


def test_a_row_travels_unchanged() -> None:
    recorded = row()
    message = envelope.encode_event(recorded)
    assert message.subject == "relay.default.session-suspended.ses-1"
    assert message.headers["ce-position"] == message.headers["ce-id"] == "12"
    assert message.headers["ce-goal"] == "goal%201"
    assert message.headers["ce-time"] == "2026-01-01T12:00:00.000001Z"
    assert envelope.decode_event_message(message.headers, message.data) == recorded


@given(command_id=TEXT, causation_id=TEXT, correlation_id=TEXT, occurred_at_us=st.integers(0, 4_000_000_000_000_000))
def test_a_row_travels_unchanged_whatever_its_texts(
    command_id: str, causation_id: str, correlation_id: str, occurred_at_us: int
) -> None:
    recorded = row(
        command_id=command_id,
        causation_id=causation_id,
        correlation_id=correlation_id,
        occurred_at_us=occurred_at_us,
    )
    message = envelope.encode_event(recorded)
    assert all(value.isascii() and " " not in value and value.isprintable() for value in message.headers.values())
    assert envelope.decode_event_message(message.headers, message.data) == recorded


@pytest.mark.parametrize("change", [{"ce-position": "x"}, {"ce-digest": "zz"}, {"ce-time": "noon"}])
def test_a_message_that_is_no_row_is_poison(change: dict[str, str]) -> None:
    message = envelope.encode_event(row())
    with pytest.raises(Poison):
        envelope.decode_event_message(message.headers | change, message.data)
    del message.headers["ce-tenant"]
    with pytest.raises(Poison):
        envelope.decode_event_message(message.headers, message.data)


@given(st.text())
def test_percent_encoding_is_undone_by_decoding(text: str) -> None:
    encoded = envelope.percent_encode(text)
    assert encoded.isascii()
    assert not set(encoded) & set('" ')
    assert envelope.percent_decode(encoded) == text


def test_only_a_legal_trace_parent_is_handed_on() -> None:
    legal = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert envelope.trace_parent({"traceparent": legal}) == legal
    assert envelope.trace_parent({"traceparent": legal + "\r\nPUB"}) is None
    assert envelope.trace_parent({}) is None
