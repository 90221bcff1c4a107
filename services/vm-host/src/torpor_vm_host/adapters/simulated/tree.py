"""The file tree of a simulated machine: files and folders under keys that are text, whatever bytes their names have."""

import posixpath
from typing import Final, Literal, TypeVar

from torpor_contracts.guest import FileEntry
from torpor_vm_host.adapters.simulated.machine import Machine, Meta
from torpor_vm_host.ports import DriverError

FILE_BYTES_MAX: Final = 1024 * 1024
DISK_BYTES_MAX: Final = 4 * 1024 * 1024
NAME_BYTES_MAX: Final = 255
Kept = TypeVar("Kept", bytes, Meta)
ALWAYS: Final = ("/", "/root", "/tmp")  # noqa: S108  (folders of the simulated machine)
UNKNOWN: Final = Meta(mode=0o644, user="root", modified_us=0)
USERS: Final = {"root": 0, "user": 1000}


def key_of(path: bytes) -> str:
    r"""The key of a path: its text, with `\xNN` for a backslash and for every byte that is no UTF-8."""
    return path.replace(b"\\", b"\\x5c").decode("utf-8", "backslashreplace")


def path_of(key: str) -> bytes:
    """The path that a key stands for."""
    head, *escaped = key.split("\\x")
    return head.encode() + b"".join(bytes([int(piece[:2], 16)]) + piece[2:].encode() for piece in escaped)


def checked(path: bytes) -> str:
    """The key of a path that a client names; raises `DriverError`."""
    if not path.startswith(b"/") or b"\0" in path:
        raise _refused("illegal-path", f"{path!r} is not an absolute path")
    if any(len(name) > NAME_BYTES_MAX for name in path.split(b"/")):
        raise _refused("name-too-long", f"a name in {path[:80]!r} is too long")
    return key_of(posixpath.normpath(path).replace(b"//", b"/"))


def put(machine: Machine, key: str, content: bytes, meta: Meta) -> None:
    """Make or replace a file, and the folders above it; raises `DriverError`."""
    if is_folder(machine, key):
        raise _refused("is-a-directory", f"{key} is a directory")
    check_room(machine, content, key)
    make_folders(machine, posixpath.dirname(key), Meta(mode=0o755, user=meta.user, modified_us=meta.modified_us))
    machine.files[key] = content
    machine.metas[key] = meta


def check_room(machine: Machine, content: bytes, key: str) -> None:
    """Refuse what does not fit on the disk beside everything but `key`."""
    others = sum(len(kept) for name, kept in {**machine.files, **machine.uploads}.items() if name != key)
    room = min(DISK_BYTES_MAX, machine.spec.disk_mib << 20)
    if len(content) > FILE_BYTES_MAX or others + len(content) > room:
        raise _refused("disk-full", f"{key}: no space left on the simulated disk")


def make_folders(machine: Machine, key: str, meta: Meta) -> None:
    """Make a folder and those above it; raises `DriverError`."""
    while key not in ALWAYS and key not in machine.folders:
        if key in machine.files:
            raise _refused("exists", f"{key} is a file")
        machine.folders[key] = meta
        key = posixpath.dirname(key)


def is_folder(machine: Machine, key: str) -> bool:
    """Whether there is such a folder; one with anything in it is there."""
    prefix = key.rstrip("/") + "/"
    return key in ALWAYS or key in machine.folders or any(name.startswith(prefix) for name in machine.files)


def names_in(machine: Machine, key: str) -> list[bytes]:
    """The names in a folder, in the order of their bytes; raises `DriverError`."""
    if key in machine.files:
        raise _refused("not-a-directory", f"{key} is a file")
    if not is_folder(machine, key):
        raise _missing(key)
    prefix = key.rstrip("/") + "/"
    below = (one for one in (*machine.files, *machine.folders, *ALWAYS) if one.startswith(prefix) and one != prefix)
    return sorted({path_of(one.removeprefix(prefix).partition("/")[0]) for one in below})


def entry(machine: Machine, key: str) -> FileEntry:
    """What there is under a key; raises `DriverError`."""
    name = path_of(key).rpartition(b"/")[2]
    if key in machine.files:
        return _entry(name, "file", len(machine.files[key]), machine.metas.get(key, UNKNOWN))
    if is_folder(machine, key):
        return _entry(name, "directory", 0, machine.folders.get(key, Meta(mode=0o755, user="root", modified_us=0)))
    raise _missing(key)


def read(machine: Machine, key: str) -> bytes:
    """The content of a file; raises `DriverError`."""
    if key not in machine.files:
        raise _refused("not-a-file", f"{key} is a directory") if is_folder(machine, key) else _missing(key)
    return machine.files[key]


def move(machine: Machine, key: str, to: str) -> None:
    """Rename a file, or a folder with all below it; raises `DriverError`."""
    found = entry(machine, key)
    if not is_folder(machine, posixpath.dirname(to)):
        raise _missing(posixpath.dirname(to))
    if found.kind == "file":
        if is_folder(machine, to):
            raise _refused("is-a-directory", f"{to} is a directory")
    elif to in machine.files:
        raise _refused("not-a-directory", f"{to} is a file")
    elif (is_folder(machine, to) and names_in(machine, to)) or to.startswith(key + "/"):
        raise _refused("not-empty", f"{to} is there and not empty, or below what is moved")
    _rename(machine.files, key, to)
    _rename(machine.metas, key, to)
    _rename(machine.folders, key, to)


def remove(machine: Machine, key: str, *, recursive: bool) -> None:
    """Remove a file or folder; raises `DriverError`."""
    if drop(machine, key):
        return
    if not is_folder(machine, key):
        raise _missing(key)
    if key in ALWAYS:
        raise _refused("not-permitted", f"{key} stays")
    if names_in(machine, key) and not recursive:
        raise _refused("not-empty", f"{key} is not empty")
    for kept in (machine.files, machine.metas, machine.folders):
        for name in [name for name in kept if name == key or name.startswith(key + "/")]:
            del kept[name]


def drop(machine: Machine, key: str) -> bool:
    """Remove a file; whether there was one."""
    machine.metas.pop(key, None)
    return machine.files.pop(key, None) is not None


def _rename(kept: dict[str, Kept], key: str, to: str) -> None:
    for name in [name for name in kept if name == key or name.startswith(key + "/")]:
        kept[to + name.removeprefix(key)] = kept.pop(name)


def _entry(name: bytes, kind: Literal["file", "directory"], size_bytes: int, meta: Meta) -> FileEntry:
    number = USERS.get(meta.user, 0)
    return FileEntry(
        name=name,
        kind=kind,
        size_bytes=size_bytes,
        mode=meta.mode,
        user_id=number,
        group_id=number,
        modified_ns=meta.modified_us * 1000,
    )


def _missing(key: str) -> DriverError:
    return _refused("not-found", f"there is no {key}")


def _refused(code: str, detail: str) -> DriverError:
    return DriverError(code, detail, retryable=False)
