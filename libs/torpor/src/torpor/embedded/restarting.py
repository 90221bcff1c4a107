"""When a process that ended by itself is started again: a recorded rule with an end; pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartRule:
    """Back off from `first_s`, doubling up to `longest_s`; give up after `attempts_max` ends in a row.

    A process that ran for `steady_s` is sound again: its count starts anew.
    """

    first_s: float = 0.2
    longest_s: float = 10.0
    attempts_max: int = 12
    steady_s: float = 30.0


@dataclass(frozen=True)
class RestartState:
    """How often in a row a process ended, and when it may start again (`None`: never, it is given up)."""

    failures: int = 0
    due_at_s: float | None = 0.0

    def after_end(self, rule: RestartRule, ran_s: float, now_s: float) -> "RestartState":
        """The state after one more end at `now_s` of a process that ran for `ran_s`."""
        failures = 1 if ran_s >= rule.steady_s else self.failures + 1
        if failures > rule.attempts_max:
            return RestartState(failures, None)
        pause_s = min(rule.first_s * 2.0 ** (failures - 1), rule.longest_s)
        return RestartState(failures, now_s + pause_s)
