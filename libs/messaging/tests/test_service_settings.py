import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from torpor_contracts.errors import Rejected
from torpor_messaging import logs
from torpor_messaging.nats_config import ServerSettings, render_users, write_configuration, write_users
from torpor_messaging.nats_errors import check_version
from torpor_messaging.nats_keys import ensure_key, public_key
from torpor_messaging.permissions import SERVICES, of_operator, of_service, of_tenant
from torpor_messaging.settings import ServiceSettings
from torpor_messaging.system import SystemIds


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORPOR_NATS_URL", "nats://a:4222, nats://b:4222")
    monkeypatch.setenv("TORPOR_LOG_DSN", "sqlite:////data/log.db")
    monkeypatch.setenv("TORPOR_VIEWS_DSN", "sqlite:////data/views.db")
    monkeypatch.setenv("TORPOR_DIE_WITH_PARENT", "1")
    told = ServiceSettings()  # type: ignore[call-arg]  # from the environment
    assert told.nats_url == "nats://a:4222, nats://b:4222"
    assert told.die_with_parent
    assert told.nkey_seed_file is None


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TORPOR_NATS_URL", "http://a", "nats://host:port"),
        ("TORPOR_NATS_URL", "nats://user:secret@a:4222", "seed file"),
        ("TORPOR_LOG_LEVEL", "loud", "info"),
        ("TORPOR_DRAIN_S", "0", "greater than 0"),
    ],
)
def test_wrong_settings_are_refused_in_words(monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str) -> None:
    monkeypatch.setenv("TORPOR_LOG_DSN", "sqlite:////data/log.db")
    monkeypatch.setenv("TORPOR_VIEWS_DSN", "sqlite:////data/views.db")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=says):
        ServiceSettings()  # type: ignore[call-arg]  # from the environment


def line(message: str, *arguments: object) -> str:
    record = logging.LogRecord("torpor.test", logging.WARNING, "f.py", 1, message, arguments, None)
    return logs.LineFormatter("scheduler").format(record)


def test_a_record_is_one_line() -> None:
    written = line('it said "%s"', "a\nb")
    assert "\n" not in written
    assert written.endswith('level=warning service=scheduler logger=torpor.test message="it said \\"a\\nb\\""')


def test_no_secret_is_written(tmp_path: Path) -> None:
    ensure_key(tmp_path / "a.nk")
    seed = (tmp_path / "a.nk").read_text().strip()
    written = line("connecting to postgresql://torpor:swordfish@db/torpor with %s", seed)
    assert seed not in written
    assert "swordfish" not in written
    assert "@db/torpor" in written


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first = ensure_key(tmp_path / "a.nk")
    assert first.startswith("U")
    assert ensure_key(tmp_path / "a.nk") == public_key(tmp_path / "a.nk") == first
    assert (tmp_path / "a.nk").stat().st_mode & 0o777 == 0o600
    assert ensure_key(tmp_path / "b.nk") != first


@pytest.mark.parametrize("tenants", [["system"], ["a.b"], ["A"], ["*"], [""], ["a", "a"]])
def test_no_tenant_can_be_called_what_would_open_the_fence(tenants: list[str], tmp_path: Path) -> None:
    with pytest.raises(Rejected) as refused:
        write_users(tmp_path, tenants=tenants)
    assert refused.value.code == "illegal-tenant"


def test_a_configuration_names_every_user_and_keeps_keys(tmp_path: Path) -> None:
    settings = ServerSettings(store_dir=tmp_path / "store", port=4333)
    first = write_configuration(tmp_path, settings, tenants=["default", "acme"])
    expected = {"admin", "operator", *SERVICES, "tenant-default", "tenant-acme"}
    assert set(first.seeds) == expected
    users = first.users.read_text()
    assert all(public_key(seed) in users for seed in first.seeds.values())
    assert not [seed for seed in first.seeds.values() if seed.read_text().strip() in users]
    assert write_configuration(tmp_path, settings, tenants=["default", "acme"]).users.read_text() == users
    assert (tmp_path / "users.conf").stat().st_mode & 0o777 == 0o600


def test_a_tenants_account_holds_nothing_of_another() -> None:
    keys = {name: f"U{name}" for name in ("admin", "operator", *SERVICES, "tenant-a", "tenant-b")}
    text = render_users(keys, ["a", "b"])
    account_b = text[text.index('"TENANT_b" {') :]
    assert ".a." not in account_b
    assert "evt.b.>" in account_b


@pytest.mark.parametrize("service", SERVICES)
def test_no_grant_is_wide_open(service: str) -> None:
    for grants in (of_service(service), of_operator(), of_tenant("default", alone=True)):
        for subject in (*grants.publish, *grants.subscribe):
            assert subject not in {">", "*", "$JS.API.>", "$JS.>", "$SYS.>", "cmd.>", "_INBOX.*"}
    assert not [subject for subject in of_service(service).publish if subject.startswith("evt.")]


@pytest.mark.parametrize("version", ["", "v", "2", "2.11.14", "1.99.0", "nonsense"])
def test_an_old_server_is_refused(version: str) -> None:
    with pytest.raises(Rejected) as refused:
        check_version(version)
    assert refused.value.code == "nats-server-version"


def test_identifiers_are_tokens_rise_and_say_version_seven() -> None:
    ids = SystemIds()
    made = [ids.new("ses") for _ in range(10_000)]
    assert made == sorted(set(made))
    for text in made[::1000]:
        digits = text.removeprefix("ses-")
        assert len(digits) == 32
        assert digits[12] == "7"
        assert digits[16] in "89ab"
    assert all(0.0 <= ids.random() < 1.0 for _ in range(100))
