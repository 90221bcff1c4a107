"""The installed command without a whole: help, usage, errors, benchmarks, completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TORPOR = Path(sys.executable).parent / "torpor"
BENCHES = """
from torpor.bench.figures import figure
from torpor.errors import CannotStart

async def good(say):
    say("halfway")
    return figure("toy.good", 10.0, "events/s", ("at least", 0.5), of="ratio", floor=5.0, samples=[1.0, 2.0, 3.0])

async def bad(say):
    return [figure("toy.bad", 10.0, "ms", ("at most", 5.0))]

async def lacking(say):
    raise CannotStart("no-postgres", "there is no PostgreSQL", "install it")

BENCHES = {"toy": [good], "slow": [good, bad], "needy": [good, lacking]}
"""


def torpor(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORPOR_", "XDG_"))}
    return subprocess.run(
        [TORPOR, *arguments], capture_output=True, text=True, timeout=60, check=False, env={**kept, **env}
    )


@pytest.fixture
def benches(tmp_path: Path) -> str:
    (tmp_path / "toy_bench.py").write_text(BENCHES)
    return str(tmp_path)


def test_help_names_every_command_and_the_exit_codes() -> None:
    shown = torpor("--help")
    assert shown.returncode == 0
    words = ("up", "down", "status", "session", "checkpoint", "events", "audit", "host", "doctor", "bench")
    for word in (*words, "3 unavailable"):
        assert word in shown.stdout


def test_help_needs_neither_nats_nor_the_tables() -> None:
    code = "import sys; from torpor.cli import run; run(['--help']); print(sorted(m for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert not [heavy for heavy in ("'nats'", "'pydantic'", "'faststream'", "'asyncpg'") if heavy in loaded]


@pytest.mark.parametrize(
    "command",
    ["up", "down", "status", "events", "usage", "resources", "doctor", "bench", "completion", "version"]
    + [f"session {name}" for name in ("create", "list", "show", "exec", "output", "suspend", "resume", "terminate")]
    + [f"session {name}" for name in ("checkpoint", "fork", "rollback", "ps", "attach", "logs", "signal")]
    + [f"file {name}" for name in ("get", "put", "ls", "stat", "mkdir", "mv", "rm", "watch")]
    + [f"checkpoint {name}" for name in ("create", "list", "tree", "verify")]
    + [f"audit {name}" for name in ("verify", "export", "rebuild", "replay")]
    + [f"image {name}" for name in ("build", "list")]
    + [f"host {name}" for name in ("list", "drain", "undrain")],
)
def test_every_command_takes_json_and_a_data_directory(command: str) -> None:
    shown = torpor(*command.split(), "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--json" in shown.stdout
    assert "--data-dir" in shown.stdout


@pytest.mark.parametrize(
    "line",
    [["sesion", "list"], ["session", "show"], ["events", "--from", "first"], ["up", "--driver", "x"], ["--nope"]],
)
def test_wrong_usage_is_said_in_two_lines_with_code_2(line: list[str]) -> None:
    done = torpor(*line)
    assert done.returncode == 2
    assert done.stderr.startswith("torpor: ")
    assert len(done.stderr.splitlines()) == 2
    assert "--help" in done.stderr


def test_with_json_an_error_is_an_object(tmp_path: Path) -> None:
    done = torpor("session", "list", "--json", "--data-dir", str(tmp_path))
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "unavailable"
    assert "torpor up" in error["advice"]
    assert done.stderr == ""


def test_without_json_an_error_is_two_lines_and_no_traceback(tmp_path: Path) -> None:
    done = torpor("events", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert [line[:2] for line in done.stderr.splitlines()] == ["to", "  "]


def test_the_data_directory_comes_from_the_option_the_environment_or_the_state_directory(tmp_path: Path) -> None:
    said = [
        torpor("status", "--data-dir", str(tmp_path / "a"), TORPOR_DATA_DIR=str(tmp_path / "b")).stderr,
        torpor("status", TORPOR_DATA_DIR=str(tmp_path / "b"), XDG_STATE_HOME=str(tmp_path / "c")).stderr,
        torpor("status", XDG_STATE_HOME=str(tmp_path / "c")).stderr,
        torpor("status", XDG_STATE_HOME="relative", HOME=str(tmp_path / "d")).stderr,
    ]
    wanted = [tmp_path / "a", tmp_path / "b", tmp_path / "c/torpor", tmp_path / "d/.local/state/torpor"]
    assert [str(path) in text for path, text in zip(wanted, said, strict=True)] == [True] * 4


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(shell: str) -> None:
    script = torpor("completion", shell)
    assert script.returncode == 0
    assert "terminate" in script.stdout


def test_the_bash_completion_is_a_script_that_bash_takes(tmp_path: Path) -> None:
    script = tmp_path / "torpor.bash"
    script.write_text(torpor("completion", "bash").stdout)
    subprocess.run(["bash", "-n", script], check=True, timeout=20)


def test_a_bench_prints_progress_and_a_table(benches: str) -> None:
    done = torpor("bench", "toy", TORPOR_BENCH_DIR=benches)
    assert done.returncode == 0
    assert "halfway" in done.stderr
    assert "toy.good" in done.stdout


def test_a_bench_in_json_has_the_machine_and_every_field(benches: str) -> None:
    done = torpor("bench", "slow", "--json", TORPOR_BENCH_DIR=benches)
    assert done.returncode == 1, "a goal was missed"
    answer = json.loads(done.stdout)
    assert answer["machine"]["cpus"] >= 1
    good, bad = answer["figures"]
    assert {**good, "p99": 3.0} == {
        "name": "toy.good", "value": 10.0, "unit": "events/s", "floor": 5.0, "ratio": 2.0,
        "goal": "at least 0.5 x the floor", "ok": True, "n": 3, "p50": 2.0, "p99": 3.0,
    }  # fmt: skip
    assert (bad["ok"], bad["floor"], bad["ratio"]) == (False, None, None)


def test_what_a_machine_lacks_is_left_out_and_said(benches: str) -> None:
    done = torpor("bench", "needy", "--json", TORPOR_BENCH_DIR=benches)
    answer = json.loads(done.stdout)
    assert [figure["name"] for figure in answer["figures"]] == ["toy.good"]
    assert answer["left_out"][0]["code"] == "no-postgres"


def test_unknown_benches_and_none_at_all_are_refused(benches: str, tmp_path: Path) -> None:
    unknown = torpor("bench", "nothing", "--json", TORPOR_BENCH_DIR=benches)
    assert json.loads(unknown.stdout)["error"]["advice"] == "there are: needy, slow, toy, all"
    (tmp_path / "empty").mkdir()
    none = torpor("bench", "toy", "--json", TORPOR_BENCH_DIR=str(tmp_path / "empty"))
    assert (none.returncode, json.loads(none.stdout)["error"]["code"]) == (1, "no-benches")


def test_the_doctor_looks_without_making_anything(tmp_path: Path) -> None:
    done = torpor("doctor", "--json", "--data-dir", str(tmp_path / "data"))
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0)
    names = [finding["name"] for finding in answer["findings"]]
    assert {"python", "nats-server", "disk space", "data directory", "driver simulated"} <= set(names)
    assert not (tmp_path / "data").exists()


def test_the_doctor_says_what_keeps_the_whole_from_starting(tmp_path: Path) -> None:
    done = torpor(
        "doctor", "--json", TORPOR_NATS_SERVER="/nowhere", TORPOR_LOG_DSN="postgresql://nobody@127.0.0.1:1/none",
        TORPOR_DATA_DIR=str(tmp_path),
    )  # fmt: skip
    broken = {f["name"]: f["advice"] for f in json.loads(done.stdout)["findings"] if f["state"] == "broken"}
    assert done.returncode == 1
    assert set(broken) == {"nats-server", "postgresql"}
    assert all(broken.values())


@pytest.mark.parametrize("arguments", [["version"], ["version", "--json"]])
def test_an_output_that_cannot_be_written_is_said_without_a_traceback(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([TORPOR, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_closed_output_is_no_reason_to_fail(stream: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" version {stream}>&-', TORPOR], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
