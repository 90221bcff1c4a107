"""One connection to NATS: how it is made and kept, and requests over it whose refusal by the server is noticed."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol.command import hpub_cmd

from torpor_contracts.errors import Rejected, Transient
from torpor_messaging import subjects
from torpor_messaging.nats_errors import as_torpor_errors, check_version, denied_subject, not_permitted
from torpor_messaging.nats_keys import public_key

CONNECT_S: Final = 10.0
RECONNECT_S_FIRST: Final = 0.1
RECONNECT_S_MAX: Final = 2.0
PING_S: Final = 20
"""After two unanswered pings a connection counts as dead."""

_API_S: Final = 5.0
_UNRECOVERABLE: Final = ("authorization violation", "authorization timeout", "user authentication expired")
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Who connects: `inbox` is what its inboxes begin with, `seed_file` holds its nkey seed (None: no key).

    A service of tenant-crossing calls listens on `_INBOX.*.svc-<service>`, a tenant's client on `_INBOX.<tenant>`.
    """

    name: str
    inbox: str
    seed_file: Path | None = None

    @classmethod
    def service(cls, name: str, seed_file: Path | None) -> "Identity":
        """A service of ours."""
        return cls(name, f"{subjects.inbox_prefix('system')}.svc-{name}", seed_file)

    @classmethod
    def client(cls, tenant_id: str, seed_file: Path | None, name: str = "client") -> "Identity":
        """A client of a tenant."""
        return cls(name, subjects.inbox_prefix(tenant_id), seed_file)


class _Waiting(NamedTuple):
    subject: str
    answer: asyncio.Future[Msg]


class Link:
    """Wraps a nats-py client: its own, or one that a framework makes with `options()` inside `connect_with`."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.client = Client()
        self.closed = asyncio.Event()
        """Set when the connection is gone for good, which it never is because of an outage."""
        self._on_reconnect: list[Callable[[], None]] = []
        self._waiting: dict[str, _Waiting] = {}
        self._next = 0
        self._answers = ""
        self._reconnects = 0
        self._last_error = ""
        self._dropped = 0
        self._begun = False
        self._connected_once = False

    @classmethod
    async def open(cls, url: str, identity: Identity, *, timeout_s: float = CONNECT_S) -> "Link":
        """Connect, and check the server's version.

        `Transient` when nobody answers within `timeout_s`; `Rejected` for a wrong key, a wrong version, or a port
        on which something else than NATS listens.
        """
        link = cls(identity)
        options = link.options()
        seed_file = identity.seed_file
        if seed_file is not None:
            options["nkeys_seed_str"] = read_seed(seed_file)

        async def connect() -> Client:
            link._begun = True
            await link.client.connect(servers=servers_of(url), **options)
            return link.client

        await link.connect_with(connect, url, timeout_s)
        return link

    def options(self) -> dict[str, Any]:
        """The connection options of `nats.connect` that every connection of ours has; servers and key apart."""
        return {
            "name": self.identity.name,
            "inbox_prefix": self.identity.inbox,
            "allow_reconnect": True,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_S_FIRST,
            "reconnect_to_server_handler": self._next_server,
            "ping_interval": PING_S,
            "max_outstanding_pings": 2,
            "error_cb": self._failed,
            "reconnected_cb": self._reconnected,
            "disconnected_cb": self._disconnected,
            "closed_cb": self._closed,
        }

    async def connect_with(self, connect: Callable[[], Awaitable[Client]], url: str, timeout_s: float) -> None:
        """Connect by `connect` (nats-py retries inside it), bounded and with typed errors, and take the client over."""
        try:
            async with asyncio.timeout(timeout_s):
                client = await connect()
        except TimeoutError:
            await self._abandon()
            said = self._last_error or "no answer"
            if "INFO" in said or "json parse" in said:
                raise _no_nats(url, said) from None
            raise Transient(f"cannot connect to NATS at {url}: {said}", retry_after_s=1.0) from None
        except nats.errors.Error as error:
            await self._abandon()
            said = str(error).lower()
            if any(reason in said for reason in _UNRECOVERABLE):
                raise Rejected(
                    "nats-credentials",
                    f"NATS at {url} does not know the key of {self.identity.name!r}",
                    "check the seed file, and that the server runs with the users file made for it",
                ) from error
            raise Transient(f"cannot connect to NATS at {url}: {error}", retry_after_s=1.0) from error
        self.client = client
        self._begun = True
        # A framework's own callback may raise, which would end nats-py's reconnecting for good.
        client._error_cb = self._failed  # noqa: SLF001  (nats-py has no setter)
        self._connected_once = True
        try:
            check_version(str(client._server_info.get("version", "")))  # noqa: SLF001  (nats-py parses it, and fails on some)
        except Rejected:
            await self._abandon()
            raise

    async def close(self) -> None:
        """Send what is buffered, and close."""
        if self.client.is_connected:
            with suppress(nats.errors.Error, TimeoutError):
                await self.client.flush(1)
        with suppress(nats.errors.Error):
            await self.client.close()

    def on_reconnect(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` after every reconnect, until the function returned is called."""
        self._on_reconnect.append(told)
        return lambda: self._on_reconnect.remove(told)

    async def request(
        self, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Msg:
        """Ask and wait for one answer; `Rejected("not-permitted")` at once when the server forbids the subject."""
        waiting = await self.expect(subject)
        with as_torpor_errors(subject):
            try:
                await self.client.publish(subject, data, reply=waiting.inbox, headers=_plain(headers))
                async with asyncio.timeout(timeout_s):
                    message = await waiting.answer
            finally:
                self.forget(waiting)
            if not message.data and message.headers and message.headers.get("Status") == "503":
                raise nats.errors.NoRespondersError
        return message

    async def api(self, name: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call the JetStream API (`name` without `$JS.API.`); the answer, which may hold an `error`."""
        data = b"" if body is None else json.dumps(body).encode()
        answer = await self.request(f"$JS.API.{name}", data, _API_S)
        parsed: dict[str, Any] = json.loads(answer.data)
        return parsed

    async def expect(self, subject: str, tenant_id: str | None = None) -> "Expected":
        """Get ready for one answer to something published on `subject`, at an inbox of `tenant_id`."""
        if not self._answers:
            # Before the first await: two first requests must not make two subscriptions.
            self._answers = self.client.new_inbox()
            listened = self._answers
            if ".svc-" in listened:
                listened = listened.replace("_INBOX.system.", "_INBOX.*.", 1)
            with as_torpor_errors("listening for answers"):
                await self.client.subscribe(f"{listened}.*", cb=self._answered)
        self._next += 1
        token = str(self._next)
        inbox = f"{self._answers}.{token}"
        if tenant_id is not None and ".svc-" in inbox:
            inbox = inbox.replace("_INBOX.system.", f"{subjects.inbox_prefix(tenant_id)}.", 1)
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = _Waiting(subject.lower(), future)
        return Expected(token, inbox, future)

    def forget(self, expected: "Expected") -> None:
        """Wait for that answer no longer."""
        self._waiting.pop(expected.token, None)
        if not expected.answer.cancel() and not expected.answer.cancelled():
            # An error that nobody waits for any more would be logged as never retrieved.
            expected.answer.exception()

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish and wait for nothing."""
        with as_torpor_errors(subject):
            await self.client.publish(subject, data, headers=_plain(headers))

    async def publish_many(self, messages: Iterable[tuple[str, str, Mapping[str, str], bytes]]) -> None:
        """Publish messages (subject, inbox for the answer, headers, payload) one after the other, quickly.

        nats-py spends more on checking each header than on all the rest; here they must be clean already: printable
        ASCII, as `percent_encode` makes it.
        """
        client = self.client
        if client.is_closed:
            raise nats.errors.ConnectionClosedError
        for subject, reply, headers, data in messages:
            if len(data) > client.max_payload:
                raise nats.errors.MaxPayloadError
            block = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            command = hpub_cmd(subject, reply, f"NATS/1.0\r\n{block}\r\n".encode(), data)
            await client._send_command(command)  # noqa: SLF001  (what `publish` does after its checks)
            flushing = client._flush_queue  # noqa: SLF001  (as above)
            if flushing is not None and flushing.empty():
                await client._flush_pending()  # noqa: SLF001  (as above)

    async def _answered(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(message)

    async def _failed(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        subject = denied_subject(error)
        if isinstance(error, nats.errors.SlowConsumerError):
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:  # the first, the second, the fourth, …: never a flood
                _log.warning("nats %s: dropped %d messages on %s", self.identity.name, self._dropped, error.subject)
            return
        if subject is None:
            if not self._connected_once and any(reason in self._last_error.lower() for reason in _UNRECOVERABLE):
                raise error
            _log.debug("nats %s: %s", self.identity.name, self._last_error)
            return
        _log.warning("nats %s: not permitted: %s", self.identity.name, subject)
        for waiting in list(self._waiting.values()):
            if waiting.subject == subject and not waiting.answer.done():
                waiting.answer.set_exception(not_permitted(subject))

    async def _reconnected(self) -> None:
        self._reconnects = 0
        _log.info("nats %s: connected again", self.identity.name)
        for told in list(self._on_reconnect):
            told()

    async def _disconnected(self) -> None:
        if not self.client.is_closed:
            _log.warning("nats %s: connection lost, connecting again", self.identity.name)

    async def _closed(self) -> None:
        self.closed.set()

    def _next_server(self, servers: list[Any], _info: dict[str, Any]) -> tuple[Any, float]:
        pause_s = min(RECONNECT_S_FIRST * 2.0 ** min(self._reconnects, 10), RECONNECT_S_MAX)
        chosen = servers[self._reconnects % len(servers)]
        self._reconnects += 1
        return chosen, pause_s

    async def _abandon(self) -> None:
        if not self._begun:
            return
        with suppress(nats.errors.Error, OSError):
            await self.client.close()


class Expected(NamedTuple):
    """An answer that is waited for, and the inbox it must be sent to."""

    token: str
    inbox: str
    answer: asyncio.Future[Msg]


def servers_of(url: str) -> list[str]:
    """The servers of a URL setting: several are separated by commas."""
    return [server.strip() for server in url.split(",") if server.strip()]


def read_seed(path: Path) -> str:
    """The nkey seed in a file; `Rejected("nats-credentials")` when there is none."""
    public_key(path)
    return path.read_text(encoding="ascii").strip()


def _plain(headers: Mapping[str, str] | None) -> dict[str, Any] | None:
    return dict(headers) if headers else None


def _no_nats(url: str, said: str) -> Rejected:
    return Rejected(
        "not-a-nats-server",
        f"what listens at {url} is no NATS server ({said})",
        "check the URL and port; another program may have taken the port",
    )
