"""The published schemas: as the code says, legal in their own language, and in agreement with what decodes messages."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import jsonschema
import msgspec
import pytest
import yaml
from msgspec import inspect

from schemas.generator import __main__ as generator
from schemas.generator import asyncapi, json_schemas
from schemas.generator.channels import channels, publishers
from torpor_contracts.host import HostHeartbeat
from torpor_contracts.registry import COMMANDS, EVENTS, QUERIES
from torpor_contracts.replies import Receipt, Refusal, Reply
from torpor_messaging import subjects
from torpor_messaging.edge import Health

ROOM: Final = Path(__file__).resolve().parents[2] / "schemas"
OFFICIAL: Final = Path(__file__).parent / "asyncapi" / "asyncapi-3.0.0.json"

COMMAND_TYPES: Final = {
    json_schemas.command_path(service, tag): kind for service, found in COMMANDS.items() for tag, kind in found.items()
}
EVENT_TYPES: Final = {json_schemas.event_path(tag): kind for tag, kind in EVENTS.items()}
OTHER_TYPES: Final = {
    json_schemas.REPLY_PATH: Reply,
    json_schemas.REFUSAL_PATH: Refusal,
    json_schemas.HEARTBEAT_PATH: HostHeartbeat,
    json_schemas.HEALTH_PATH: Health,
    **{
        json_schemas.query_path(service, name, part): getattr(shape, part)
        for service, found in QUERIES.items()
        for name, shape in found.items()
        for part in ("parameters", "answer")
    },
}
TYPES: Final = {**COMMAND_TYPES, **EVENT_TYPES, **OTHER_TYPES}
STRICT: Final = {**COMMAND_TYPES, **{path: kind for path, kind in OTHER_TYPES.items() if "parameters" in path}}


def validator(path: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOM / path).read_text())
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


PLAIN: Final[dict[type[inspect.Type], Any]] = {
    inspect.StrType: "text",
    inspect.BoolType: True,
    inspect.IntType: 7,
    inspect.FloatType: 2.5,
    inspect.DecimalType: Decimal("0.000014"),
    inspect.DateTimeType: datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC),
}


def example(kind: inspect.Type) -> Any:
    """A value of the type, nothing left out."""
    made: Any
    match kind:
        case inspect.StructType():
            made = kind.cls(**{field.name: example(field.type) for field in kind.fields})
        case inspect.UnionType():
            made = example(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
        case inspect.ListType():
            made = [example(kind.item_type)]
        case inspect.DictType():
            made = {"key": example(kind.value_type)}
        case inspect.LiteralType():
            made = kind.values[0]
        case _:
            made = PLAIN[type(kind)]
    return made


def body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(example(inspect.type_info(kind))))
    return found


def test_the_schemas_are_what_the_code_says() -> None:
    assert generator.differences(ROOM) == ""


def test_a_changed_a_missing_and_a_left_over_file_are_found_and_put_right(tmp_path: Path) -> None:
    generator.write(tmp_path)
    assert generator.differences(tmp_path) == ""
    (tmp_path / "events/vm-started.v1.json").write_text("{}\n")
    (tmp_path / "replies/reply.json").unlink()
    (tmp_path / "commands/scheduler/forgotten.v1.json").write_text("{}\n")
    found = generator.differences(tmp_path)
    for path in ("events/vm-started.v1.json", "replies/reply.json", "commands/scheduler/forgotten.v1.json"):
        assert f"schemas/{path}" in found
    assert generator.write(tmp_path) == 3
    assert generator.differences(tmp_path) == ""


def test_every_published_type_has_a_schema() -> None:
    assert set(json_schemas.schemas()) == set(TYPES)


@pytest.mark.parametrize("path", sorted(TYPES))
def test_a_schema_is_legal_and_takes_what_is_published(path: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads((ROOM / path).read_text()))
    message = body(TYPES[path])
    validator(path).validate(message)
    assert msgspec.json.decode(json.dumps(message), type=TYPES[path]) == example(inspect.type_info(TYPES[path]))


@pytest.mark.parametrize("path", sorted(TYPES))
def test_a_schema_refuses_what_the_code_refuses(path: str) -> None:
    kind, message = TYPES[path], body(TYPES[path])
    for field in message:
        without = {name: value for name, value in message.items() if name != field}
        wrong = {**message, field: [[None]]}
        for altered in (without, wrong):
            assert validator(path).is_valid(altered) == _is_taken(kind, altered, path), (field, altered)
    unknown = {**message, "surprise": 1}
    assert validator(path).is_valid(unknown) == (path not in STRICT) == _is_taken(kind, unknown, path)


def _is_taken(kind: type[msgspec.Struct], message: dict[str, Any], path: str) -> bool:
    if path in EVENT_TYPES and "type" not in message:
        return False  # a row's tag stands beside its data: the decoder does not need it there, the schema asks for it
    try:
        msgspec.convert(message, kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize("path", sorted(TYPES))
def test_times_are_asked_to_be_times(path: str) -> None:
    message = body(TYPES[path])
    times = [name for name, value in message.items() if isinstance(value, str) and value.startswith("2026-03-01T")]
    for name in times:
        shape = json.loads((ROOM / path).read_text())["properties"][name]
        assert "date-time" in json.dumps(shape), name


def test_a_reply_holds_a_receipt_or_a_refusal() -> None:
    receipt = Receipt(command_id=example(inspect.StrType()), stream="s-1", version=1, position=1, digest="00")
    for reply in (Reply(receipt=receipt), Reply(refusal=Refusal(code="c", message="m", advice="a"))):
        validator(json_schemas.REPLY_PATH).validate(json.loads(msgspec.json.encode(reply)))


# --- AsyncAPI ------------------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOM / "asyncapi.yaml").read_text())
    return found


def official() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads(OFFICIAL.read_text()))


def test_the_document_is_legal_asyncapi() -> None:
    errors = [f"{list(error.path)}: {error.message[:200]}" for error in official().iter_errors(document())]
    assert errors == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.pop("info"),
        lambda found: found["channels"]["output"].update(adress="x"),
        lambda found: found["operations"]["output"].update(action="publish"),
        lambda found: found["components"]["securitySchemes"]["nkey"].update(type="nkey"),
        lambda found: found["servers"]["nats"].pop("protocol"),
    ],
)
def test_the_official_schema_finds_what_is_not_legal(spoil: Any) -> None:
    found = document()
    spoil(found)
    assert not official().is_valid(found)


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [
            ref
            for name, inner in value.items()
            for ref in ([inner] if name == "$ref" else _references(inner))
            if isinstance(ref, str)
        ]
    return [ref for inner in value for ref in _references(inner)] if isinstance(value, list) else []


def test_every_reference_leads_somewhere() -> None:
    found = document()
    references = _references(found)
    assert len(references) > 200
    for reference in references:
        if reference.startswith("./"):
            assert (ROOM / reference).is_file(), reference
            continue
        place: Any = found
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_every_published_message_travels_on_a_channel_of_its_own() -> None:
    found = channels()
    assert len({channel.address for channel in found}) == len(found)
    payloads = {channel.payload for channel in found} | {channel.reply for channel in found}
    assert set(TYPES) - {json_schemas.REPLY_PATH, json_schemas.REFUSAL_PATH} <= payloads
    assert set(document()["channels"]) == {channel.name for channel in found} | {"replies"}


def test_only_the_log_relay_publishes_events() -> None:
    for channel in channels():
        if channel.name.startswith("event-"):
            assert channel.published_as is not None
            assert (publishers(channel.subject), publishers(channel.published_as)) == ([], ["log-relay"])


def test_a_tenant_publishes_commands_of_clients_and_no_reports() -> None:
    open_to_tenants = {channel.name for channel in channels() if "tenant" in publishers(channel.subject)}
    assert {name for name in open_to_tenants if name.startswith("command-")} == {
        f"command-scheduler-{verb}-session"
        for verb in ("create", "exec", "suspend", "resume", "terminate", "checkpoint", "fork", "rollback")
    }


def test_addresses_are_subjects() -> None:
    by_name = {channel.name: channel for channel in channels()}
    assert by_name["command-vm-host-start-vm"].address == "cmd.{tenant}.vm-host.start-vm.{host_id}.{vm_id}"
    assert by_name["command-scheduler-drain-host"].address == "cmd.system.scheduler.drain-host.{host_id}"
    assert by_name["event-vm-started"].address == "evt.{tenant}.vm-started.{stream}"
    assert by_name["query-billing-usage"].address == "qry.{tenant}.billing.usage.{target}"
    for channel in channels():
        if channel.name.startswith("command-"):
            assert subjects.parse_command(channel.subject)


def test_the_document_is_made_the_same_twice() -> None:
    assert asyncapi.document() == asyncapi.document()
    assert generator.made() == generator.made()
