"""A crash at each fault point: the first, the middle and the last pass of each by each program."""

from torpor_simulation.points import crash_at, fault_points, one_of_each

DRIVER_CALLS = {
    "driver.start", "driver.started", "driver.exec", "driver.exec-ended", "driver.checkpoint", "driver.checkpointed",
    "driver.destroy", "driver.destroyed", "driver.freeze", "driver.frozen",
}  # fmt: skip
OTHERS = {
    "log.append", "log.appended", "relay.publish", "relay.published", "ack", "acked", "bus.publish _INBOX",
    "bus.store cmd", "bus.stored cmd", "bus.store out", "bus.store timer", "chunks.put", "chunks.fetch",
    "views.commit scheduler-views", "views.committed meters",
}  # fmt: skip


def test_the_story_passes_every_kind_of_point_and_breaks_no_law() -> None:
    clean, points = fault_points()
    assert not clean.violations
    names = {point.name for point in points}
    assert names >= DRIVER_CALLS | OTHERS


def test_a_crash_anywhere_breaks_no_law() -> None:
    _, points = fault_points()
    broken = {
        f"{point.number} {point.program} {point.name}": [str(violation) for violation in outcome.violations]
        for point in one_of_each(points)
        if (outcome := crash_at(point)).violations
    }
    assert not broken
