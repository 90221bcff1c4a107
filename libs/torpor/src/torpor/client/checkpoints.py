"""Checkpoints as the SDK shows them: pages of them, one of them, and what reading one whole shows."""

from collections.abc import AsyncGenerator
from typing import Final

from torpor.client.connection import Connection
from torpor_contracts.checkpoint import CheckpointsAnswer, CheckpointVerification, CheckpointView

PAGE_MAX: Final = 200
VERIFY_TIMEOUT_S: Final = 600.0


class Checkpoints:
    """The checkpoints of the tenant's sessions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self, session_id: str = "-", *, at_least: int = 0) -> AsyncGenerator[CheckpointView, None]:
        """Checkpoints of one session, or of all, in the order of their ids, page by page."""
        after: str | None = None
        while True:
            page: CheckpointsAnswer = await self._connection.query(
                "snapshot-store", "checkpoints", session_id, {"after": after, "limit": PAGE_MAX, "at_least": at_least}
            )
            for view in page.checkpoints:
                yield view
            if page.next is None:
                return
            after = page.next

    async def get(self, checkpoint_id: str, *, at_least: int = 0) -> CheckpointView:
        """One checkpoint; refused when there is none."""
        view: CheckpointView = await self._connection.query(
            "snapshot-store", "checkpoint", checkpoint_id, {"at_least": at_least}
        )
        return view

    async def verify(self, checkpoint_id: str, *, timeout_s: float = VERIFY_TIMEOUT_S) -> CheckpointVerification:
        """Have every chunk of a checkpoint read and compared; refused when it is freed, or there is none."""
        found: CheckpointVerification = await self._connection.query(
            "snapshot-store", "verify-checkpoint", checkpoint_id, timeout_s=timeout_s
        )
        return found
