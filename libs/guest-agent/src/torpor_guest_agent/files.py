"""Files in the guest, for the host: read, write, list, stat, make, move, remove; names are bytes, as Linux has them.

Paths travel as text with `surrogateescape`, so that a name that is no UTF-8 survives the journey.
"""

import errno
import os
import pwd
import shutil
import stat
from typing import Any, Final

from torpor_guest_agent.frames import BODY_BYTES_MAX
from torpor_guest_agent.programs import Refused

LISTED_MAX: Final = 10_000
CODES: Final = {
    errno.ENOENT: "not-found",
    errno.ENOTDIR: "not-a-directory",
    errno.EISDIR: "is-a-directory",
    errno.EEXIST: "exists",
    errno.EACCES: "not-permitted",
    errno.EPERM: "not-permitted",
    errno.ENOSPC: "disk-full",
    errno.ENOTEMPTY: "not-empty",
    errno.ELOOP: "too-many-links",
    errno.ENAMETOOLONG: "name-too-long",
}


def refusal(error: OSError) -> Refused:
    """The refusal that says what the operating system said."""
    return Refused(CODES.get(error.errno or 0, "io-error"), str(error))


def read(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """At most `length` bytes from `offset` on, and the file's size."""
    length = min(int(request.get("length", BODY_BYTES_MAX)), BODY_BYTES_MAX)
    with open(_path(request), "rb", buffering=0) as file:  # noqa: PTH123  (bytes paths)
        size = os.fstat(file.fileno()).st_size
        return {"size": size}, os.pread(file.fileno(), length, int(request.get("offset", 0)))


def write(request: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Write `data` at `offset`; the first piece (offset 0) makes the file and cuts it, `last` makes it durable.

    A file is written beside its name and takes its place with the last piece, so a reader never sees half of it.
    """
    target = _path(request)
    offset = int(request.get("offset", 0))
    partial = target + b".torpor-" + str(request["upload"]).encode()
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if offset == 0 else 0)
    if offset == 0:
        os.makedirs(os.path.dirname(target) or b"/", exist_ok=True)  # noqa: PTH103, PTH120  (bytes paths)
    descriptor = os.open(partial, flags, int(request.get("mode", 0o644)))
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
        if request.get("last", False):
            os.fchmod(descriptor, int(request.get("mode", 0o644)))
            user = pwd.getpwnam(request.get("user") or "root")
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
    path = _path(request)
    return _entry(path.rsplit(b"/", 1)[-1], path)


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """The entries of a directory, sorted by name, at most `LISTED_MAX`; `more` says that there are others."""
    path = _path(request)
    names = sorted(os.listdir(path))  # noqa: PTH208  (bytes paths)
    entries = []
    for name in names[:LISTED_MAX]:
        try:
            entries.append(_entry(name, os.path.join(path, name)))  # noqa: PTH118  (bytes paths)
        except FileNotFoundError:
            continue
    return {"entries": entries, "more": len(names) > LISTED_MAX}


def make_directory(request: dict[str, Any]) -> dict[str, Any]:
    """Make a directory and those above it; one that is there is fine."""
    path = _path(request)
    os.makedirs(path, mode=int(request.get("mode", 0o755)), exist_ok=True)  # noqa: PTH103  (bytes paths)
    user = pwd.getpwnam(request.get("user") or "root")
    os.chown(path, user.pw_uid, user.pw_gid)
    return {}


def move(request: dict[str, Any]) -> dict[str, Any]:
    """Rename `path` to `to`, replacing a file that is there."""
    os.rename(_path(request), _path(request, "to"))  # noqa: PTH104  (bytes paths)
    return {}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove a file, or with `recursive` a directory and all below it."""
    path = _path(request)
    if not os.path.islink(path) and os.path.isdir(path):  # noqa: PTH112, PTH114  (bytes paths)
        if request.get("recursive", False):
            shutil.rmtree(path)
        else:
            os.rmdir(path)  # noqa: PTH106  (bytes paths)
    else:
        os.unlink(path)  # noqa: PTH108  (bytes paths)
    return {}


def _path(request: dict[str, Any], key: str = "path") -> bytes:
    text = str(request[key])
    if not text.startswith("/") or "\0" in text:
        raise Refused("illegal-path", f"{text!r} is not an absolute path")
    return text.encode(errors="surrogateescape")


def _entry(name: bytes, path: bytes) -> dict[str, Any]:
    found = os.lstat(path)
    kinds = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
    entry: dict[str, Any] = {
        "name": name.decode(errors="surrogateescape"),
        "kind": kinds.get(stat.S_IFMT(found.st_mode), "other"),
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "user": found.st_uid,
        "group": found.st_gid,
        "modified_ns": found.st_mtime_ns,
    }
    if entry["kind"] == "link":
        entry["to"] = os.readlink(path).decode(errors="surrogateescape")  # noqa: PTH115  (bytes paths)
    return entry
