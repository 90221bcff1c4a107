"""Every kind of subject as an AsyncAPI channel; addresses are put together by `torpor_messaging.subjects`."""

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, get_args

from schemas.generator import json_schemas
from torpor_contracts.host import HostCommand
from torpor_contracts.ids import SYSTEM_TENANT
from torpor_contracts.registry import COMMANDS, EVENTS, QUERIES
from torpor_messaging import permissions, streams, subjects
from torpor_messaging.permissions import Grants

TENANT, TARGET, HOST, VM, CHECKPOINT = "tenant0", "target0", "host0", "vm0", "checkpoint0"
SESSION, EXEC, STREAM, CONSUMER, KIND, SERVICE = "session0", "exec0", "stream0", "consumer0", "kind0", "service0"

_PARAMETERS: Final = {
    TENANT: ("tenant", "Whose it is; `system` is the operator's."),
    TARGET: ("target", "The id of what is asked about, `-` for none."),
    CHECKPOINT: ("checkpoint_id", "The checkpoint the command is for."),
    HOST: ("host_id", "The host the command is for."),
    VM: ("vm_id", "The machine the command is for."),
    SESSION: ("session_id", "The session that is meant."),
    EXEC: ("exec_id", "The program."),
    STREAM: ("stream", "The stream of the log that the event belongs to: a session's, host's, machine's id …"),
    CONSUMER: ("consumer", "The consumer that could not handle a message."),
    KIND: ("kind", "The kind of timer."),
    SERVICE: ("service", "The service whose timer it is."),
}
_PLACEHOLDER: Final = re.compile("|".join(_PARAMETERS))


class Channel(NamedTuple):
    """One kind of subject. `payload` is a path below `schemas/`, None for bytes of no fixed form.

    `published_as`: the subject to publish on, where the server keeps the message under another.
    """

    name: str
    subject: str
    action: str
    title: str
    payload: str | None
    headers: str | None
    stream: str | None
    reply: str | None = None
    published_as: str | None = None

    @property
    def address(self) -> str:
        """The subject with its variable tokens in braces."""
        return named(self.subject)

    @property
    def parameters(self) -> dict[str, dict[str, str]]:
        """The variable tokens, by name."""
        found = (_PARAMETERS[token] for token in _PLACEHOLDER.findall(self.subject))
        return {name: {"description": description} for name, description in found}


def named(subject: str) -> str:
    """A subject with its variable tokens in braces."""
    return _PLACEHOLDER.sub(lambda found: "{" + _PARAMETERS[found[0]][0] + "}", subject)


def channels() -> list[Channel]:
    """All of them; `receive` is what Torpor takes in, `send` what it publishes."""
    return [*_commands(), *_queries(), *_health(), *_events(), *_others()]


def publishers(subject: str) -> list[str]:
    """Who may publish on a subject: services, an operator, and the clients of a tenant on their own subjects."""
    users = {service: permissions.of_service(service) for service in permissions.SERVICES}
    users["operator"] = permissions.of_operator()
    users["tenant"] = permissions.of_tenant(TENANT, alone=True)
    return [user for user, grants in users.items() if _may_publish(grants, subject)]


def _commands() -> Iterable[Channel]:
    for service, commands in COMMANDS.items():
        for tag, kind in commands.items():
            of_host = kind in get_args(HostCommand)
            tenant = SYSTEM_TENANT if of_host else TENANT
            target = HOST if of_host else _TARGETS[service]
            yield Channel(
                name=f"command-{service}-{subjects.type_token(tag)}",
                subject=subjects.command(tenant, service, tag, target),
                action="receive",
                title=_first_line(kind),
                payload=json_schemas.command_path(service, tag),
                headers="CommandHeaders",
                stream=streams.COMMANDS,
                reply="$message.header#/Torpor-Reply",
            )


def _queries() -> Iterable[Channel]:
    for service, queries in QUERIES.items():
        for name, shape in queries.items():
            yield Channel(
                name=f"query-{service}-{name}",
                subject=subjects.query(TENANT, service, name, TARGET),
                action="receive",
                title=_first_line(shape.parameters),
                payload=json_schemas.query_path(service, name, "parameters"),
                headers=None,
                stream=None,
                reply=json_schemas.query_path(service, name, "answer"),
            )


def _health() -> Iterable[Channel]:
    for service in permissions.SERVICES:
        yield Channel(
            name=f"query-{service}-health",
            subject=subjects.query(SYSTEM_TENANT, service, "health"),
            action="receive",
            title="Whether the service is ready, and how far its views and reactions have come.",
            payload=None,
            headers=None,
            stream=None,
            reply=json_schemas.HEALTH_PATH,
        )


def _events() -> Iterable[Channel]:
    for tag, kind in EVENTS.items():
        yield Channel(
            name=f"event-{subjects.type_token(tag)}",
            subject=subjects.event(TENANT, tag, STREAM),
            action="send",
            title=_first_line(kind),
            payload=json_schemas.event_path(tag),
            headers="EventHeaders",
            stream=streams.EVENTS,
            published_as=subjects.relayed(TENANT, tag, STREAM),
        )


def _others() -> Iterable[Channel]:
    yield Channel(
        name="output",
        subject=subjects.output(TENANT, SESSION, EXEC),
        action="send",
        title="What a program wrote, in order; the last message says how it ended.",
        payload=None,
        headers="OutputHeaders",
        stream=streams.OUTPUT,
    )
    yield Channel(
        name="timer-set",
        subject=subjects.timer_set(TENANT, SERVICE, KIND, TARGET),
        action="send",
        title="A timer is set, or the one of the same kind and target replaced; internal.",
        payload=None,
        headers="TimerHeaders",
        stream=streams.TIMERS,
    )
    yield Channel(
        name="timer-due",
        subject=subjects.timer_due(TENANT, SERVICE, KIND, TARGET),
        action="receive",
        title="A timer is due; published by the server itself; internal.",
        payload=None,
        headers=None,
        stream=streams.TIMERS,
    )
    yield Channel(
        name="dead-letter",
        subject=subjects.dead(CONSUMER),
        action="send",
        title="What a consumer can never handle, as it came, with the reason.",
        payload=None,
        headers="DeadHeaders",
        stream=streams.DEAD,
    )
    yield Channel(
        name="heartbeat",
        subject=subjects.observation(SYSTEM_TENANT, "vm-host", "heartbeat", HOST),
        action="receive",
        title="A host's sign of life with all its machines; stored nowhere.",
        payload=json_schemas.HEARTBEAT_PATH,
        headers=None,
        stream=None,
    )
    yield Channel(
        name="log-hint",
        subject=subjects.HINT,
        action="receive",
        title="Something was committed to the log; empty, best effort, stored nowhere; internal.",
        payload=None,
        headers=None,
        stream=None,
    )
    yield Channel(
        name="signed-head",
        subject=subjects.HEAD,
        action="send",
        title="A signed head of the log, as a C2SP checkpoint note.",
        payload=None,
        headers=None,
        stream=streams.HEADS,
    )


_TARGETS: Final = {"scheduler": SESSION, "vm-host": f"{HOST}.{VM}", "snapshot-store": CHECKPOINT}


def _first_line(kind: type[Any]) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]


def _may_publish(grants: Grants, subject: str) -> bool:
    return any(_covers(pattern, subject) for pattern in grants.publish) and not any(
        _covers(pattern, subject) for pattern in grants.denied
    )


def _covers(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else [""]
    return len(wanted) == len(given) and all(want in ("*", got) for want, got in zip(wanted, given, strict=True))
