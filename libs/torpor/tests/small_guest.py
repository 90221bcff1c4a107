"""A machine in one page, on a real nats-server: answers what the SDK asks of a session and of its guest."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from nats.aio.msg import Msg

from torpor_contracts import guest
from torpor_contracts.ids import HostId, SessionId, TenantId, VmId
from torpor_contracts.replies import Refusal, Reply
from torpor_contracts.scheduling import SessionState, SessionView
from torpor_contracts.session import MachineSpec
from torpor_messaging import guest_messages

from .small_scheduler import SmallScheduler

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SESSION = "ses-1"
Answer = tuple[msgspec.Struct, bytes] | Refusal | None


class SmallGuest:
    """The session `ses-1` as its scheduler shows it, and its machine as its host answers for it."""

    def __init__(self, scheduler: SmallScheduler) -> None:
        self._client = scheduler.client
        self.state: SessionState = "running"
        self.incarnation = 1
        self.position = 0
        self.written = b""
        self.asked: list[tuple[str, Any, bytes]] = []
        self.on_request: Callable[[Any, bytes], Answer] = lambda _request, _body: None
        """What the machine answers; None: the answer is lost."""

    async def listen(self) -> None:
        """Answer from now on."""
        await self._client.subscribe("qry.default.scheduler.session.*", cb=self._show)
        await self._client.subscribe("guest.>", cb=self._ask)
        await self._client.flush()

    async def _show(self, message: Msg) -> None:
        running = self.state == "running"
        view = SessionView(
            session_id=SessionId(SESSION),
            tenant_id=TenantId("default"),
            state=self.state,
            desired="running",
            observed="running" if running else "suspended",
            incarnation=self.incarnation,
            version=1,
            position=self.position,
            machine=MachineSpec(),
            idle_after_s=None,
            metadata={},
            requested_at=NOW,
            changed_at=NOW,
            host_id=HostId("host-1") if running else None,
            vm_id=VmId("vm-1") if running else None,
            checkpoint_id=None,
            checkpointed_at=None,
            execs=[],
            suspends_at=None,
            retries_at=None,
            lost_since=None,
            problem=None,
        )
        await message.respond(msgspec.json.encode(view))

    async def _ask(self, message: Msg) -> None:
        type_ = message.subject.split(".")[3]
        parts = guest_messages.split(message.data)
        request: Any = msgspec.json.decode(parts.head, type=guest.OPERATIONS[type_].request)
        if self.state != "running" or request.incarnation != self.incarnation:
            answer: Answer = Refusal(code=guest.NOT_HERE, message="not here", advice="look")
        else:
            self.asked.append((type_, request, parts.body))
            answer = self.on_request(request, parts.body)
        if isinstance(answer, Refusal):
            await message.respond(msgspec.json.encode(Reply(refusal=answer)))
        elif answer is not None:
            await message.respond(guest_messages.encode(*answer))
