"""Subjects: the one place where they are put together and taken apart.

`cmd.<tenant>.<service>.<type>.<target>`   a command, stored in `COMMANDS`
`evt.<tenant>.<type>.<stream>`             an event, stored in `EVENTS`; published as `relay.…`, see `streams.py`
`out.<tenant>.<session>.<exec>`            a program's output, stored in `OUTPUT`
`timer.set|due.<tenant>.<service>.<kind>.<target>`   a timer, stored in `TIMERS`
`dead.<consumer>`                          what could not be handled, stored in `DEAD`
`head.log`                                 signed heads, stored in `HEADS`
`qry.<tenant>.<service>.<type>.<target>`   a question, answered at once and never stored; target `-` when there is none
`guest.<tenant>.<host id>.<type>.<session>`   a request to a session's machine, answered at once and never stored
`obs.<tenant>.<service>.<type>.<id>`       an observation, never stored
`hint.log`                                 something was committed to the log; never stored

A target is one token, or two where the first names a host. A `<type>` is a wire tag without its version.
"""

from typing import Final, NamedTuple

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import TenantId, is_token

HINT: Final = "hint.log"
"""Published after a commit, best effort, so that the relay need not wait for its next poll."""

HEAD: Final = "head.log"
"""Where signed heads of the log are published and kept."""

NO_TARGET: Final = "-"

_TARGET_TOKENS_MAX: Final = 2
_ADVICE: Final = "use tokens of a-z, 0-9 and '-' that start with a letter or digit and have at most 63 characters"


class CommandSubject(NamedTuple):
    """`cmd.<tenant>.<service>.<type>.<target>`; `type` has no version."""

    tenant_id: TenantId
    service: str
    type: str
    target: str


class EventSubject(NamedTuple):
    """`evt.<tenant>.<type>.<stream>`; `type` has no version."""

    tenant_id: TenantId
    type: str
    stream: str


class TimerSubject(NamedTuple):
    """`timer.<set or due>.<tenant>.<service>.<kind>.<target>`."""

    tenant_id: TenantId
    service: str
    kind: str
    target: str


class QuerySubject(NamedTuple):
    """`qry.<tenant>.<service>.<type>.<target>`; `target` is `-` when there is none."""

    tenant_id: TenantId
    service: str
    type: str
    target: str


class GuestSubject(NamedTuple):
    """`guest.<tenant>.<host id>.<type>.<session>`."""

    tenant_id: TenantId
    host_id: str
    type: str
    session_id: str


class ObservationSubject(NamedTuple):
    """`obs.<tenant>.<service>.<type>.<id>`."""

    tenant_id: TenantId
    service: str
    type: str
    id: str


def type_token(tag: str) -> str:
    """The subject token of a wire tag: `session-requested.v1` -> `session-requested`."""
    return tag.partition(".")[0]


def command(tenant_id: str, service: str, type_or_tag: str, target: str) -> str:
    """Where a command is published."""
    return _join("cmd", tenant_id, service, type_token(type_or_tag), *_target(target))


def parse_command(subject: str) -> CommandSubject:
    """The parts of a command's subject; `Rejected("illegal-subject")` when it is none."""
    tenant_id, service, type_, *target = _split(
        subject, "cmd", least=5, most=6, form="cmd.<tenant>.<service>.<type>.<target>"
    )
    return CommandSubject(TenantId(tenant_id), service, type_, ".".join(target))


def sender_of_command(subject: str) -> TenantId:
    """The tenant that published on `cmd.…`, also where what follows is illegal: even that is to be answered."""
    head, _, rest = subject.partition(".")
    if head != "cmd":
        raise _illegal(subject, "is no command's")
    return TenantId(_checked(rest.partition(".")[0]))


def command_filter(service: str, target_filter: str) -> str:
    """The filter of a service's consumer: any tenant, any type, the targets it takes."""
    return f"cmd.*.{_checked(service)}.*.{_checked_filter(target_filter)}"


def event(tenant_id: str, tag: str, stream: str) -> str:
    """Where an event is read."""
    return _join("evt", tenant_id, type_token(tag), stream)


def relayed(tenant_id: str, tag: str, stream: str) -> str:
    """Where the log-relay publishes an event, for `EVENTS` to store it under its `event` subject."""
    return _join("relay", tenant_id, type_token(tag), stream)


def parse_event(subject: str) -> EventSubject:
    """The parts of an event's subject."""
    tenant_id, type_, stream = _split(subject, "evt", least=4, most=4, form="evt.<tenant>.<type>.<stream>")
    return EventSubject(TenantId(tenant_id), type_, stream)


def output(tenant_id: str, session_id: str, exec_id: str) -> str:
    """Where a program's output is published."""
    return _join("out", tenant_id, session_id, exec_id)


def timer_set(tenant_id: str, service: str, kind: str, target: str) -> str:
    """Where a timer is set; setting it again replaces it."""
    return _join("timer", "set", tenant_id, service, kind, *_target(target))


def timer_due(tenant_id: str, service: str, kind: str, target: str) -> str:
    """Where a timer appears once it is due."""
    return _join("timer", "due", tenant_id, service, kind, *_target(target))


def timer_due_filter(service: str) -> str:
    """The filter of a service's consumer of due timers."""
    return f"timer.due.*.{_checked(service)}.>"


def parse_timer_due(subject: str) -> TimerSubject:
    """The parts of a due timer's subject."""
    form = "timer.due.<tenant>.<service>.<kind>.<target>"
    due, tenant_id, service, kind, *target = _split(subject, "timer", least=6, most=7, form=form)
    if due != "due":
        raise _illegal(subject, f"is not of the form {form}")
    return TimerSubject(TenantId(tenant_id), service, kind, ".".join(target))


def dead(consumer: str) -> str:
    """Where a consumer puts what it can never handle."""
    return _join("dead", consumer)


def query(tenant_id: str, service: str, type_: str, target: str = NO_TARGET) -> str:
    """Where a question is asked."""
    return f"{_join('qry', tenant_id, service, type_)}.{target if target == NO_TARGET else _checked(target)}"


def query_filter(service: str, type_: str) -> str:
    """The filter of a service that answers questions of a type, for any tenant."""
    return f"qry.*.{_checked(service)}.{_checked(type_)}.*"


def parse_query(subject: str) -> QuerySubject:
    """The parts of a question's subject."""
    head, _, target = subject.rpartition(".")
    form = "qry.<tenant>.<service>.<type>.<target or ->"
    tenant_id, service, type_ = _split(head, "qry", least=4, most=4, form=form)
    return QuerySubject(TenantId(tenant_id), service, type_, target if target == NO_TARGET else _checked(target))


def guest(tenant_id: str, host_id: str, type_: str, session_id: str) -> str:
    """Where something is asked of a session's machine."""
    return _join("guest", tenant_id, host_id, type_, session_id)


def guest_filter(host_id: str) -> str:
    """The filter of a host: what is asked of its machines, by any tenant."""
    return f"guest.*.{_checked(host_id)}.*.*"


def parse_guest(subject: str) -> GuestSubject:
    """The parts of a subject on which something is asked of a machine."""
    form = "guest.<tenant>.<host id>.<type>.<session>"
    tenant_id, host_id, type_, session_id = _split(subject, "guest", least=5, most=5, form=form)
    return GuestSubject(TenantId(tenant_id), host_id, type_, session_id)


def observation(tenant_id: str, service: str, type_or_tag: str, id_: str) -> str:
    """Where an observation is published."""
    return _join("obs", tenant_id, service, type_token(type_or_tag), id_)


def parse_observation(subject: str) -> ObservationSubject:
    """The parts of an observation's subject."""
    form = "obs.<tenant>.<service>.<type>.<id>"
    tenant_id, service, type_, id_ = _split(subject, "obs", least=5, most=5, form=form)
    return ObservationSubject(TenantId(tenant_id), service, type_, id_)


def inbox_prefix(tenant_id: str) -> str:
    """What every inbox of a tenant's clients begins with (without the dot)."""
    return f"_INBOX.{_checked(tenant_id)}"


def check_reply(tenant_id: str, subject: str) -> None:
    """Refuse a reply subject outside the tenant's own inboxes: a service must not be made to publish elsewhere."""
    prefix = inbox_prefix(tenant_id) + "."
    rest = subject.removeprefix(prefix)
    plain = rest.isascii() and rest.isprintable() and not any(mark in rest for mark in " *>")
    if not subject.startswith(prefix) or not plain or "" in rest.split("."):
        raise Rejected(
            "illegal-reply-subject",
            f"replies to {subject[:80]!r} are not sent for tenant {tenant_id}",
            f"connect with the inbox prefix {prefix[:-1]} and name an inbox below it",
        )


def _join(*tokens: str) -> str:
    for token in tokens:
        _checked(token)
    return ".".join(tokens)


def _target(target: str) -> list[str]:
    tokens = target.split(".")
    if len(tokens) > _TARGET_TOKENS_MAX:
        raise _illegal(target, f"has {len(tokens)} tokens, a target at most {_TARGET_TOKENS_MAX}")
    return tokens


def _split(subject: str, first: str, *, least: int, most: int, form: str) -> list[str]:
    head, *rest = subject.split(".")
    if head != first or not least <= len(rest) + 1 <= most:
        raise _illegal(subject, f"is not of the form {form}")
    for token in rest:
        _checked(token)
    return rest


def _checked(token: str) -> str:
    if not is_token(token):
        raise _illegal(token, "is not one token")
    return token


def _checked_filter(target_filter: str) -> str:
    for part in _target(target_filter):
        if part != "*":
            _checked(part)
    return target_filter


def _illegal(subject: str, why: str) -> Rejected:
    return Rejected("illegal-subject", f"{subject[:120]!r} {why}", _ADVICE)
