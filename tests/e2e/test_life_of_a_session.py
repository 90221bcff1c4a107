"""What a user does with a session, by the installed command."""

import json
import subprocess
from typing import Any

import pytest

from tests.support.embedded import TORPOR, EmbeddedWhole, clean_environment, torpor

pytestmark = pytest.mark.e2e
SLOW = "echo 1; sleep 1; echo 2; sleep 0.2; echo 3"


@pytest.fixture(scope="module")
def session(whole: EmbeddedWhole) -> str:
    """A session that the tests of this module share; each leaves it running."""
    made: dict[str, Any] = whole.call("session", "create", "--metadata", "owner=me")
    assert made["state"] == "running"
    assert made["metadata"] == {"owner": "me"}
    assert made["receipt"]["stream"] == made["session_id"]
    return str(made["session_id"])


def test_a_session_is_an_object_with_its_id(whole: EmbeddedWhole, session: str) -> None:
    assert whole.call("session", "show", session)["session_id"] == session
    listed = whole.call("session", "list")
    assert session in [view["session_id"] for view in listed]


def test_exec_gives_output_and_the_programs_exit_code(whole: EmbeddedWhole, session: str) -> None:
    hi = torpor(whole.data.root, "session", "exec", session, "--", "echo", "hi", "--json")
    assert (hi.returncode, hi.stdout, hi.stderr) == (0, "hi --json\n", "")
    five = torpor(whole.data.root, "session", "exec", session, "--", "exit", "5")
    assert five.returncode == 5
    result = whole.call("session", "exec", session, "--", "echo", "two words")
    assert (result["stdout"], result["outcome"], result["exit_code"]) == ("two words\n", "exited", 0)


def test_exec_streams_while_the_program_runs(whole: EmbeddedWhole, session: str) -> None:
    counting = subprocess.Popen(
        [TORPOR, "session", "exec", "--data-dir", whole.data.root, session, "--", "sh", "-c", SLOW],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert counting.stdout is not None
    first = counting.stdout.readline()
    assert first.strip() == "1"
    assert counting.poll() is None, "the first line came before the program's end"
    rest = counting.stdout.read()
    assert counting.wait(30) == 0
    assert rest.split() == ["2", "3"]
    counting.stdout.close()


def test_suspend_and_resume_keep_the_files(whole: EmbeddedWhole, session: str) -> None:
    whole.call("session", "exec", session, "--", "write", "/note", "remember")
    before = whole.call("session", "show", session)["incarnation"]
    asleep = whole.call("session", "suspend", session)
    assert (asleep["state"], asleep["vm_id"]) == ("suspended", None)
    awake = whole.call("session", "resume", session)
    assert (awake["state"], awake["incarnation"]) == ("running", before + 1)
    assert whole.call("session", "exec", session, "--", "cat", "/note")["stdout"].strip() == "remember"


def test_work_wakes_a_sleeping_session(whole: EmbeddedWhole, session: str) -> None:
    whole.call("session", "suspend", session)
    assert whole.call("session", "exec", session, "--", "cat", "/note")["stdout"].strip() == "remember"
    assert whole.call("session", "show", session)["state"] == "running"


def test_an_idle_session_falls_asleep_by_itself(whole: EmbeddedWhole) -> None:
    idle = whole.call("session", "create", "--idle-after-s", "0.5")["session_id"]
    follower = subprocess.Popen(
        [TORPOR, "events", "--follow", "--json", "--session", idle, "--data-dir", whole.data.root],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert follower.stdout is not None
    for line in follower.stdout:
        if json.loads(line)["type"] == "session-suspended.v1":
            break
    follower.terminate()
    follower.wait(10)
    follower.stdout.close()
    assert whole.call("session", "show", idle)["state"] == "suspended"


def test_the_same_command_id_answers_the_first_receipt(whole: EmbeddedWhole) -> None:
    first = whole.call("session", "create", "--command-id", "order-7")
    again = whole.call("session", "create", "--command-id", "order-7")
    assert again["receipt"] == first["receipt"]
    assert again["session_id"] == first["session_id"]
    error = whole.refused("session", "create", "--command-id", "order-7", "--vcpus", "2")
    assert (error["code"], error["exit_code"]) == ("command-id-reused", 1)


def test_terminate_ends_it_and_keeps_its_history(whole: EmbeddedWhole) -> None:
    brief = whole.call("session", "create")["session_id"]
    assert whole.call("session", "terminate", brief, "--reason", "done")["state"] == "terminated"
    types = [event["type"] for event in whole.call("events", "--session", brief)]
    assert types[0] == "session-requested.v1"
    assert types[-1] == "session-terminated.v1"
    assert whole.refused("session", "exec", brief, "--", "echo", "hi")["code"] == "session-terminated"


def test_events_stand_in_order_without_gaps_and_start_where_asked(whole: EmbeddedWhole, session: str) -> None:
    events = whole.call("events")
    positions = [event["position"] for event in events]
    assert positions == sorted(set(positions))
    middle = positions[len(positions) // 2]
    later = [event["position"] for event in whole.call("events", "--from", str(middle))]
    assert later[0] == middle
    assert session in {event["stream"] for event in events}
    plain = torpor(whole.data.root, "events")
    assert "session-started.v1" in plain.stdout


def test_usage_and_resources_name_the_session(whole: EmbeddedWhole, session: str) -> None:
    usage = whole.call("usage", session)
    lines = [line for page in usage for line in page["lines"]]
    assert {line["kind"] for line in lines} == {"running", "stored"}
    held = [entry for page in whole.call("resources", session) for entry in page["resources"]]
    assert {entry["session_id"] for entry in held} == {session}
    for people in (("usage",), ("resources",), ("session", "list"), ("host", "list"), ("status",)):
        shown = torpor(whole.data.root, *people)
        assert shown.returncode == 0, shown.stderr


def test_a_host_can_be_drained_and_taken_back(whole: EmbeddedWhole) -> None:
    [host] = whole.call("host", "list")
    assert (host["state"], host["driver"], host["draining"]) == ("up", "simulated", False)
    sleeper = whole.call("session", "create")["session_id"]
    whole.call("host", "drain", host["host_id"], "--reason", "new kernel")
    error = whole.refused("host", "drain", host["host_id"])
    assert error["code"] == "already-draining"
    waiting = whole.refused("session", "create", "--timeout-s", "2")
    assert (waiting["code"], waiting["exit_code"]) == ("not-yet", 3)
    whole.call("host", "undrain", host["host_id"])
    assert whole.call("session", "exec", sleeper, "--", "echo", "on")["stdout"] == "on\n"


def test_status_tells_what_runs_and_that_it_answers(whole: EmbeddedWhole) -> None:
    status = whole.call("status")
    assert status["ready"]
    assert {process["name"]: process["state"] for process in status["processes"]} == dict.fromkeys(
        ["nats-server", "scheduler", "vm-host", "snapshot-store", "billing", "reaper", "log-relay"], "running"
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("session", "show", "ses-nowhere"), "session-not-found"),
        (("session", "exec", "ses-nowhere", "--", "echo"), "session-not-found"),
        (("session", "suspend", "Ses.*"), "illegal-id"),
        (("session", "create", "--vcpus", "0"), "illegal-machine"),
        (("session", "create", "--memory-mib", "1000000000"), "illegal-machine"),
        (("session", "create", "--metadata", "no-equals-sign"), "malformed-metadata"),
        (("session", "create", "--idle-after-s", "-1"), "illegal-idle-time"),
        (("session", "exec", "ses-nowhere"), "no-program"),
        (("host", "drain", "host-nowhere"), "host-not-found"),
        (("audit", "verify", "/nowhere"), "system"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_code(
    whole: EmbeddedWhole, arguments: tuple[str, ...], code: str
) -> None:
    error = whole.refused(*arguments)
    assert (error["code"], error["exit_code"]) == (code, 1)
    assert error["message"]
    assert error["advice"]


def test_a_stale_incarnation_and_a_too_large_payload_are_refused(whole: EmbeddedWhole, session: str) -> None:
    assert whole.refused("session", "suspend", session, "--incarnation", "99")["code"] == "stale-incarnation"
    words = ["x" * 100_000] * 6
    large = torpor(whole.data.root, "session", "exec", session, "--json", "--", "echo", *words)
    assert json.loads(large.stdout)["error"]["code"] in {"payload-too-large", "program-too-large"}


def test_a_reader_that_has_seen_enough_is_no_error(whole: EmbeddedWhole) -> None:
    shown = subprocess.run(
        f"{TORPOR} events --json --data-dir {whole.data.root} | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(),
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads(shown.stdout)["position"] >= 1


def test_a_second_up_on_the_same_directory_is_refused(whole: EmbeddedWhole) -> None:
    second = torpor(whole.data.root, "up", "--driver", "simulated")
    assert second.returncode == 1
    assert f"already runs on {whole.data.root} (pid {whole.run.supervisor.pid})" in second.stderr
    assert whole.call("status")["ready"]
