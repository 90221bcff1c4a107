"""A machine as Firecracker has one: what its requests do, with files and a guest in place of hardware."""

import errno
import json
import mmap
import os
import stat
import tempfile
import zlib
from pathlib import Path
from typing import Any, Final

from tests.support.firecracker.guest import Guest, framed, unframed
from tests.support.firecracker.rules import Refused, Rules
from tests.support.firecracker.userfault import PAGE, FaultedMemory

ELF: Final = b"\x7fELF"
BZIMAGE: Final = b"HdrS"
BZIMAGE_SINCE: Final = (1, 17, 0)
OVERRIDES_SINCE: Final = (1, 16, 0)
TRACKS_SINCE: Final = (1, 14, 0)
RESETS: Final = b"\xb0\xfe\xe6\x64"
HANGS: Final = b"\xeb\xfe"
"""What the kernels of nothing but a few instructions do: write to the keyboard controller, or jump to themselves."""


class Machine:
    """One machine in the jail `root`, whose files belong to `owner`."""

    def __init__(self, root: Path, owner: int, version: tuple[int, int, int]) -> None:
        self.root = root
        self.owner = owner
        self.version = version
        self.rules = Rules()
        self.guest: Guest | None = None
        self.vsock: Path | None = None
        self.ended = self.succeeded = False
        self._tracks = False
        self._memory = b""
        """Memory as it was when it was last snapshot or loaded."""
        self._faulted: FaultedMemory | None = None

    def take(self, method: str, path: str, body: dict[str, Any], identity: str | None) -> None:
        """Do what a request asks for; raises `Refused`."""
        self.rules.allow(method, path, body, identity)
        try:
            match method, path:
                case "PUT", "/logger" | "/metrics":
                    self._open(body.get("log_path") or body["metrics_path"], write=True)
                case "PUT", "/boot-source":
                    self._boot_source(body)
                case "PUT", "/drives/{drive_id}":
                    self._open(body["path_on_host"], write=not body["is_read_only"])
                case "PUT", "/actions" if body["action_type"] == "InstanceStart":
                    self._boot()
                case "PATCH", "/vm":
                    self._set_state(body["state"])
                case "PUT", "/snapshot/create":
                    self._snapshot(body)
                case "PUT", "/snapshot/load":
                    self._load(body)
                case _:  # what is only configured
                    pass
        except OSError as error:
            raise Refused(f"{method} {path}: {error}") from error

    # --- boot ---

    def _boot_source(self, body: dict[str, Any]) -> None:
        head = self._open(body["kernel_image_path"], write=False).read_bytes()
        if not head.startswith(ELF) and (self.version < BZIMAGE_SINCE or head[0x202:0x206] != BZIMAGE):
            raise Refused("Boot source error: Kernel Loader: failed to load ELF kernel image: Invalid Elf magic number")
        if "initrd_path" in body:
            self._open(body["initrd_path"], write=False)

    def _boot(self) -> None:
        config = self.rules.config
        kernel = self._inside(config["/boot-source"]["kernel_image_path"]).read_bytes()
        if kernel.endswith(HANGS) or RESETS in kernel:
            self.rules.started = True
            self.succeeded = self.ended = RESETS in kernel
            return
        if "/vsock" not in config or "torpor.agent=vsock:" not in config["/boot-source"].get("boot_args", ""):
            raise Refused("Start microvm error: the agent of this image is met on a vsock only")
        if not any(drive["is_root_device"] for drive in self.rules.drives.values()):
            raise Refused("Start microvm error: the kernel finds no root file system")
        self._tracks = bool(config["/machine-config"].get("track_dirty_pages"))
        self._run(self._guest(), config["/vsock"]["uds_path"])

    def _guest(self) -> Guest:
        return Guest(Path(tempfile.mkdtemp(prefix="guest-", dir=self.root)))

    def _run(self, guest: Guest, vsock: str) -> None:
        path = self._inside(vsock)
        if path.exists():
            raise OSError(errno.EADDRINUSE, "Cannot create backend for vsock device", vsock)
        guest.boot()
        self.guest, self.vsock = guest, path
        self.rules.started = True

    # --- life ---

    def _set_state(self, state: str) -> None:
        assert self.guest is not None
        self.rules.paused = state == "Paused"
        self.guest.stop() if self.rules.paused else self.guest.go_on()

    def _snapshot(self, body: dict[str, Any]) -> None:
        assert self.guest is not None
        size = self.rules.config["/machine-config"]["mem_size_mib"] * 2**20
        memory = framed(self.guest.memory(), size)
        (drive,) = self.rules.drives.values()
        disk = self._inside(drive["path_on_host"])
        content = self.guest.disk()
        with disk.open("r+b") as file:
            file.write(framed(content, max(PAGE, len(content) + PAGE)))
        config = {
            "machine": self.rules.config["/machine-config"],
            "drives": self.rules.drives,
            "vsock": self.rules.config["/vsock"],
            "version": self.version,
        }
        plain = json.dumps(config).encode()
        self._inside(body["snapshot_path"]).write_bytes(zlib.crc32(plain).to_bytes(8, "big") + plain)
        diff = body.get("snapshot_type") == "Diff"
        before = self._memory if diff and self._tracks else b""
        with self._inside(body["mem_file_path"]).open("wb") as file:
            file.truncate(size)
            for at in range(0, size, PAGE):
                page = memory[at : at + PAGE]
                if not diff or page != before[at : at + PAGE]:
                    os.pwrite(file.fileno(), page, at)
        self._memory = memory

    def _load(self, body: dict[str, Any]) -> None:
        """A load that fails ends the process: it may be in any state."""
        self.ended = True
        if self.version < OVERRIDES_SINCE and {"vsock_override", "clock_realtime"} & body.keys():
            raise Refused("unknown field `vsock_override` or `clock_realtime`")
        if self.version < TRACKS_SINCE and "track_dirty_pages" in body:
            raise Refused("unknown field `track_dirty_pages`")
        state = self._open(body["snapshot_path"], write=False).read_bytes()
        if zlib.crc32(state[8:]) != int.from_bytes(state[:8], "big"):
            raise Refused("Load snapshot error: Failed to load snapshot state from file: CRC64 validation failed")
        config = json.loads(state[8:])
        if tuple(config["version"]) != self.version:
            raise Refused("Load snapshot error: Invalid data version")
        for drive in config["drives"].values():
            self._open(drive["path_on_host"], write=not drive["is_read_only"])
        self._tracks = bool(body.get("track_dirty_pages") or body.get("enable_diff_snapshots"))
        self._memory = self._loaded_memory(body["mem_backend"], config["machine"]["mem_size_mib"] * 2**20)
        self.rules.config |= {"/machine-config": config["machine"], "/vsock": config["vsock"]}
        self.rules.drives = config["drives"]
        guest = self._guest()
        guest.unpack(unframed(self._memory))
        (drive,) = self.rules.drives.values()
        disk = unframed(self._inside(drive["path_on_host"]).read_bytes())
        if disk:
            guest.unpack(disk)
        self._run(guest, body.get("vsock_override", config["vsock"])["uds_path"])
        self.rules.paused = True
        guest.stop()
        self.ended = False
        if body.get("resume_vm"):
            self._set_state("Resumed")

    def _loaded_memory(self, backend: dict[str, Any], size: int) -> bytes:
        path = self._inside(backend["backend_path"])
        if backend["backend_type"] == "Uffd":
            here = Path.cwd()
            self._faulted = FaultedMemory(size, path)
            os.chdir(here)
            return bytes(self._faulted.memory)
        with self._open(backend["backend_path"], write=False).open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise Refused("Load snapshot error: the memory file does not have the size of the machine's memory")
            return bytes(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))

    # --- files of the jail ---

    def _inside(self, name: str) -> Path:
        path = self.root / name.lstrip("/")
        if ".." in path.parts:
            raise OSError(errno.ENOENT, "there is nothing outside of the jail", name)
        return path

    def _open(self, name: str, *, write: bool) -> Path:
        """The file, if the machine's user may read it (and write to it)."""
        path = self._inside(name)
        found = path.stat()
        wanted = (stat.S_IRUSR | stat.S_IWUSR) if write else stat.S_IRUSR
        shift = 0 if found.st_uid == self.owner else 6
        if found.st_mode & (wanted >> shift) != wanted >> shift:
            raise OSError(errno.EACCES, "the machine's user may not", name)
        return path
