"""The envelope of every message: CloudEvents in binary mode, read and written here and nowhere else.

Attributes travel as `ce-…` headers, percent-encoded where the CloudEvents binding for NATS asks for it; the payload
is plain JSON. Nothing a sender wrote is trusted before it went through `decode_command`.
"""

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from torpor_contracts.errors import Poison, Rejected
from torpor_contracts.host import HostCommand
from torpor_contracts.ids import SYSTEM_TENANT, CommandId
from torpor_contracts.registry import COMMANDS
from torpor_contracts.session import SessionCommand
from torpor_eventlog.instants import from_us, to_us
from torpor_eventlog.port import Recorded
from torpor_messaging import subjects
from torpor_messaging.ports import Delivery, OutgoingCommand
from torpor_messaging.service import Incoming
from torpor_messaging.subjects import CommandSubject

REPLY: Final = "Torpor-Reply"
"""The header that asks for a reply, and where."""

TRACE: Final = "traceparent"
"""W3C Trace Context: handed on from a command to what follows from it."""

COMMAND_BYTES_MAX: Final = 256 * 1024
"""The largest payload of a command."""

MESSAGE_ID: Final = "Nats-Msg-Id"

_SPEC_VERSION: Final = "1.0"
_COMMAND_ID: Final = re.compile(r"[A-Za-z0-9._:=@+/-]{1,128}")
_TRACE_PARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PLAIN: Final = re.compile(r"[!#$&-~]*")
_SAFE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_ID_BYTES_MAX: Final = 255
_HOST_COMMANDS: Final = HostCommand.__args__
_SESSION_COMMANDS: Final = SessionCommand.__args__
_OURS: Final = ("ce-position", "Torpor-Stream", "Torpor-End")
"""Headers of messages that we publish; a consumer somebody aimed at `cmd.` would carry them in, and is refused."""


class Message(NamedTuple):
    """What is published: where, with which headers, and the payload."""

    subject: str
    headers: dict[str, str]
    data: bytes


def percent_encode(text: str) -> str:
    """A header value as the CloudEvents binding wants it: printable ASCII without space, quote and percent sign."""
    return text if _PLAIN.fullmatch(text) else quote(text, safe=_SAFE)


def percent_decode(text: str) -> str:
    """The inverse of `percent_encode`; bytes that are no UTF-8 become U+FFFD."""
    return unquote(text) if "%" in text else text


def encode_command(outgoing: OutgoingCommand, source: str, now: datetime) -> Message:
    """A command as it is published; `source` names the sender."""
    tag = str(outgoing.command.__struct_config__.tag)
    try:
        data = msgspec.json.encode(outgoing.command)
    except UnicodeEncodeError as error:
        raise Rejected(
            "malformed-command",
            f"{tag} holds what is no Unicode text: {error}",
            "send bytes that are no text by stdin, or in a file",
        ) from error
    if len(data) > COMMAND_BYTES_MAX:
        raise _too_large(len(data))
    headers = {
        "ce-specversion": _SPEC_VERSION,
        "ce-id": percent_encode(outgoing.command_id),
        "ce-type": tag,
        "ce-source": percent_encode(source),
        "ce-subject": percent_encode(outgoing.target),
        "ce-time": _rfc3339(now),
        "ce-datacontenttype": "application/json",
    }
    if outgoing.causation_id:
        headers["ce-causation"] = percent_encode(outgoing.causation_id)
    if outgoing.correlation_id:
        headers["ce-goal"] = percent_encode(outgoing.correlation_id)
    return Message(subjects.command(outgoing.tenant_id, outgoing.service, tag, outgoing.target), headers, data)


def decode_command(delivery: Delivery) -> Incoming:
    """A delivered command, checked in every respect that does not need the state of its target.

    Raises `Rejected` with `illegal-subject`, `illegal-headers`, `payload-too-large`, `unknown-command`,
    `malformed-command`, `foreign-tenant` or `illegal-command-id`.
    """
    subject = subjects.parse_command(delivery.subject)
    headers = delivery.headers
    for name in _OURS:
        if name in headers:
            raise Rejected("illegal-headers", f"a command must not carry {name}", "publish the command yourself")
    if len(delivery.data) > COMMAND_BYTES_MAX:
        raise _too_large(len(delivery.data))
    tag = _command_tag(subject, headers)
    command_id = _scoped(subject.tenant_id, sent_id(delivery))
    command = _decoded(subject, tag, delivery.data)
    return Incoming(
        tenant_id=subject.tenant_id,
        service=subject.service,
        target=subject.target,
        command=command,
        command_id=command_id,
        causation_id=_id_header(headers, "ce-causation") or command_id,
        correlation_id=_id_header(headers, "ce-goal") or command_id,
        request_digest=hashlib.sha256(b"\0".join((delivery.subject.encode(), tag.encode(), delivery.data))).digest(),
        attempt=delivery.attempt,
    )


def sent_id(delivery: Delivery) -> str:
    """The id a command was sent with: `ce-id`, else `Nats-Msg-Id`, else one made of its place in the stream."""
    text = percent_decode(delivery.headers.get("ce-id") or delivery.headers.get(MESSAGE_ID) or "")
    if not text:
        return f"seq-{delivery.sequence}"
    if not _COMMAND_ID.fullmatch(text):
        raise Rejected(
            "illegal-command-id",
            f"{text[:80]!r} cannot be a command's id",
            "send 1 to 128 letters, digits or . _ : = @ + / - in the header ce-id",
        )
    return text


def id_as_sent(tenant_id: str, command_id: str) -> CommandId:
    """A command's id as its sender knows it."""
    return CommandId(command_id.removeprefix(f"{tenant_id}/"))


def trace_parent(headers: Mapping[str, str]) -> str | None:
    """The W3C trace parent of a message, or None when there is no legal one."""
    text = headers.get(TRACE)
    return text if text is not None and _TRACE_PARENT.fullmatch(text) else None


def encode_event(recorded: Recorded) -> Message:
    """A row of the log as the relay publishes it; `decode_event_message` gives exactly the row again."""
    subject = subjects.relayed(recorded.tenant_id, recorded.tag, recorded.stream)
    headers = {
        "ce-specversion": _SPEC_VERSION,
        "ce-id": str(recorded.position),
        "ce-type": percent_encode(recorded.tag),
        "ce-source": "torpor/log",
        "ce-subject": percent_encode(recorded.stream),
        "ce-time": _rfc3339(from_us(recorded.occurred_at_us)),
        "ce-datacontenttype": "application/json",
        "ce-position": str(recorded.position),
        "ce-streamversion": str(recorded.version),
        "ce-digest": recorded.digest.hex(),
        "ce-tenant": percent_encode(recorded.tenant_id),
        "ce-command": percent_encode(recorded.command_id),
        "ce-causation": percent_encode(recorded.causation_id),
        "ce-goal": percent_encode(recorded.correlation_id),
    }
    return Message(subject, headers, recorded.data)


def decode_event_message(headers: Mapping[str, str], data: bytes) -> Recorded:
    """The row that a message of `EVENTS` carries; `Poison` when it carries none."""
    try:
        return Recorded(
            position=int(headers["ce-position"]),
            stream=percent_decode(headers["ce-subject"]),
            version=int(headers["ce-streamversion"]),
            tag=percent_decode(headers["ce-type"]),
            data=data,
            occurred_at_us=to_us(datetime.fromisoformat(headers["ce-time"])),
            command_id=percent_decode(headers["ce-command"]),
            causation_id=percent_decode(headers["ce-causation"]),
            correlation_id=percent_decode(headers["ce-goal"]),
            tenant_id=percent_decode(headers["ce-tenant"]),
            digest=bytes.fromhex(headers["ce-digest"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Poison(f"a message of EVENTS is no row of the log: {type(error).__name__}: {error}") from error


def _command_tag(subject: CommandSubject, headers: Mapping[str, str]) -> str:
    tag = percent_decode(headers.get("ce-type") or f"{subject.type}.v1")
    if subjects.type_token(tag) != subject.type:
        raise Rejected(
            "malformed-command",
            f"the subject says {subject.type!r}, the header ce-type says {tag[:80]!r}",
            "name the same type in both, or leave the header out",
        )
    return tag


def _decoded(subject: CommandSubject, tag: str, data: bytes) -> Any:
    known = COMMANDS.get(subject.service, {})
    kind = known.get(tag)
    if kind is None:
        raise Rejected(
            "unknown-command",
            f"{subject.service} takes no command {tag[:80]!r}",
            f"it takes {', '.join(sorted(known))}" if known else f"send it to one of {', '.join(sorted(COMMANDS))}",
        )
    if kind in _HOST_COMMANDS and subject.tenant_id != SYSTEM_TENANT:
        raise _foreign(f"{tag} is the operator's, not tenant {subject.tenant_id}'s", f"send it as {SYSTEM_TENANT}")
    if kind in _SESSION_COMMANDS and subject.tenant_id == SYSTEM_TENANT:
        raise _foreign(f"tenant {SYSTEM_TENANT} has no sessions", "send it as the session's tenant")
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Rejected(
            "malformed-command",
            f"the payload is no {tag}: {error}",
            f"send a JSON object as schemas/ describes {tag}",
        ) from error


def _scoped(tenant_id: str, command_id: str) -> CommandId:
    """Ids are the sender's; without the tenant before them, one tenant could use up the ids of another."""
    return CommandId(f"{tenant_id}/{command_id}")


def _id_header(headers: Mapping[str, str], name: str) -> str:
    text = percent_decode(headers.get(name, ""))
    if len(text.encode(errors="replace")) > _ID_BYTES_MAX or not text.isprintable():
        raise Rejected(
            "illegal-headers",
            f"the header {name} is no id",
            f"send at most {_ID_BYTES_MAX} printable bytes, or leave the header out",
        )
    return text


def _too_large(size: int) -> Rejected:
    return Rejected(
        "payload-too-large",
        f"the command has {size} bytes, at most {COMMAND_BYTES_MAX} are taken",
        "put large content into a file of the session and name that",
    )


def _foreign(message: str, advice: str) -> Rejected:
    return Rejected("foreign-tenant", message, advice)


def _rfc3339(instant: datetime) -> str:
    return instant.isoformat(timespec="microseconds").replace("+00:00", "Z")
