"""The order of requests as Firecracker's documentation has it, and what it says when they come in another."""

from typing import Any, Final

POST_BOOT: Final = "The requested operation is not supported after starting the microVM."
PRE_BOOT: Final = "The requested operation is not supported before starting the microVM."
NOT_FRESH: Final = (
    "Load snapshot error: Loading a microVM snapshot not allowed after configuring boot-specific resources."
)
NO_KERNEL: Final = "Start microvm error: Cannot start microvm without kernel configuration."
NOT_PAUSED: Final = "Create snapshot error: Cannot save the microVM state: Operation not allowed: the microVM runs"
SECOND_ROOT: Final = "Drive config error: Unable to create the virtio block device: A root block device already exists!"
NO_METRICS: Final = "Metrics error: Cannot initialize the metrics system due to bad user input: already initialized"
BOTH_MEMORIES: Final = "either `mem_file_path` or `mem_backend` must be present, exactly one of them"

CONFIGURES_BOOT: Final = {
    ("PUT", "/machine-config"),
    ("PATCH", "/machine-config"),
    ("PUT", "/boot-source"),
    ("PUT", "/drives/{drive_id}"),
    ("PUT", "/vsock"),
    ("PUT", "/entropy"),
    ("PUT", "/balloon"),
    ("PUT", "/network-interfaces/{iface_id}"),
    ("PUT", "/mmds/config"),
    ("PUT", "/hotplug/memory"),
    ("PUT", "/pmem/{id}"),
}
"""After one of these no snapshot can be loaded any more, and none of these is allowed after the start."""
ONLY_BEFORE: Final = CONFIGURES_BOOT | {
    ("PUT", "/logger"),
    ("PUT", "/metrics"),
    ("PUT", "/serial"),
    ("PUT", "/cpu-config"),
    ("PUT", "/snapshot/load"),
}
ONLY_AFTER: Final = {
    ("PATCH", "/vm"),
    ("PUT", "/snapshot/create"),
    ("PATCH", "/drives/{drive_id}"),
    ("PATCH", "/network-interfaces/{iface_id}"),
    ("PATCH", "/balloon"),
    ("PATCH", "/pmem/{id}"),
    ("PATCH", "/hotplug/memory"),
    ("GET", "/hotplug/memory"),
    ("GET", "/balloon/statistics"),
}


class Refused(Exception):  # noqa: N818  (an answer)
    """The answer 400, with Firecracker's words."""


class Rules:
    """What has been configured so far, and what therefore may come next."""

    def __init__(self) -> None:
        self.started = False
        self.paused = False
        self.boot_path = False
        self.config: dict[str, Any] = {}
        self.drives: dict[str, dict[str, Any]] = {}

    @property
    def state(self) -> str:
        """As GET / says it."""
        if not self.started:
            return "Not started"
        return "Paused" if self.paused else "Running"

    def allow(self, method: str, path: str, body: dict[str, Any], identity: str | None) -> None:
        """Raise `Refused` for a request that may not come now; note what it configures."""
        request = method, path
        if identity is not None and "drive_id" in body and body["drive_id"] != identity:
            raise Refused("The id from the path does not match the id from the body!")
        if self.started and (request in ONLY_BEFORE or body.get("action_type") == "InstanceStart"):
            raise Refused(POST_BOOT)
        if not self.started and (
            request in ONLY_AFTER or body.get("action_type") in {"FlushMetrics", "SendCtrlAltDel"}
        ):
            raise Refused(PRE_BOOT)
        if request in CONFIGURES_BOOT:
            self.boot_path = True
        self._check(request, body)
        if method == "PUT":
            self.config[path] = body

    def _check(self, request: tuple[str, str], body: dict[str, Any]) -> None:
        match request:
            case "PUT", "/drives/{drive_id}":
                self._add_drive(body)
            case "PATCH", "/drives/{drive_id}" if body["drive_id"] not in self.drives:
                raise Refused("Drive config error: Unable to patch the block device: Invalid block device ID!")
            case "PUT", "/metrics" if "/metrics" in self.config:
                raise Refused(NO_METRICS)
            case "PUT", "/snapshot/load":
                self._may_load(body)
            case "PUT", "/snapshot/create" if not self.paused:
                raise Refused(NOT_PAUSED)
            case "PUT", "/actions" if body["action_type"] == "InstanceStart" and "/boot-source" not in self.config:
                raise Refused(NO_KERNEL)

    def _add_drive(self, body: dict[str, Any]) -> None:
        if body["is_root_device"] and any(
            one["is_root_device"] for name, one in self.drives.items() if name != body["drive_id"]
        ):
            raise Refused(SECOND_ROOT)
        if "path_on_host" not in body or "is_read_only" not in body:
            raise Refused("Drive config error: Unable to create the virtio block device: Invalid block configuration")
        self.drives[body["drive_id"]] = body

    def _may_load(self, body: dict[str, Any]) -> None:
        if self.boot_path:
            raise Refused(NOT_FRESH)
        if ("mem_backend" in body) == ("mem_file_path" in body):
            raise Refused(BOTH_MEMORIES)
        if body.get("track_dirty_pages") and body.get("enable_diff_snapshots"):
            raise Refused("both `track_dirty_pages` and its deprecated name `enable_diff_snapshots` are given")
