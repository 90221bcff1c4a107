"""The streams: what they are, who may make them, and whether those of a server are as they must be.

Only an administrator makes streams. A service that finds one missing or different says so and stops: a server with
a wrong encryption key, say, shows no streams at all, and new ones in their place would hide what is there.

`EVENTS` takes what is published as `relay.…` and keeps it as `evt.…`, where it also appears for live subscribers.
So nobody but the log-relay can put anything into it: tenants, who may listen on `evt.<tenant>.>`, could otherwise
have the server itself deliver there, and break the promise that sequence equals position.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torpor_contracts.errors import Rejected, Transient
from torpor_messaging.nats_errors import STREAM_NOT_FOUND
from torpor_messaging.nats_link import Link

COMMANDS: Final = "COMMANDS"
EVENTS: Final = "EVENTS"
OUTPUT: Final = "OUTPUT"
TIMERS: Final = "TIMERS"
DEAD: Final = "DEAD"
HEADS: Final = "HEADS"

RELAYED: Final = "relay.>"
"""What `EVENTS` listens to; published by the log-relay alone."""

COMMANDS_KEPT_S: Final = 30 * 24 * 3600
"""How long a command waits for a service that is not there."""

OUTPUT_KEPT_S: Final = 7 * 24 * 3600
OUTPUT_MESSAGES_MAX: Final = 65_536
"""Per program; the oldest go first."""

_MIB: Final = 1024 * 1024
_DEDUP_NS_MIN: Final = 100_000_000


@dataclass(frozen=True)
class StreamSpec:
    """A stream's configuration as the JetStream API takes it; `checked` names what a service insists on."""

    name: str
    config: Mapping[str, Any]
    checked: tuple[str, ...] = field(default=("subjects", "retention", "storage", "discard"))


OUTPUT_BYTES_MAX: Final = 1024 * _MIB
"""Of all programs together; a small disk may be given less."""

SPECS: Final = (
    StreamSpec(
        COMMANDS,
        {
            "subjects": ["cmd.>"],
            "retention": "workqueue",
            "discard": "new",
            "max_bytes": 256 * _MIB,
            # What was sent to a host that never came back would stay for ever, and in the end fill the stream.
            "max_age": COMMANDS_KEPT_S * 1_000_000_000,
            # Deduplication is by ids that tenants share, and rests on a window; ours rests on the log.
            "duplicate_window": _DEDUP_NS_MIN,
        },
    ),
    StreamSpec(
        EVENTS,
        {
            "subjects": [RELAYED],
            "subject_transform": {"src": RELAYED, "dest": "evt.>"},
            "republish": {"src": "evt.>", "dest": "evt.>"},
            "retention": "limits",
            "discard": "old",
            "max_msgs": -1,
            "max_bytes": -1,
            "deny_delete": True,
            "deny_purge": True,
            "allow_direct": True,
            "duplicate_window": _DEDUP_NS_MIN,
        },
        (
            "subjects", "subject_transform", "republish", "retention", "storage", "discard", "max_msgs",
            "max_bytes", "max_age", "max_msgs_per_subject", "deny_delete", "deny_purge", "allow_direct",
        ),
    ),
    StreamSpec(
        OUTPUT,
        {
            "subjects": ["out.>"],
            "retention": "limits",
            "discard": "old",
            "max_age": OUTPUT_KEPT_S * 1_000_000_000,
            "max_bytes": OUTPUT_BYTES_MAX,
            "max_msgs_per_subject": OUTPUT_MESSAGES_MAX,
            "allow_direct": True,
            "duplicate_window": _DEDUP_NS_MIN,
        },
    ),
    StreamSpec(
        TIMERS,
        {
            "subjects": ["timer.>"],
            "retention": "workqueue",
            "discard": "old",
            "max_msgs_per_subject": 1,
            "allow_msg_schedules": True,
            "duplicate_window": _DEDUP_NS_MIN,
        },
        ("subjects", "retention", "storage", "discard", "max_msgs_per_subject", "allow_msg_schedules"),
    ),
    StreamSpec(
        DEAD,
        {
            "subjects": [
                "dead.>",
                "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",
                "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>",
            ],
            "retention": "limits",
            "discard": "old",
            "max_bytes": 128 * _MIB,
            "deny_delete": True,
            "deny_purge": True,
        },
    ),
    StreamSpec(
        HEADS,
        {
            "subjects": ["head.>"],
            "retention": "limits",
            "discard": "old",
            "max_msgs": 10_000,
            "deny_delete": True,
            "deny_purge": True,
            "allow_direct": True,
        },
    ),
)  # fmt: skip
"""All streams of a whole. With nothing but the log, any of them can be made anew."""


def specs(output_bytes_max: int = OUTPUT_BYTES_MAX) -> tuple[StreamSpec, ...]:
    """All streams, with this bound on `OUTPUT`."""
    return tuple(
        spec if spec.name != OUTPUT else replace(spec, config={**spec.config, "max_bytes": output_bytes_max})
        for spec in SPECS
    )


async def create_all(link: Link, *, replicas: int = 1, output_bytes_max: int = OUTPUT_BYTES_MAX) -> list[str]:
    """Make the streams that are missing; the names of those made. Those that are there must be as they should.

    For an administrator. `Rejected("stream-differs")` names what is different and what to do.
    """
    made = []
    for spec in specs(output_bytes_max):
        if await _info(link, spec.name) is not None:
            continue
        await _create(link, spec, replicas)
        made.append(spec.name)
    await check_all(link)
    return made


async def check_all(link: Link, names: Sequence[str] | None = None) -> None:
    """Insist that the streams (all, or those named) are there and as they must be.

    `Rejected("stream-missing")` or `Rejected("stream-differs")` when not, `Transient` when the server does not say.
    """
    for spec in SPECS:
        if names is not None and spec.name not in names:
            continue
        config = await _info(link, spec.name)
        if config is None:
            raise Rejected(
                "stream-missing",
                f"the NATS server has no stream {spec.name}",
                "if the server's store and encryption key are the right ones, make the streams with "
                "`python -m torpor_messaging.setup_streams`, then fill EVENTS with `torpor audit rebuild --stream`",
            )
        wanted = _full(spec)
        for name in spec.checked:
            if not _same(config.get(name), wanted.get(name)):
                raise Rejected(
                    "stream-differs",
                    f"stream {spec.name}: {name} is {config.get(name)!r}, and must be {wanted.get(name)!r}",
                    "somebody changed it; put it back with an administrator's key (nats stream edit), or delete the "
                    "stream and make it anew with `python -m torpor_messaging.setup_streams`",
                )


async def recreate_events(link: Link, *, replicas: int | None = None) -> None:
    """Drop `EVENTS` and make it anew and empty, for the relay to fill from the log. For an administrator."""
    before = await _info(link, EVENTS)
    if before is not None:
        answer = await link.api(f"STREAM.DELETE.{EVENTS}")
        if "error" in answer:
            raise Transient(f"stream {EVENTS} cannot be deleted: {answer['error'].get('description')}")
    chosen = replicas or int((before or {}).get("num_replicas") or 1)
    [spec] = [spec for spec in SPECS if spec.name == EVENTS]
    await _create(link, spec, chosen)


def _full(spec: StreamSpec) -> dict[str, Any]:
    unlimited = {"max_msgs": -1, "max_bytes": -1, "max_age": 0, "max_msgs_per_subject": -1}
    return {"name": spec.name, "storage": "file", **unlimited, **spec.config}


async def _create(link: Link, spec: StreamSpec, replicas: int) -> None:
    config = {**_full(spec), "num_replicas": replicas}
    if spec.name == COMMANDS:
        # Sequences stand in for missing command ids, which must never come again, not even after the stream was lost.
        config["first_seq"] = time.time_ns() // 1_000_000
    answer = await link.api(f"STREAM.CREATE.{spec.name}", config)
    if "error" in answer:
        raise Rejected(
            "stream-refused",
            f"the NATS server does not make stream {spec.name}: {answer['error'].get('description')}",
            "give it an administrator's key, enough disk and, for replicas, enough servers",
        )


async def _info(link: Link, name: str) -> Mapping[str, Any] | None:
    answer = await link.api(f"STREAM.INFO.{name}")
    if "error" not in answer:
        config: Mapping[str, Any] = answer["config"]
        return config
    if answer["error"].get("err_code") == STREAM_NOT_FOUND:
        return None
    raise Transient(f"stream {name}: {answer['error'].get('description')}", retry_after_s=1.0)


def _same(actual: object, wanted: object) -> bool:
    """The server leaves out what is false, and adds to objects what we did not say."""
    if isinstance(wanted, dict) and isinstance(actual, dict):
        return all(_same(actual.get(name), value) for name, value in wanted.items())
    return actual == wanted or (not actual and not wanted)
