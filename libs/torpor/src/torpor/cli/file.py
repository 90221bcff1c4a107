"""`torpor file …`: files of sessions, in and out, however large and whatever they are called."""

import asyncio
import base64
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from stat import filemode
from typing import IO, Annotated, Final, NamedTuple

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common
from torpor.client.door import encoded_path
from torpor.client.files import Files
from torpor.client.models import FileInfo
from torpor.errors import InvalidRequest

KIND_BITS: Final = {"file": 0o100000, "directory": 0o040000, "link": 0o120000, "other": 0}
PROGRESS_S: Final = 0.5
OCTAL: Final = 8

There = Annotated[str, Parameter(help="SESSION:PATH, with an absolute path.", show_default=False)]
User = Annotated[str | None, Parameter(help="Whose it is to be in the session; by default root's.")]
Mode = Annotated[str | None, Parameter(help="Its permissions, in octal.")]


class Named(NamedTuple):
    """A path in a session."""

    session_id: str
    path: str


def get_(
    source: There,
    target: Annotated[
        str | None, Parameter(help="Where to; - is our output. By default here.", allow_leading_hyphen=True)
    ] = None,
    *,
    offset: Annotated[int, Parameter(help="The first byte wanted.")] = 0,
    length: Annotated[int | None, Parameter(help="How many bytes at most.")] = None,
    common: Common = DEFAULTS,
) -> int:
    """Copy a file out of a session. The local file takes its place when it is whole."""
    named = _named(source)
    local = Path(target or named.path.rpartition("/")[2] or "file")
    if local.is_dir():
        local /= named.path.rpartition("/")[2]

    async def work() -> int:
        async with common.connect() as t:
            files = t.sessions.handle(named.session_id).files
            pieces = files.stream(named.path, offset=offset, length=length)
            if target == "-":
                return await _poured(pieces, sys.stdout.buffer, _silent)
            with _replacing(local) as file:
                return await _poured(pieces, file, _progress(printing.quoted(str(local))))

    size_bytes = asyncio.run(work())
    if target == "-":
        return 0
    if common.json:
        printing.emit({"path": printing.legible(str(local)), "size_bytes": size_bytes})
    else:
        printing.say(f"{printing.quoted(str(local))}  {size_bytes} bytes")
    return 0


def put_(
    source: Annotated[str, Parameter(help="The local file; - is our input.", allow_leading_hyphen=True)],
    target: There,
    *,
    mode: Mode = None,
    user: User = None,
    common: Common = DEFAULTS,
) -> int:
    """Copy a file into a session. It takes its place there when it is whole; directories above it are made.

    A path that ends in / keeps the file's name.
    """
    named = _named(target)
    path = named.path + Path(source).name if named.path.endswith("/") else named.path
    bits = _bits(mode, 0o644 if source == "-" else Path(source).stat().st_mode & 0o777)

    async def work() -> int:
        async with common.connect() as t:
            content = sys.stdin.buffer if source == "-" else Path(source)
            return await t.sessions.handle(named.session_id).files.write(path, content, mode=bits, user=user)

    size_bytes = asyncio.run(work())
    if common.json:
        printing.emit({"path": printing.legible(path), "size_bytes": size_bytes})
    else:
        printing.say(f"{named.session_id}:{printing.quoted(path)}  {size_bytes} bytes")
    return 0


def ls_(
    directory: There,
    *,
    long: Annotated[bool, Parameter(name=["--long", "-l"], negative=(), help="Say what each is.")] = False,
    common: Common = DEFAULTS,
) -> int:
    """List a directory."""

    async def work(files: Files, path: str) -> None:
        async for info in files.list(path):
            if common.json:
                printing.emit(_fields(info))
            else:
                printing.say(_line(info) if long else printing.quoted(info.name))

    return _with(directory, work, common)


def stat_(path: There, *, common: Common = DEFAULTS) -> int:
    """Show one file, directory or link; a link is not followed."""

    async def work(files: Files, path: str) -> None:
        info = await files.stat(path)
        if common.json:
            printing.emit(_fields(info))
        else:
            printing.say(_line(info))

    return _with(path, work, common)


def mkdir_(directory: There, *, mode: Mode = None, user: User = None, common: Common = DEFAULTS) -> int:
    """Make a directory and those above it; one that is there is fine."""

    async def work(files: Files, path: str) -> None:
        await files.make(path, mode=_bits(mode, 0o755), user=user)

    return _with(directory, work, common, done=True)


def mv_(source: There, target: There, *, common: Common = DEFAULTS) -> int:
    """Rename a file or directory within a session; a file that is there is replaced."""
    from_, to = _named(source), _named(target)
    if from_.session_id != to.session_id:
        raise InvalidRequest("illegal-move", "the two are in different sessions", "use `torpor file get` and `put`")

    async def work(files: Files, path: str) -> None:
        await files.move(path, to.path)

    return _with(source, work, common, done=True)


def rm_(
    path: There,
    *,
    recursive: Annotated[bool, Parameter(name=["--recursive", "-r"], negative=(), help="And all below it.")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Remove a file, a link, an empty directory, or with --recursive a directory and all below it."""

    async def work(files: Files, path: str) -> None:
        await files.remove(path, recursive=recursive)

    return _with(path, work, common, done=True)


def watch_(directory: There, *, common: Common = DEFAULTS) -> int:
    """Print what happens in a directory, until Ctrl-C or until it is gone; does not keep the session awake."""

    async def work(files: Files, path: str) -> None:
        async for change in files.watch(path):
            if common.json:
                printing.emit({"kind": change.kind, **_name_fields(change.name)})
            else:
                printing.say(f"{change.kind:<10}  {printing.quoted(change.name)}".rstrip())

    return _with(directory, work, common)


def _with(there: str, work: Callable[[Files, str], Awaitable[None]], common: Common, *, done: bool = False) -> int:
    named = _named(there)

    async def run() -> None:
        async with common.connect() as t:
            await work(t.sessions.handle(named.session_id).files, named.path)

    asyncio.run(run())
    if done and common.json:
        printing.emit({"path": printing.legible(named.path)})
    return 0


def _named(text: str) -> Named:
    session_id, colon, path = text.partition(":")
    if not colon or not path:
        raise InvalidRequest(
            "illegal-path", f"{printing.quoted(text)} does not name a file of a session", "write SESSION:/path/to/file"
        )
    return Named(session_id, path)


def _bits(mode: str | None, default: int) -> int:
    if mode is None:
        return default
    try:
        return int(mode, OCTAL)
    except ValueError:
        raise InvalidRequest("illegal-mode", f"{mode!r} is no mode", "write it in octal, as 0644") from None


async def _poured(pieces: AsyncIterator[bytes], file: IO[bytes], progress: Callable[[int], None]) -> int:
    size_bytes = 0
    async for piece in pieces:
        file.write(piece)
        size_bytes += len(piece)
        progress(size_bytes)
    file.flush()
    return size_bytes


@contextmanager
def _replacing(local: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `local` when all went well, and else is gone; a device or pipe is written to."""
    if local.exists() and not local.is_file():
        with local.open("wb") as file:
            yield file
        return
    partial = local.with_name(f".{local.name[:200]}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(local)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _silent(_size_bytes: int) -> None:
    return


def _progress(name: str) -> Callable[[int], None]:
    """Tells people at a terminal how far it has come."""
    if not sys.stderr.isatty():
        return _silent
    told_s = time.monotonic()

    def tell(size_bytes: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= PROGRESS_S:
            told_s = time.monotonic()
            sys.stderr.write(f"\r{name}  {size_bytes / 2**20:.0f} MiB ")
            sys.stderr.flush()

    return tell


def _line(info: FileInfo) -> str:
    mode = filemode(KIND_BITS[info.kind] | info.mode)
    changed = datetime.fromtimestamp(info.modified_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
    target = f" -> {printing.quoted(info.link_to)}" if info.link_to is not None else ""
    owner = f"{info.user_id:>5} {info.group_id:>5}"
    return f"{mode}  {owner}  {info.size_bytes:>12}  {changed}  {printing.quoted(info.name)}{target}"


def _fields(info: FileInfo) -> dict[str, object]:
    return {
        **_name_fields(info.name),
        "kind": info.kind,
        "size_bytes": info.size_bytes,
        "mode": f"{info.mode:04o}",
        "user_id": info.user_id,
        "group_id": info.group_id,
        "modified_ns": info.modified_ns,
        "link_to": None if info.link_to is None else printing.legible(info.link_to),
    }


def _name_fields(name: str) -> dict[str, str]:
    """A name for programs: JSON holds no bytes, so these go beside it."""
    return {"name": printing.legible(name), "name_base64": base64.b64encode(encoded_path(name)).decode()}
