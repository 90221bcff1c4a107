"""The SDK's front: connect, and reach sessions, checkpoints, events, hosts, usage and resources."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Final

from torpor.client import discovery, events
from torpor.client.checkpoints import Checkpoints
from torpor.client.connection import Connection
from torpor.client.models import Event
from torpor.client.session import RECEIPT_TIMEOUT_S, WAIT_TIMEOUT_S, Session, new_id
from torpor_contracts import host as host_contract
from torpor_contracts import session as contract
from torpor_contracts.cleanup import ResourcesAnswer
from torpor_contracts.replies import Receipt
from torpor_contracts.scheduling import HostsAnswer, HostView, SessionsAnswer, SessionView
from torpor_contracts.usage import UsageAnswer

CONNECT_TIMEOUT_S: Final = 10.0
PAGE_MAX: Final = 200


class Sessions:
    """The sessions of the tenant."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        *,
        session_id: str | None = None,
        image: str = "default",
        vcpus: int = 1,
        memory_mib: int = 256,
        disk_mib: int = 1024,
        idle_after_s: float | None = 300.0,
        metadata: Mapping[str, str] | None = None,
        command_id: str | None = None,
        wait: bool = True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Session:
        """Make a session and, with `wait`, return once its machine runs. `idle_after_s` None: it never falls asleep."""
        session = Session(self._connection, session_id or new_id("ses", command_id))
        command = contract.CreateSession(
            machine=contract.MachineSpec(image=image, vcpus=vcpus, memory_mib=memory_mib, disk_mib=disk_mib),
            idle_after_s=idle_after_s,
            metadata=dict(metadata or {}),
        )
        await session.create(command, command_id, timeout_s, wait=wait)
        return session

    async def get(self, session_id: str) -> Session:
        """A session that exists; `SessionNotFound` when it does not."""
        session = Session(self._connection, session_id)
        await session.show()
        return session

    def handle(self, session_id: str) -> Session:
        """A session by its id, without asking whether it exists."""
        return Session(self._connection, session_id)

    async def list(self, *, state: str | None = None, at_least: int = 0) -> AsyncGenerator[SessionView, None]:
        """The tenant's sessions in the order of their ids, page by page."""
        after: str | None = None
        while True:
            page: SessionsAnswer = await self._connection.query(
                "scheduler",
                "sessions",
                parameters={"state": state, "after": after, "limit": PAGE_MAX, "at_least": at_least},
            )
            for view in page.sessions:
                yield view
            if page.next is None:
                return
            after = page.next


class Hosts:
    """The hosts; for operators, who connect with `role="operator"`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self, *, at_least: int = 0) -> AsyncGenerator[HostView, None]:
        """The hosts and what of them is taken, page by page."""
        after: str | None = None
        while True:
            page: HostsAnswer = await self._connection.query(
                "scheduler", "hosts", parameters={"after": after, "limit": PAGE_MAX, "at_least": at_least}
            )
            for view in page.hosts:
                yield view
            if page.next is None:
                return
            after = page.next

    async def drain(self, host_id: str, *, reason: str = "", command_id: str | None = None) -> Receipt:
        """Take no new machines on this host, and suspend those that run."""
        return await self._send(host_id, host_contract.DrainHost(reason=reason), command_id)

    async def undrain(self, host_id: str, *, command_id: str | None = None) -> Receipt:
        """Take new machines again."""
        return await self._send(host_id, host_contract.UndrainHost(), command_id)

    async def _send(
        self, host_id: str, command: host_contract.DrainHost | host_contract.UndrainHost, command_id: str | None
    ) -> Receipt:
        chosen = command_id or new_id("cmd", None)
        return await self._connection.command("scheduler", host_id, command, chosen, RECEIPT_TIMEOUT_S)


class Torpor:
    """An open connection to a whole, as one tenant."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sessions = Sessions(connection)
        self.checkpoints = Checkpoints(connection)
        self.hosts = Hosts(connection)

    @property
    def tenant(self) -> str:
        """The tenant we act as."""
        return self.connection.tenant

    async def events(
        self, *, from_position: int = 1, follow: bool = False, session_id: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """The tenant's events from a position of the log on, in order; with `follow` for ever."""
        subject = f"evt.{self.tenant}.>"
        if session_id is not None:
            subject = events.session_subject(self.tenant, self.sessions.handle(session_id).session_id)
        async with aclosing(events.read_events(self.connection, subject, from_position, follow=follow)) as stream:
            async for event in stream:
                yield event

    async def usage(self, session_id: str = "-") -> AsyncGenerator[UsageAnswer, None]:
        """Usage of a session, or of the tenant, page by page."""
        after: str | None = None
        while True:
            page: UsageAnswer = await self.connection.query("billing", "usage", session_id, {"after": after})
            yield page
            if page.next is None:
                return
            after = page.next

    async def resources(
        self, session_id: str = "-", *, held_only: bool = False
    ) -> AsyncGenerator[ResourcesAnswer, None]:
        """What the machines of a session, or of the tenant, hold or held on their hosts, page by page."""
        after: str | None = None
        while True:
            page: ResourcesAnswer = await self.connection.query(
                "reaper", "resources", session_id, {"after": after, "held_only": held_only}
            )
            yield page
            if page.next is None:
                return
            after = page.next


class Connecting:
    """What `connect` returns: opened by `async with`."""

    def __init__(self, endpoint_arguments: Mapping[str, object], timeout_s: float) -> None:
        self._arguments = endpoint_arguments
        self._timeout_s = timeout_s
        self._connection: Connection | None = None

    async def __aenter__(self) -> Torpor:
        endpoint = discovery.find(**self._arguments)  # type: ignore[arg-type]
        self._connection = await Connection.open(endpoint, self._timeout_s)
        return Torpor(self._connection)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            await self._connection.close()


def connect(
    *,
    data_dir: Path | str | None = None,
    nats_url: str | None = None,
    nkey_seed_file: Path | str | None = None,
    tenant: str | None = None,
    role: discovery.Role = "tenant",
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Connecting:
    """Connect to an embedded whole, or to a NATS server.

    The whole is that of a data directory (`TORPOR_DATA_DIR`, by default under the XDG state directory); the server
    is named by `TORPOR_NATS_URL`, `TORPOR_NKEY_SEED_FILE` and `TORPOR_TENANT`. Arguments win over the environment.

    `role="operator"` acts for the tenant `system`, which sees hosts. `Unavailable` when nobody is there.
    """
    return Connecting(
        {
            "data_dir": data_dir,
            "nats_url": nats_url,
            "nkey_seed_file": nkey_seed_file,
            "tenant": tenant,
            "role": role,
        },
        timeout_s,
    )
