"""A subscription: notifications one by one for ever, woken by this process, polling for what others record."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from eventsourcing.persistence import ApplicationRecorder, Notification, Subscription

from torpor_eventlog.eventsourcing_module.datastore import Arrivals

POLL_S: Final = 0.1
SELECTED_MAX: Final = 500


class LogSubscription(Subscription[ApplicationRecorder]):
    """Reads ahead in batches, in the thread that iterates."""

    def __init__(
        self, recorder: ApplicationRecorder, arrived: Arrivals, gt: int | None = None, topics: Sequence[str] = ()
    ) -> None:
        super().__init__(recorder=recorder, gt=gt, topics=topics)
        self._arrived = arrived
        self._last = gt or 0
        self._ahead: deque[Notification] = deque()

    def stop(self) -> None:
        """Stop the iteration, also one that waits in another thread."""
        super().stop()
        self._arrived.notify()

    def __next__(self) -> Notification:
        """The next notification; waits for it."""
        while not self._has_been_stopped:
            if self._ahead:
                return self._ahead.popleft()
            seen = self._arrived.ticks()
            if not self._read_ahead():
                self._arrived.wait(seen, POLL_S)
        raise StopIteration

    def _read_ahead(self) -> bool:
        """Read on from where it stands; False when there is nothing new at all."""
        end = self._recorder.max_notification_id() or 0
        if end <= self._last:
            return False
        selected = self._recorder.select_notifications(
            start=self._last, limit=SELECTED_MAX, stop=end, topics=self._topics, inclusive_of_start=False
        )
        self._ahead.extend(selected)
        # With topics, what was passed over must not be looked through again.
        self._last = selected[-1].id if len(selected) == SELECTED_MAX else end
        return True
