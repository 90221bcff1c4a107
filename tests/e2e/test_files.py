"""Files of sessions by the installed command: whatever they are called, also of a session that sleeps."""

import base64
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.embedded import TORPOR, EmbeddedWhole, clean_environment, torpor

pytestmark = pytest.mark.e2e

ODD = (b"line\nbreak", b"\xff\xfe no text", b"-rf")


@pytest.fixture(scope="module")
def session_id(whole: EmbeddedWhole) -> str:
    return str(whole.call("session", "create")["session_id"])


def raw(whole: EmbeddedWhole, *arguments: str | bytes, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """The command with names that no text holds."""
    line: list[str | bytes] = [str(TORPOR), *arguments, "--data-dir", str(whole.data.root)]
    return subprocess.run(line, input=stdin, capture_output=True, timeout=60, check=False, env=clean_environment())


def test_a_file_goes_in_and_comes_out_as_it_was(whole: EmbeddedWhole, session_id: str, tmp_path: Path) -> None:
    content = os.urandom(1_000_000)
    local = tmp_path / "in.bin"
    local.write_bytes(content)
    local.chmod(0o640)
    put = whole.call("file", "put", str(local), f"{session_id}:/work/deep/")
    assert put == {"path": "/work/deep/in.bin", "size_bytes": 1_000_000}
    shown = whole.call("file", "stat", f"{session_id}:/work/deep/in.bin")
    assert (shown["kind"], shown["size_bytes"], shown["mode"]) == ("file", 1_000_000, "0640")
    whole.call("file", "get", f"{session_id}:/work/deep/in.bin", str(tmp_path / "out.bin"))
    assert (tmp_path / "out.bin").read_bytes() == content
    part = raw(whole, "file", "get", f"{session_id}:/work/deep/in.bin", "-", "--offset", "999_990", "--length", "5")
    assert part.stdout == content[999_990:999_995]
    assert raw(whole, "file", "put", "-", f"{session_id}:/work/piped", stdin=b"from a pipe").returncode == 0
    assert whole.call("session", "exec", session_id, "--", "cat", "/work/piped")["stdout"] == "from a pipe"


def test_a_pipe_is_written_to_and_not_replaced(whole: EmbeddedWhole, session_id: str, tmp_path: Path) -> None:
    assert raw(whole, "file", "put", "-", f"{session_id}:/work/poured", stdin=b"poured").returncode == 0
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        whole.call("file", "get", f"{session_id}:/work/poured", str(tmp_path / "pipe"))
        assert reader.communicate(timeout=20)[0] == b"poured"
    assert (tmp_path / "pipe").is_fifo()


def test_names_may_be_whatever_linux_allows(whole: EmbeddedWhole, session_id: str, tmp_path: Path) -> None:
    for name in ODD:
        there = session_id.encode() + b":/odd/" + name
        assert raw(whole, "file", "put", "-", there, stdin=name).returncode == 0
        local = os.fsencode(tmp_path) + b"/" + name
        assert raw(whole, "file", "get", there, local).returncode == 0
        with open(local, "rb") as file:  # noqa: PTH123  (a bytes path)
            assert file.read() == name
    listed = [json.loads(line) for line in raw(whole, "file", "ls", f"{session_id}:/odd", "--json").stdout.splitlines()]
    assert [base64.b64decode(one["name_base64"]) for one in listed] == sorted(ODD)
    lines = torpor(whole.data.root, "file", "ls", f"{session_id}:/odd").stdout.splitlines()
    assert len(lines) == len(ODD), "one line each, whatever the name"
    assert r"$'line\x0abreak'" in lines
    assert len(torpor(whole.data.root, "file", "ls", "-l", f"{session_id}:/odd").stdout.splitlines()) == len(ODD)


def test_directories_are_made_moved_and_removed(whole: EmbeddedWhole, session_id: str) -> None:
    whole.call("file", "mkdir", f"{session_id}:/made/below", "--mode", "0700")
    assert whole.call("file", "stat", f"{session_id}:/made/below")["mode"] == "0700"
    whole.call("file", "mv", f"{session_id}:/made/below", f"{session_id}:/made/moved")
    assert whole.call("file", "ls", f"{session_id}:/made")["name"] == "moved"
    assert whole.refused("file", "rm", f"{session_id}:/made")["code"] == "not-empty"
    whole.call("file", "rm", "-r", f"{session_id}:/made")
    refused = whole.refused("file", "stat", f"{session_id}:/made")
    assert (refused["code"], refused["exit_code"]) == ("not-found", 1)


def test_a_sleeping_session_is_woken_for_its_files(whole: EmbeddedWhole) -> None:
    session_id = str(whole.call("session", "create")["session_id"])
    whole.call("session", "exec", session_id, "--", "write", "/kept", "here")
    whole.call("session", "suspend", session_id)
    assert raw(whole, "file", "get", f"{session_id}:/kept", "-").stdout == b"here\n"
    assert whole.call("session", "show", session_id)["incarnation"] == 2
    whole.call("session", "terminate", session_id)
    assert whole.refused("file", "get", f"{session_id}:/kept", "-")["code"] == "session-terminated"


def test_what_cannot_be_is_refused_with_advice(whole: EmbeddedWhole, session_id: str, tmp_path: Path) -> None:
    assert whole.refused("file", "ls", session_id)["code"] == "illegal-path"
    assert whole.refused("file", "ls", f"{session_id}:work")["code"] == "illegal-path"
    assert whole.refused("file", "ls", f"{session_id}:/nowhere")["code"] == "not-found"
    assert whole.refused("file", "mv", f"{session_id}:/a", "ses-other:/a")["code"] == "illegal-move"
    assert whole.refused("file", "put", str(tmp_path / "none"), f"{session_id}:/a")["code"] == "system"
    assert whole.refused("file", "mkdir", f"{session_id}:/a", "--mode", "rwx")["code"] == "illegal-mode"
    assert whole.refused("file", "get", "ses-nobody:/a")["code"] == "session-not-found"
    local = tmp_path / "kept"
    local.write_text("as it was")
    assert whole.refused("file", "get", f"{session_id}:/nowhere", str(local))["code"] == "not-found"
    assert local.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [local], "nothing half is left behind"


def test_a_directory_is_watched(whole: EmbeddedWhole, session_id: str) -> None:
    whole.call("file", "mkdir", f"{session_id}:/watched")
    line = [str(TORPOR), "file", "watch", f"{session_id}:/watched", "--json", "--data-dir", str(whole.data.root)]
    watching = subprocess.Popen(line, stdout=subprocess.PIPE, env=clean_environment())
    assert watching.stdout is not None
    try:
        os.set_blocking(watching.stdout.fileno(), False)
        seen = b""
        for number in range(50):
            # Until the watch has begun nothing is seen of this.
            whole.call("session", "exec", session_id, "--", "write", f"/watched/note-{number}", "x")
            seen += watching.stdout.read() or b""
            if b"note-" in seen:
                break
        assert json.loads(seen.splitlines()[0])["kind"] in {"made", "written"}
    finally:
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130
        watching.stdout.close()
