"""Files in the guest, for the host: read, write, list, stat, make, move, remove; names are bytes, as Linux has them.

Paths travel as text with `surrogateescape`, so that a name that is no UTF-8 survives the journey.
"""

import os
import pwd
import shutil
import stat
from typing import Any, Final

from torpor_guest_agent.frames import BODY_BYTES_MAX
from torpor_guest_agent.refusal import Refused

LISTED_MAX: Final = 1000
"""Entries of one answer: with the longest names there are it stays within a frame."""
LISTED_BYTES_MAX: Final = 512 * 1024
KINDS: Final = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


def read(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """At most `length` bytes from `offset` on, and what the file is now."""
    length = min(int(request.get("length", BODY_BYTES_MAX)), BODY_BYTES_MAX)
    # Without O_NONBLOCK a named pipe would hold the whole agent up.
    descriptor = os.open(path_of(request), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("not-a-file", f"{request['path']!r} is no regular file")
        now = {"size": found.st_size, "modified_ns": found.st_mtime_ns}
        return now, os.pread(descriptor, length, int(request.get("offset", 0)))
    finally:
        os.close(descriptor)


def write(request: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Write `data` at `offset`; the first piece (offset 0) makes the file and cuts it, `last` makes it durable.

    A file is written beside its name and takes its place with the last piece, so a reader never sees half of it.
    """
    target = path_of(request)
    mode, offset = int(request.get("mode", 0o644)), int(request.get("offset", 0))
    user = user_of(request)
    partial = os.path.join(os.path.dirname(target), b".torpor-" + str(request["upload"]).encode())  # noqa: PTH118, PTH120
    if offset == 0:
        _make_directories(os.path.dirname(target), user, 0o755)  # noqa: PTH120  (bytes paths)
    try:
        descriptor = os.open(
            partial, os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if offset == 0 else 0), mode
        )
    except FileNotFoundError:
        raise Refused("upload-unknown", f"the first piece of {request['path']!r} is not here: begin again") from None
    if os.fstat(descriptor).st_size < offset:
        os.close(descriptor)
        raise Refused("upload-unknown", f"pieces of {request['path']!r} before {offset} are missing: begin again")
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
        if request.get("last", False):
            os.fchmod(descriptor, mode)
            os.fchown(descriptor, user.pw_uid, user.pw_gid)
            os.fsync(descriptor)
            os.rename(partial, target)  # noqa: PTH104  (bytes paths)
    except BaseException:
        os.unlink(partial)  # noqa: PTH108  (bytes paths)
        raise
    finally:
        os.close(descriptor)
    return {"size": offset}


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """What `lstat` says of one path."""
    path = path_of(request)
    return _entry(path.rsplit(b"/", 1)[-1], path)


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """The entries of a directory, sorted by name, from the one behind `after` on; `more` says that there are others."""
    path = path_of(request)
    after = request.get("after")
    names = sorted(os.listdir(path))  # noqa: PTH208  (bytes paths)
    if after is not None:
        last = str(after).encode(errors="surrogateescape")
        names = [name for name in names if name > last]
    entries: list[dict[str, Any]] = []
    size = 0
    for name in names[:LISTED_MAX]:
        try:
            entry = _entry(name, os.path.join(path, name))  # noqa: PTH118  (bytes paths)
        except FileNotFoundError:
            continue
        entries.append(entry)
        size += 6 * (len(name) + len(entry.get("to", "")))
        if size > LISTED_BYTES_MAX:
            break
    more = bool(entries) and names[-1] > entries[-1]["name"].encode(errors="surrogateescape")
    return {"entries": entries, "more": more}


def make_directory(request: dict[str, Any]) -> dict[str, Any]:
    """Make a directory and those above it; one that is there is fine."""
    path = path_of(request)
    _make_directories(path, user_of(request), int(request.get("mode", 0o755)))
    return {}


def move(request: dict[str, Any]) -> dict[str, Any]:
    """Rename `path` to `to`, replacing a file that is there."""
    os.rename(path_of(request), path_of(request, "to"))  # noqa: PTH104  (bytes paths)
    return {}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove a file, or with `recursive` a directory and all below it."""
    path = path_of(request)
    if stat.S_ISDIR(os.lstat(path).st_mode):
        if request.get("recursive", False):
            shutil.rmtree(path)
        else:
            os.rmdir(path)  # noqa: PTH106  (bytes paths)
    else:
        os.unlink(path)  # noqa: PTH108  (bytes paths)
    return {}


def path_of(request: dict[str, Any], key: str = "path") -> bytes:
    """The path a request names; `Refused` unless it is absolute."""
    text = str(request[key])
    if not text.startswith("/") or "\0" in text:
        raise Refused("illegal-path", f"{text!r} is not an absolute path")
    return text.encode(errors="surrogateescape")


def user_of(request: dict[str, Any]) -> pwd.struct_passwd:
    """Whose the file is to be, root's when the request names nobody; `Refused` when there is no such user."""
    name = request.get("user") or "root"
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise Refused("no-such-user", f"the guest has no user {name!r}") from None


def _make_directories(path: bytes, owner: pwd.struct_passwd, mode: int) -> None:
    """Make a directory and those above it that are missing, each the owner's."""
    missing: list[bytes] = []
    while path not in {b"", b"/"} and not os.path.isdir(path):  # noqa: PTH112  (bytes paths)
        missing.append(path)
        path = os.path.dirname(path)  # noqa: PTH120  (bytes paths)
    for one in reversed(missing):
        os.mkdir(one, mode)  # noqa: PTH102  (bytes paths)
        os.chown(one, owner.pw_uid, owner.pw_gid)


def _entry(name: bytes, path: bytes) -> dict[str, Any]:
    found = os.lstat(path)
    entry: dict[str, Any] = {
        "name": name.decode(errors="surrogateescape"),
        "kind": KINDS.get(stat.S_IFMT(found.st_mode), "other"),
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "user": found.st_uid,
        "group": found.st_gid,
        "modified_ns": found.st_mtime_ns,
    }
    if entry["kind"] == "link":
        entry["to"] = os.readlink(path).decode(errors="surrogateescape")  # noqa: PTH115  (bytes paths)
    return entry
