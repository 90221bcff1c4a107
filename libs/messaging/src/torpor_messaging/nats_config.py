"""Writes a NATS server's configuration: keys, accounts, users and permissions, and the server's own settings.

python -m torpor_messaging.nats_config --dir DIR [--tenants default,acme] [--users-only]
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_messaging.nats_keys import ensure_key
from torpor_messaging.permissions import SERVICES, Grants, check_tenant, of_operator, of_service, of_tenant

ACCOUNT: Final = "TORPOR"
ADMIN: Final = "admin"
OPERATOR: Final = "operator"

SYNC_INTERVAL_S: Final = 1
"""How much of what is not in the log (commands on their way) a power failure may take."""

FILE_STORE_MAX: Final = "1PB"
"""Far more than any disk: a full disk is told as such.

Left to itself the server takes three quarters of what is free when it starts, which streams that fill most of a disk,
or may grow to more than a small one holds, exceed from the start: then it stores nothing at all.
"""

_ESCAPES: Final = {chr(code): f"\\x{code:02x}" for code in (*range(0x20), 0x7F)} | {'"': '\\"', "\\": "\\\\"}


@dataclass(frozen=True)
class ServerSettings:
    """What a single server needs to know; `http_port` serves monitoring when it is given."""

    store_dir: Path
    host: str = "127.0.0.1"
    port: int = 4222
    name: str = "torpor"
    http_port: int | None = None
    pid_file: Path | None = None


@dataclass(frozen=True)
class Configuration:
    """What was written: the server's configuration, and the seed file of each user by its name.

    Users are `admin`, `operator`, the services by their names, and `tenant-<id>`.
    """

    server: Path
    users: Path
    seeds: Mapping[str, Path] = field(default_factory=dict)


def write_configuration(
    directory: Path, settings: ServerSettings, *, tenants: Sequence[str] = ("default",), keys: Path | None = None
) -> Configuration:
    """Write `server.conf` and `users.conf` into `directory`; keys that are there are kept (by default in `keys/`)."""
    seeds, users = write_users(directory, tenants=tenants, keys=keys)
    server = directory / "server.conf"
    lines = [
        f"server_name: {_quoted(settings.name)}",
        f"listen: {_quoted(f'{settings.host}:{settings.port}')}",
        "logtime_utc: true",
        *([f"http: {_quoted(f'{settings.host}:{settings.http_port}')}"] if settings.http_port is not None else []),
        *([f"pid_file: {_quoted(str(settings.pid_file))}"] if settings.pid_file is not None else []),
        "jetstream {",
        f"  store_dir: {_quoted(str(settings.store_dir))}",
        f'  sync_interval: "{SYNC_INTERVAL_S}s"',
        f"  max_file_store: {FILE_STORE_MAX}",
        "}",
        'include "users.conf"',
    ]
    _write(server, "\n".join(lines) + "\n")
    return Configuration(server, users, seeds)


def write_users(
    directory: Path, *, tenants: Sequence[str], keys: Path | None = None
) -> tuple[Mapping[str, Path], Path]:
    """Write `users.conf`, to be included by any server of the same whole, and the keys; seeds by user, and the file."""
    for tenant_id in tenants:
        check_tenant(tenant_id)
    if len(set(tenants)) != len(tenants):
        raise Rejected("illegal-tenant", "a tenant is named twice", "name each tenant once")
    chosen = keys or directory / "keys"
    for place in (directory, chosen):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = [ADMIN, OPERATOR, *SERVICES, *(f"tenant-{tenant_id}" for tenant_id in tenants)]
    seeds = {name: chosen / f"{name}.nk" for name in names}
    users = directory / "users.conf"
    _write(users, render_users({name: ensure_key(path) for name, path in seeds.items()}, tenants))
    return seeds, users


def render_users(public_keys: Mapping[str, str], tenants: Sequence[str]) -> str:
    """The accounts of a whole: ours with the services, and one for each tenant with what it may reach of ours."""
    ours = [
        f"{{ nkey: {public_keys[ADMIN]} }}",
        _user(public_keys[OPERATOR], of_operator()),
        *(_user(public_keys[service], of_service(service)) for service in SERVICES),
    ]
    exports = [export for tenant_id in tenants for export in _exports(tenant_id)]
    accounts = [f"  {ACCOUNT} {{\n    jetstream: enabled\n{_block('users', ours)}{_block('exports', exports)}  }}\n"]
    for tenant_id in tenants:
        user = _user(public_keys[f"tenant-{tenant_id}"], of_tenant(tenant_id, alone=len(tenants) == 1))
        accounts.append(
            f"  {_account(tenant_id)} {{\n{_block('users', [user])}{_block('imports', _imports(tenant_id))}  }}\n"
        )
    made = "# Made by torpor_messaging.nats_config; make it anew rather than editing it.\n"
    return made + "accounts {\n" + "".join(accounts) + "}\n"


_STREAMED: Final = ("evt.{}.>", "out.{}.>", "_INBOX.{}.>")
"""What a tenant hears of our account: events, output, and replies to its commands."""

_SERVED: Final = ("cmd.{}.>", "qry.{}.>", "guest.{}.>")
_API: Final = ("$JS.API.>", "$JS.ACK.>", "$JS.FC.>")
"""Reached by every tenant's account, and fenced by its user's permissions.

The whole of `$JS.API.>`, as an account without streams would otherwise answer such requests itself, with a refusal.
"""


def _exports(tenant_id: str) -> list[str]:
    to = f"accounts: [{_account(tenant_id)}]"
    return [
        *(f"{{ stream: {_quoted(subject.format(tenant_id))}, {to} }}" for subject in _STREAMED),
        *(f"{{ service: {_quoted(subject.format(tenant_id))}, {to} }}" for subject in _SERVED),
        *(f"{{ service: {_quoted(subject)}, response_type: stream, {to} }}" for subject in _API),
    ]


def _imports(tenant_id: str) -> list[str]:
    served = (*(subject.format(tenant_id) for subject in _SERVED), *_API)
    streamed = (subject.format(tenant_id) for subject in _STREAMED)
    return [
        *(f"{{ stream: {{ account: {ACCOUNT}, subject: {_quoted(subject)} }} }}" for subject in streamed),
        *(f"{{ service: {{ account: {ACCOUNT}, subject: {_quoted(subject)} }} }}" for subject in served),
    ]


def _account(tenant_id: str) -> str:
    return _quoted(f"TENANT_{tenant_id}")


def _user(public_key: str, grants: Grants) -> str:
    publish = f"allow: {_list(grants.publish)}" + (f", deny: {_list(grants.denied)}" if grants.denied else "")
    return (
        f"{{ nkey: {public_key}, permissions: {{ publish: {{ {publish} }},"
        f" subscribe: {{ allow: {_list(grants.subscribe)} }} }} }}"
    )


def _block(name: str, entries: Sequence[str]) -> str:
    return f"    {name}: [\n" + "".join(f"      {entry}\n" for entry in entries) + "    ]\n"


def _list(subjects: Sequence[str]) -> str:
    return "[" + ", ".join(_quoted(subject) for subject in subjects) + "]"


def _quoted(text: str) -> str:
    # The server reads UTF-8, and of JSON's escapes only these; what else a path holds can be given by its byte alone.
    escaped = "".join(_ESCAPES.get(mark, mark) for mark in text)
    return f'"{escaped}"'


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)


def main() -> int:
    """Read the arguments, write the files, say where they are; the exit code."""
    parser = argparse.ArgumentParser(prog="torpor_messaging.nats_config", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the configuration and its keys/ go")
    parser.add_argument("--tenants", default="default", help="tenants, separated by commas")
    parser.add_argument("--store-dir", type=Path, default=Path("/data/jetstream"))
    parser.add_argument("--listen", default="127.0.0.1:4222", help="host:port")
    parser.add_argument("--users-only", action="store_true", help="write users.conf only, for a server.conf of yours")
    given = parser.parse_args()
    tenants = [tenant_id.strip() for tenant_id in given.tenants.split(",") if tenant_id.strip()]
    try:
        if given.users_only:
            _, written = write_users(given.dir, tenants=tenants)
        else:
            host, _, port = given.listen.rpartition(":")
            settings = ServerSettings(store_dir=given.store_dir, host=host, port=int(port))
            written = write_configuration(given.dir, settings, tenants=tenants).server
    except Rejected as refused:
        sys.stderr.write(f"{refused.message}; {refused.advice}\n")
        return 2
    sys.stdout.write(f"wrote {written}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
