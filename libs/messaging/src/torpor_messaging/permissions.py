"""Who may publish and listen where: one list for each service, for tenants and for operators.

Whatever is not allowed here the server refuses: no service can delete, purge or change a stream, only the log-relay
can publish what becomes an event, and a tenant reaches nothing of another. A tenant lives in a NATS account of its
own and reaches ours through imports, since in a shared account the server itself could be made to publish for it:
acknowledgements and pulled messages go wherever a request asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import SYSTEM_TENANT, is_token
from torpor_contracts.registry import COMMANDS
from torpor_contracts.session import ClientSessionCommand
from torpor_messaging.subjects import type_token

SERVICES: Final = ("scheduler", "vm-host", "snapshot-store", "billing", "reaper", "log-relay")

OWN_CONSUMERS_MAX: Final = 16
"""Where there are several tenants, each can pull from consumers named `<tenant>-1` to `<tenant>-16` only."""

_CONSUMER_API: Final = "$JS.API.CONSUMER"
_NEVER: Final = (
    "$JS.API.STREAM.CREATE.>",
    "$JS.API.STREAM.UPDATE.>",
    "$JS.API.STREAM.DELETE.>",
    "$JS.API.STREAM.PURGE.>",
    "$JS.API.STREAM.MSG.DELETE.>",
    "$JS.API.STREAM.RESTORE.>",
    "$JS.API.STREAM.SNAPSHOT.>",
    "$JS.API.ACCOUNT.>",
    "$SYS.>",
    "evt.>",
)

_TAKES: Final = {
    "scheduler": ("cmd.*.scheduler.>",),
    "vm-host": ("cmd.*.vm-host.>",),
    "snapshot-store": ("cmd.*.snapshot-store.>",),
}
"""The commands of a service, as filters of its consumers."""

_SENDS: Final = {
    "scheduler": (
        "cmd.*.vm-host.>",
        "cmd.*.scheduler.>",
        "timer.set.*.scheduler.>",
        "obs.system.scheduler.>",  # its own probes: silence of a host counts only while it hears itself
        "hint.>",
    ),
    "vm-host": (
        "cmd.*.snapshot-store.register-checkpoint.*",
        "cmd.system.scheduler.register-host.*",
        "obs.system.vm-host.>",
        "out.>",
        "hint.>",
    ),
    "snapshot-store": ("hint.>",),
    "reaper": ("cmd.*.vm-host.>", "cmd.*.snapshot-store.free-checkpoint.*", "hint.>"),
    "log-relay": ("relay.>", "head.>"),
}
"""What a service publishes besides replies and dead letters."""

_HEARS: Final = {
    "scheduler": ("obs.>",),
    "vm-host": ("guest.>",),
    "reaper": ("obs.>",),
    "log-relay": ("hint.>",),
}
"""Core subjects that a service listens on besides its own questions and inboxes."""

_TIMED: Final = ("scheduler",)
"""Services with timers."""


@dataclass(frozen=True)
class Grants:
    """What one user may publish and listen to; `denied` wins over `publish`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    denied: tuple[str, ...] = ()


def of_service(service: str) -> Grants:
    """The grants of one of our services."""
    publish = [
        "$JS.API.INFO",
        "$JS.API.STREAM.INFO.*",
        *_reads("EVENTS", ">", "*"),
        "qry.>",
        "dead.*",
        "_INBOX.>",
        "_R_.>",  # where the server has the answers to a tenant's questions go
        *_SENDS.get(service, ()),
    ]
    for taken in _TAKES.get(service, ()):
        publish += [*_reads("COMMANDS", taken, "*"), "$JS.ACK.COMMANDS.>"]
    if service in _TIMED:
        publish += [*_reads("TIMERS", f"timer.due.*.{service}.>", "*"), "$JS.ACK.TIMERS.>"]
    if service == "log-relay":
        publish += ["$JS.API.STREAM.MSG.GET.EVENTS", "$JS.API.STREAM.MSG.GET.HEADS"]
    subscribe = [f"_INBOX.*.svc-{service}.>", f"qry.*.{service}.>", *_HEARS.get(service, ())]
    return Grants(tuple(publish), tuple(subscribe), _NEVER)


def of_operator() -> Grants:
    """The grants of an operator, who acts for the tenant `system`: hosts, health, and reading everything."""
    publish = [
        "cmd.system.>",
        "qry.>",
        "$JS.API.INFO",
        "$JS.API.STREAM.INFO.*",
        "$JS.API.STREAM.NAMES",
        *[subject for stream in ("EVENTS", "OUTPUT", "DEAD", "HEADS") for subject in _reads(stream, ">", "*")],
        *[f"$JS.{what}.{stream}.>" for what in ("ACK", "FC") for stream in ("EVENTS", "OUTPUT", "DEAD", "HEADS")],
        "$JS.API.DIRECT.GET.>",
        "$JS.API.STREAM.MSG.GET.*",
    ]
    return Grants(tuple(publish), ("_INBOX.system.>", "evt.>", "out.>", "obs.>"), _NEVER)


def of_tenant(tenant_id: str, *, alone: bool) -> Grants:
    """The grants of a tenant's clients, inside the tenant's account.

    `alone`: it is the only tenant, so its consumers may have any name. Of several, none may pull from another's.
    """
    check_tenant(tenant_id)
    names = ["*"] if alone else [f"{tenant_id}-{number}" for number in range(1, OWN_CONSUMERS_MAX + 1)]
    publish = [f"cmd.{tenant_id}.scheduler.*.*", f"qry.{tenant_id}.>", f"guest.{tenant_id}.>", "$JS.API.STREAM.NAMES"]
    for stream, subject in (("EVENTS", f"evt.{tenant_id}.>"), ("OUTPUT", f"out.{tenant_id}.>")):
        publish += [
            f"{_CONSUMER_API}.CREATE.{stream}.*.{subject}",
            f"$JS.API.DIRECT.GET.{stream}.{subject}",
            f"$JS.ACK.{stream}.>",
            f"$JS.FC.{stream}.>",
        ]
        publish += [
            f"{_CONSUMER_API}.{what}.{stream}.{name}" for what in ("MSG.NEXT", "INFO", "DELETE") for name in names
        ]
    client = {type_token(str(kind.__struct_config__.tag)) for kind in get_args(ClientSessionCommand)}
    internal = sorted({type_token(tag) for tag in COMMANDS["scheduler"]} - client)
    return Grants(
        tuple(publish),
        (f"_INBOX.{tenant_id}.>", f"evt.{tenant_id}.>", f"out.{tenant_id}.>"),
        tuple(f"cmd.{tenant_id}.scheduler.{type_}.>" for type_ in internal),
    )


def check_tenant(tenant_id: str) -> None:
    """Refuse what cannot be a tenant's name."""
    if not is_token(tenant_id) or tenant_id == SYSTEM_TENANT:
        raise Rejected(
            "illegal-tenant",
            f"{tenant_id!r} cannot be a tenant",
            f"use one token of a-z, 0-9 and '-', and not {SYSTEM_TENANT!r}",
        )


def _reads(stream: str, subject: str, name: str) -> Sequence[str]:
    """What it takes to make consumers of these subjects and to use them."""
    return (
        f"{_CONSUMER_API}.CREATE.{stream}.*.{subject}",
        f"{_CONSUMER_API}.INFO.{stream}.{name}",
        f"{_CONSUMER_API}.MSG.NEXT.{stream}.{name}",
        f"{_CONSUMER_API}.DELETE.{stream}.{name}",
    )
