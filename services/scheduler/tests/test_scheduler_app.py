"""The scheduler as a process: what it says when its settings are wrong."""

import pytest

from torpor_scheduler.app import main
from torpor_scheduler.settings import SchedulerSettings


def test_wrong_settings_are_named_and_end_the_process_for_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORPOR_SCHEDULER_EXECS_MAX", "none")
    assert main() == 78
    assert "execs_max" in capsys.readouterr().err


def test_settings_become_the_rules_of_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORPOR_SCHEDULER_VCPUS_MAX", "2")
    monkeypatch.setenv("TORPOR_SCHEDULER_START_TIMEOUT_S", "7.5")
    rules = SchedulerSettings().rules()
    assert (rules.limits.vcpus_max, rules.start_timeout_s) == (2, 7.5)
