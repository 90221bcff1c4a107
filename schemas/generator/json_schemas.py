"""JSON Schemas (draft 2020-12) of all published messages, made from the types that decode them."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect

from torpor_contracts.host import HostHeartbeat
from torpor_contracts.registry import COMMANDS, EVENTS, QUERIES
from torpor_contracts.replies import Refusal, Reply
from torpor_messaging.edge import Health

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def command_path(service: str, tag: str) -> str:
    """Where a command's schema stands, below `schemas/`."""
    return f"commands/{service}/{tag}.json"


def event_path(tag: str) -> str:
    """Where an event's schema stands."""
    return f"events/{tag}.json"


def query_path(service: str, kind: str, part: str) -> str:
    """Where the schema of a query's `parameters` or `answer` stands."""
    return f"queries/{service}/{kind}.{part}.json"


REPLY_PATH: Final = "replies/reply.json"
REFUSAL_PATH: Final = "replies/refusal.json"
HEARTBEAT_PATH: Final = "observations/heartbeat.json"
HEALTH_PATH: Final = "queries/health.answer.json"


def schemas() -> dict[str, Schema]:
    """Path -> schema of everything published."""
    found = {
        REPLY_PATH: schema_of(Reply),
        REFUSAL_PATH: schema_of(Refusal),
        HEARTBEAT_PATH: schema_of(HostHeartbeat, tag_required=False),
        HEALTH_PATH: schema_of(Health),
    }
    for service, commands in COMMANDS.items():
        for tag, kind in commands.items():
            found[command_path(service, tag)] = schema_of(kind, tag_required=False)
    for tag, kind in EVENTS.items():
        found[event_path(tag)] = schema_of(kind)
    for service, queries in QUERIES.items():
        for name, shape in queries.items():
            found[query_path(service, name, "parameters")] = schema_of(shape.parameters)
            found[query_path(service, name, "answer")] = schema_of(shape.answer)
    return found


def schema_of(kind: type[msgspec.Struct], *, tag_required: bool = True) -> Schema:
    """The schema of one message; what its subject says already, its `type`, may be left out."""
    made = msgspec.json.schema(kind)
    name = made["$ref"].rpartition("/")[2]
    definitions: dict[str, Schema] = made["$defs"]
    for struct in _structs(kind):
        _mark_times(struct, definitions[struct.cls.__name__])
    root = definitions.pop(name)
    tag = kind.__struct_config__.tag
    if tag is not None and not tag_required:
        root["required"] = [field for field in root["required"] if field != "type"]
    rest = {"$defs": definitions} if definitions else {}
    return {"$schema": DIALECT, "$id": f"urn:torpor:{tag or kind.__name__}", **root, **rest}


def _structs(kind: type[msgspec.Struct]) -> Iterator[inspect.StructType]:
    """The type and all Structs below it, each once."""
    seen: set[type] = set()
    waiting: list[inspect.Type] = [inspect.type_info(kind)]
    while waiting:
        found = waiting.pop()
        if isinstance(found, inspect.StructType):
            if found.cls in seen:
                continue
            seen.add(found.cls)
            yield found
            waiting += [field.type for field in found.fields]
        else:
            waiting += _inside(found)


def _inside(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        return list(kind.types)
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return [kind.item_type]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    return []


def _mark_times(struct: inspect.StructType, schema: Schema) -> None:
    """Put in the format that msgspec leaves out for times that may lack a zone; ours never do."""
    properties: Mapping[str, Schema] = schema["properties"]
    for field in struct.fields:
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        if any(isinstance(kind, inspect.DateTimeType) for kind in kinds):
            shape = properties[field.encode_name]
            for option in shape.get("anyOf", [shape]):
                if option.get("type") == "string":
                    option["format"] = "date-time"
