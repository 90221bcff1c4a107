"""The stand-in for Firecracker is as strict as the interface's definition and its documented order."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator

import tests.support.firecracker
from tests.support.firecracker import rules
from tests.support.firecracker.interface import Interface
from tests.support.firecracker.rules import Refused, Rules

BODIES: dict[str, dict[str, Any]] = {
    "/machine-config": {"vcpu_count": 1, "mem_size_mib": 256, "track_dirty_pages": True},
    "/boot-source": {"kernel_image_path": "kernel", "initrd_path": "initrd", "boot_args": "quiet"},
    "/drives/root": {
        "drive_id": "root",
        "path_on_host": "disk",
        "is_root_device": True,
        "is_read_only": False,
        "rate_limiter": {"bandwidth": {"size": 1, "refill_time": 100, "one_time_burst": 2}},
    },
    "/vsock": {"guest_cid": 3, "uds_path": "v.sock"},
    "/entropy": {},
    "/logger": {"log_path": "log", "level": "Warning"},
    "/metrics": {"metrics_path": "metrics"},
    "/actions": {"action_type": "InstanceStart"},
    "/snapshot/create": {"snapshot_path": "state", "mem_file_path": "memory", "snapshot_type": "Diff"},
    "/snapshot/load": {
        "snapshot_path": "state",
        "mem_backend": {"backend_type": "Uffd", "backend_path": "faults.sock"},
        "track_dirty_pages": True,
        "resume_vm": False,
    },
}
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5000), st.text("abDiffUlN", max_size=6), st.just({})
)


@cache
def definition() -> dict[str, Any]:
    text = (Path(tests.support.firecracker.__file__).parent / "interface.yaml").read_bytes()
    loaded: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return loaded


def strict(schema: Any) -> Any:
    """The schema with every unknown field refused, as Firecracker does."""
    if isinstance(schema, dict):
        made = {key: strict(value) for key, value in schema.items() if key not in {"format", "example"}}
        if isinstance(made.get("properties"), dict) and made.get("type") == "object":
            made.setdefault("additionalProperties", False)
        return made
    return [strict(one) for one in schema] if isinstance(schema, list) else schema


@cache
def validator(path: str) -> Draft4Validator:
    _, _, schema = Interface(definition()).find("PUT", path)
    return Draft4Validator({**strict(schema), "definitions": strict(definition()["definitions"])})


def places(body: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(body, dict):
        return [at]
    return [at, *(place for key, value in body.items() for place in places(value, (*at, key)))]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), path=st.sampled_from(sorted(BODIES)), value=VALUES, kind=st.sampled_from(["set", "drop", "add"]))
def test_a_body_is_taken_when_its_definition_allows_it(data: st.DataObject, path: str, value: Any, kind: str) -> None:
    body = copy.deepcopy(BODIES[path])
    inner = [place for place in places(body) if place]
    if inner and kind != "add":
        *way, last = data.draw(st.sampled_from(inner))
        folder = body
        for step in way:
            folder = folder[step]
        folder[last] = value
        if kind == "drop":
            del folder[last]
    else:
        body[data.draw(st.sampled_from(["mem_file_path", "snapshot_type", "unknown"]))] = value
    interface = Interface(definition())
    _, _, schema = interface.find("PUT", path)
    assert schema is not None
    try:
        interface.check(body, schema)
        taken = True
    except ValueError:
        taken = False
    assert taken == validator(path).is_valid(body)


@pytest.mark.parametrize(
    "request_line", ["PUT /", "GET /actions", "DELETE /vm", "PUT /drives", "PATCH /vsock", "PUT /x"]
)
def test_requests_that_are_not_defined_are_refused(request_line: str) -> None:
    method, path = request_line.split()
    with pytest.raises(ValueError, match="Invalid request"):
        Interface(definition()).find(method, path)


def ask(order: Rules, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    defined, identity, _ = Interface(definition()).find(method, path)
    order.allow(method, defined, BODIES.get(path, {}) if body is None else body, identity)


def started() -> Rules:
    order = Rules()
    for path in ("/machine-config", "/boot-source", "/drives/root", "/actions"):
        ask(order, "PUT", path)
    order.started = True
    return order


@pytest.mark.parametrize(
    "path", ["/machine-config", "/boot-source", "/drives/root", "/vsock", "/entropy", "/logger", "/snapshot/load"]
)
def test_what_is_configured_before_the_start_is_refused_after_it(path: str) -> None:
    with pytest.raises(Refused, match=rules.POST_BOOT):
        ask(started(), "PUT", path)


@pytest.mark.parametrize("request_line", ["PATCH /vm", "PUT /snapshot/create", "PATCH /drives/root"])
def test_what_needs_a_machine_is_refused_before_its_start(request_line: str) -> None:
    method, path = request_line.split()
    with pytest.raises(Refused, match=rules.PRE_BOOT):
        ask(Rules(), method, path, BODIES.get(path, {"state": "Paused"}))


@pytest.mark.parametrize("path", ["/machine-config", "/boot-source", "/drives/root", "/vsock", "/entropy"])
def test_a_snapshot_is_loaded_into_a_fresh_process_only(path: str) -> None:
    order = Rules()
    for harmless in ("/logger", "/metrics"):
        ask(order, "PUT", harmless)
    ask(order, "PUT", path)
    with pytest.raises(Refused, match=rules.NOT_FRESH):
        ask(order, "PUT", "/snapshot/load")


def test_a_snapshot_is_made_of_a_machine_that_stands_still() -> None:
    order = started()
    with pytest.raises(Refused, match=rules.NOT_PAUSED):
        ask(order, "PUT", "/snapshot/create")
    order.paused = True
    ask(order, "PUT", "/snapshot/create")


def test_a_machine_needs_a_kernel_and_has_one_root_device() -> None:
    order = Rules()
    with pytest.raises(Refused, match=rules.NO_KERNEL):
        ask(order, "PUT", "/actions")
    ask(order, "PUT", "/drives/root")
    with pytest.raises(Refused, match="A root block device already exists"):
        ask(order, "PUT", "/drives/second", {**BODIES["/drives/root"], "drive_id": "second"})
    with pytest.raises(Refused, match="does not match the id from the body"):
        ask(order, "PUT", "/drives/other", BODIES["/drives/root"])


def test_memory_comes_from_one_place() -> None:
    both = {**BODIES["/snapshot/load"], "mem_file_path": "memory"}
    neither = {"snapshot_path": "state"}
    for body in (both, neither):
        with pytest.raises(Refused, match="exactly one"):
            ask(Rules(), "PUT", "/snapshot/load", body)
