"""The AsyncAPI 3.0 document of all channels: what travels where, with which headers, and who may publish it."""

from importlib.metadata import version
from typing import Any, Final

from schemas.generator import json_schemas
from schemas.generator.channels import Channel, channels, named, publishers

Document = dict[str, Any]

_TEXT: Final = {"type": "string"}
_TIME: Final = {"type": "string", "format": "date-time"}
_COUNT: Final = {"type": "string", "pattern": "^[0-9]+$"}

_ANSWERED: Final = "replies"

_HEADERS: Final[dict[str, Document]] = {
    "CommandHeaders": {
        "description": "All may be left out by a plain client. Unknown ones are ignored.",
        "properties": {
            "ce-id": {**_TEXT, "description": "The command's id; the same id is answered with the same receipt."},
            "Nats-Msg-Id": {**_TEXT, "description": "The command's id, where ce-id is missing."},
            "ce-type": {**_TEXT, "description": "The wire tag with its version; `<type>.v1` when left out."},
            "ce-source": _TEXT,
            "ce-subject": _TEXT,
            "ce-time": _TIME,
            "ce-specversion": {"const": "1.0"},
            "ce-datacontenttype": {"const": "application/json"},
            "ce-causation": {**_TEXT, "description": "The message that this one follows from."},
            "ce-goal": {**_TEXT, "description": "What all messages of one undertaking share."},
            "traceparent": {**_TEXT, "description": "W3C Trace Context."},
            "Torpor-Reply": {**_TEXT, "description": "Where the reply goes: below `_INBOX.<tenant>.`."},
        },
    },
    "EventHeaders": {
        "description": "CloudEvents 1.0 in binary mode; from them the row of the log is built, and its digest checked.",
        "properties": {
            "ce-specversion": {"const": "1.0"},
            "ce-id": {**_COUNT, "description": "The position."},
            "ce-type": {**_TEXT, "description": "The wire tag with its version."},
            "ce-source": _TEXT,
            "ce-subject": {**_TEXT, "description": "The stream."},
            "ce-time": _TIME,
            "ce-datacontenttype": {"const": "application/json"},
            "ce-position": {**_COUNT, "description": "The log's position, which is the stream's sequence."},
            "ce-streamversion": {**_COUNT, "description": "The version within the stream."},
            "ce-digest": {**_TEXT, "pattern": "^[0-9a-f]{64}$", "description": "The row's Merkle leaf hash."},
            "ce-tenant": _TEXT,
            "ce-command": {**_TEXT, "description": "The command whose event this is."},
            "ce-causation": _TEXT,
            "ce-goal": _TEXT,
        },
        "required": [
            "ce-specversion", "ce-id", "ce-type", "ce-source", "ce-subject", "ce-time", "ce-datacontenttype",
            "ce-position", "ce-streamversion", "ce-digest", "ce-tenant", "ce-command", "ce-causation", "ce-goal",
        ],
    },
    "OutputHeaders": {
        "description": "A piece of output, or the end of the program.",
        "properties": {
            "Torpor-Stream": {"enum": ["stdout", "stderr"]},
            "Torpor-Offset": {**_COUNT, "description": "Bytes of both streams before this piece."},
            "Torpor-End": {"enum": ["exited", "signaled", "timed-out", "failed"], "description": "The last message."},
            "Torpor-Exit-Code": _COUNT,
        },
        "required": ["Torpor-Offset"],
    },
    "TimerHeaders": {
        "description": "A JetStream message schedule.",
        "properties": {
            "Nats-Schedule": {**_TEXT, "pattern": "^@at "},
            "Nats-Schedule-Target": {**_TEXT, "description": "The subject of the timer once it is due."},
        },
        "required": ["Nats-Schedule", "Nats-Schedule-Target"],
    },
    "DeadHeaders": {
        "description": "The headers of the message itself, and these.",
        "properties": {
            "Torpor-Dead-Code": _TEXT,
            "Torpor-Dead-Reason": _TEXT,
            "Torpor-Dead-Subject": _TEXT,
            "Torpor-Dead-Sequence": _COUNT,
            "Torpor-Dead-Deliveries": _COUNT,
        },
        "required": ["Torpor-Dead-Code", "Torpor-Dead-Reason"],
    },
}  # fmt: skip


def document() -> Document:
    """The whole document."""
    found = channels()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Torpor",
            "version": version("torpor-contracts"),
            "description": (
                "Commands go to the stream COMMANDS and are answered on Torpor-Reply with a receipt or a refusal. "
                "Events are read from the stream EVENTS, whose sequence is the position in the log. "
                "Queries are plain requests; their replies carry the answer, or an object with `refusal`. "
                "Made from the code: python -m schemas.generator."
            ),
        },
        "defaultContentType": "application/json",
        "servers": {
            "nats": {
                "host": "{address}",
                "protocol": "nats",
                "description": "A NATS server 2.15 or newer with JetStream.",
                "variables": {"address": {"default": "127.0.0.1:4222", "description": "Host and port."}},
                "security": [{"$ref": "#/components/securitySchemes/nkey"}],
            }
        },
        "channels": {
            **{channel.name: _channel(channel) for channel in found},
            _ANSWERED: {
                "address": None,
                "title": "Replies",
                "description": "A reply goes to the subject that the message names: Torpor-Reply, or NATS' own.",
                "messages": {
                    "reply": {"$ref": "#/components/messages/reply"},
                    **{_answer_name(channel): _answer_ref(channel) for channel in found if _has_answer(channel)},
                },
            },
        },
        "operations": {channel.name: _operation(channel) for channel in found},
        "components": {
            "messages": {
                **{channel.name: _message(channel) for channel in found},
                "reply": {
                    "name": "reply",
                    "title": "A receipt, or a refusal that says what to do.",
                    "payload": _payload(json_schemas.REPLY_PATH),
                },
                **{_answer_name(channel): _answer(channel) for channel in found if _has_answer(channel)},
            },
            "schemas": {name: {"type": "object", **shape} for name, shape in _HEADERS.items()},
            "securitySchemes": {
                "nkey": {
                    "type": "asymmetricEncryption",
                    "description": (
                        "A NATS nkey (Ed25519): the client signs the server's nonce. What each user may publish and "
                        "read is in deploy/nats/; `x-publishers` names who may publish an operation's messages."
                    ),
                }
            },
        },
    }


def _channel(channel: Channel) -> Document:
    made: Document = {
        "address": channel.address,
        "title": channel.title,
        "messages": {channel.name: {"$ref": f"#/components/messages/{channel.name}"}},
    }
    if channel.parameters:
        made["parameters"] = channel.parameters
    if channel.stream is not None:
        made["x-jetstream-stream"] = channel.stream
    return made


def _operation(channel: Channel) -> Document:
    made: Document = {
        "action": channel.action,
        "channel": {"$ref": f"#/channels/{channel.name}"},
        "messages": [{"$ref": f"#/channels/{channel.name}/messages/{channel.name}"}],
        "security": [{"$ref": "#/components/securitySchemes/nkey"}],
        "x-publishers": publishers(channel.published_as or channel.subject),
    }
    if channel.published_as is not None:
        made["x-published-as"] = named(channel.published_as)
    if channel.reply is not None:
        names = [_answer_name(channel), "reply"] if _has_answer(channel) else ["reply"]
        made["reply"] = {
            "channel": {"$ref": f"#/channels/{_ANSWERED}"},
            "messages": [{"$ref": f"#/channels/{_ANSWERED}/messages/{name}"} for name in names],
        }
        if not _has_answer(channel):
            made["reply"]["address"] = {"location": channel.reply}
    return made


def _message(channel: Channel) -> Document:
    made: Document = {"name": channel.name, "title": channel.title}
    if channel.headers is not None:
        made["headers"] = {"$ref": f"#/components/schemas/{channel.headers}"}
    if channel.payload is not None:
        made["payload"] = _payload(channel.payload)
    else:
        made["contentType"] = "application/octet-stream"
    return made


def _payload(path: str) -> Document:
    return {
        "schemaFormat": "application/schema+json;version=draft-2020-12",
        "schema": {"$ref": f"./{path}"},
    }


def _has_answer(channel: Channel) -> bool:
    return channel.reply is not None and channel.reply.endswith(".json")


def _answer_name(channel: Channel) -> str:
    return f"answer-{channel.name.removeprefix('query-')}"


def _answer_ref(channel: Channel) -> Document:
    return {"$ref": f"#/components/messages/{_answer_name(channel)}"}


def _answer(channel: Channel) -> Document:
    assert channel.reply is not None
    name = _answer_name(channel)
    return {"name": name, "title": f"The answer to {channel.name}.", "payload": _payload(channel.reply)}
