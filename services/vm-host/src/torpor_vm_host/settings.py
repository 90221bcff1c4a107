"""The vm-host's settings, from the environment only: `TORPOR_VM_HOST_…`; read in `app.py` and nowhere below."""

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from torpor_chunks.locations import default_key_file, default_url
from torpor_contracts.host import HostCapacity
from torpor_contracts.ids import is_token
from torpor_vm_host.adapters.qemu.options import Enforcement, QemuOptions, SlotPolicy, WantedAccelerator
from torpor_vm_host.adapters.simulated.driver import Timing
from torpor_vm_host.bases import Keeping
from torpor_vm_host.bounded import DriverLimits
from torpor_vm_host.drivers import DriverOptions
from torpor_vm_host.outputs import OutputLimits


class VmHostSettings(BaseSettings):
    """Times in seconds, sizes in MiB unless the name says otherwise.

    `directory` is where machines live on this host's disk, below `TORPOR_DATA_DIR` by default. `TORPOR_CHUNKS_URL` and
    `TORPOR_CHUNKS_KEY_FILE` say where checkpoints are kept, as for the snapshot store; of a store that is not on this
    machine, `chunks_cache_mib` of what was put or read last are kept beside the machines. `vcpus`, `memory_mib`,
    `disk_mib` and `vms_max` are what the host offers; left out, what the driver finds. `accelerator`, `limits` (of
    processor, memory and processes, by control groups) and `slots_…` (machines kept ready, and the memory they may have
    together) are for the QEMU driver. `keep_templates` says when the templates that checkpoints build on are put into
    the chunk store, without which no other host can load these: `always`, from the start, and no checkpoint is
    registered before; `background`, after `keep_templates_after_s`, and nothing waits for it; `never`. `heartbeat_s`
    belongs to the scheduler's idea of silence: change both.
    """

    model_config = SettingsConfigDict(env_prefix="TORPOR_VM_HOST_", frozen=True, populate_by_name=True)

    host_id: str = "host-local"
    driver: str = "auto"
    data_dir: Path = Field(default=Path("torpor-data"), validation_alias="TORPOR_DATA_DIR")
    directory: Path | None = None
    chunks_url: str | None = Field(default=None, validation_alias="TORPOR_CHUNKS_URL")
    chunks_key_file: Path | None = Field(default=None, validation_alias="TORPOR_CHUNKS_KEY_FILE")
    chunks_cache_mib: int = Field(default=2048, ge=0)

    vcpus: int | None = Field(default=None, ge=1)
    memory_mib: int | None = Field(default=None, ge=1)
    disk_mib: int | None = Field(default=None, ge=1)
    vms_max: int | None = Field(default=None, ge=1)

    keep_templates: Keeping = "always"
    keep_templates_after_s: float = Field(default=60.0, ge=0)

    heartbeat_s: float = Field(default=2.0, gt=0)
    look_every_s: float = Field(default=1.0, gt=0)
    claim_s_max: float = Field(default=180.0, gt=0)
    execs_max: int = Field(default=64, ge=1)
    output_bytes_max: int = Field(default=64 * 1024 * 1024, ge=1)

    driver_look_s: float = Field(default=10.0, gt=0)
    driver_destroy_s: float = Field(default=20.0, gt=0)
    driver_start_s: float = Field(default=120.0, gt=0)
    driver_checkpoint_s: float = Field(default=120.0, gt=0)
    driver_file_s: float = Field(default=60.0, gt=0)
    exec_grace_s: float = Field(default=30.0, gt=0)

    accelerator: WantedAccelerator = "auto"
    limits: Enforcement = "if-possible"
    slots_warm: int = Field(default=1, ge=0, le=64)
    slots_blank: int = Field(default=1, ge=0, le=64)
    slots_memory_mib: int = Field(default=512, ge=0)
    slots_idle_s: float = Field(default=300.0, gt=0)

    simulated_start_s: float = Field(default=0.02, ge=0)
    simulated_checkpoint_s: float = Field(default=0.02, ge=0)

    @field_validator("host_id")
    @classmethod
    def _must_be_a_host(cls, given: str) -> str:
        if not is_token(given) or not given.startswith("host-"):
            raise ValueError("a host's id is `host-` and then a-z, 0-9 and '-', 63 characters at most")
        return given

    def vms_directory(self) -> Path:
        """Where this host's machines live."""
        return self.directory or self.data_dir / "vm-host" / self.host_id

    def store_url(self) -> str:
        """Where checkpoints are kept."""
        return self.chunks_url or default_url(self.data_dir)

    def key_file(self) -> Path:
        """The master keys of the chunk store."""
        return self.chunks_key_file or default_key_file(self.data_dir)

    def offered(self, found: HostCapacity) -> HostCapacity:
        """What the host offers, given what its driver found."""
        return HostCapacity(
            vcpus=self.vcpus or found.vcpus,
            memory_mib=self.memory_mib or found.memory_mib,
            disk_mib=self.disk_mib or found.disk_mib,
            vms_max=self.vms_max or found.vms_max,
        )

    def driver_limits(self) -> DriverLimits:
        """How long a driver may take."""
        return DriverLimits(
            look_s=self.driver_look_s,
            destroy_s=self.driver_destroy_s,
            start_s=self.driver_start_s,
            checkpoint_s=self.driver_checkpoint_s,
            file_s=self.driver_file_s,
            exec_grace_s=self.exec_grace_s,
        )

    def output_limits(self) -> OutputLimits:
        """How much output is kept."""
        return OutputLimits(exec_bytes_max=self.output_bytes_max)

    def driver_options(self) -> DriverOptions:
        """What the operator chose of drivers."""
        slots = SlotPolicy(
            warm=self.slots_warm,
            blank=self.slots_blank,
            memory_mib_max=self.slots_memory_mib,
            idle_s=self.slots_idle_s,
        )
        return DriverOptions(
            timing=Timing(start_s=self.simulated_start_s, checkpoint_s=self.simulated_checkpoint_s),
            qemu=QemuOptions(accelerator=self.accelerator, limits=self.limits, slots=slots),
        )
