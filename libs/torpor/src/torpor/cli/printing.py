"""How answers look: JSON for programs; for people lines, and tables that are drawn only on a terminal."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def emit(value: Any) -> None:
    """One JSON value on one line."""
    import msgspec  # noqa: PLC0415

    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line beside the answer: progress, hints."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], nothing: str) -> None:
    """Rows for people: drawn on a terminal, plain columns elsewhere."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        say(nothing)
    elif sys.stdout.isatty():
        from rich import box  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        drawn = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in cells:
            drawn.add_row(*row)
        Console().print(drawn)
    else:
        _columns(headings, cells)


def _columns(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [list(headings), *cells]) for column in range(len(headings))]
    for row in [[heading.upper() for heading in headings], *cells]:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def pairs(entries: Mapping[str, object]) -> None:
    """Names and values for people, one a line; what is None or empty is left out."""
    shown = {name: _cell(value) for name, value in entries.items() if value not in (None, "", [], {})}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        say(f"{name.ljust(width)}  {value}")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, dict | list):
        return json.dumps(value, default=str)
    return str(value)


def legible(name: str) -> str:
    """A name that may hold anything, as text that JSON can hold; what is no UTF-8 shows as replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def quoted(name: str) -> str:
    """A name on one line, and as a shell takes it: as it is, or quoted when it holds more than printable text."""
    if name.isprintable():
        return name
    escaped = "".join(_escaped(byte) for byte in name.encode("utf-8", "surrogateescape"))
    return f"$'{escaped}'"


def _escaped(byte: int) -> str:
    plain = chr(byte)
    if plain in "\\'":
        return f"\\{plain}"
    return plain if plain.isascii() and plain.isprintable() else f"\\x{byte:02x}"
