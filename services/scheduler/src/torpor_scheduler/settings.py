"""The scheduler's settings, from the environment only: `TORPOR_SCHEDULER_…`; read in `app.py` and nowhere below."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from torpor_contracts.session import RetryRule
from torpor_scheduler.domain.session_decisions import Limits, Rules


class SchedulerSettings(BaseSettings):
    """Times in seconds, sizes in MiB unless the name says otherwise.

    `heartbeat_s` is how often hosts send a sign of life, and how often the scheduler looks at them;
    `host_lost_after_s` the silence after which a host is declared lost; `reconcile_after_s` how long a report may be
    on its way before it is missed.
    """

    model_config = SettingsConfigDict(env_prefix="TORPOR_SCHEDULER_", frozen=True)

    host_lost_after_s: float = Field(default=10.0, gt=0)
    look_every_s: float = Field(default=1.0, gt=0)
    sweep_every_s: float = Field(default=1.0, gt=0)
    sweep_slack_s: float = Field(default=1.0, gt=0)
    reconcile_every_s: float = Field(default=5.0, gt=0)
    reconcile_after_s: float = Field(default=5.0, gt=0)

    start_timeout_s: float = Field(default=60.0, gt=0)
    suspend_timeout_s: float = Field(default=120.0, gt=0)
    checkpoint_timeout_s: float = Field(default=120.0, gt=0)
    stop_timeout_s: float = Field(default=30.0, gt=0)
    placement_backoff_s_max: float = Field(default=15.0, gt=0)
    suspend_attempts_max: int = Field(default=8, ge=1)
    suspend_backoff_s: float = Field(default=30.0, gt=0)
    suspend_backoff_s_max: float = Field(default=900.0, gt=0)
    checkpoint_attempts_max: int = Field(default=3, ge=1)
    checkpoint_backoff_s: float = Field(default=1.0, gt=0)
    checkpoint_backoff_s_max: float = Field(default=10.0, gt=0)
    checkpoint_deadline_s: float = Field(default=300.0, gt=0)

    vcpus_max: int = Field(default=32, ge=1)
    memory_mib_max: int = Field(default=131_072, ge=16)
    disk_mib_max: int = Field(default=1_048_576, ge=1)
    idle_after_s_min: float = Field(default=0.1, gt=0)
    idle_after_s_max: float = Field(default=30 * 86_400.0, gt=0)
    execs_max: int = Field(default=64, ge=1)
    program_bytes_max: int = Field(default=262_144, ge=1)
    exec_timeout_s_max: float = Field(default=7 * 86_400.0, gt=0)
    forks_max: int = Field(default=100, ge=1)

    def rules(self) -> Rules:
        """What decisions are made by."""
        return Rules(
            limits=Limits(
                vcpus_max=self.vcpus_max,
                memory_mib_max=self.memory_mib_max,
                disk_mib_max=self.disk_mib_max,
                idle_after_s_min=self.idle_after_s_min,
                idle_after_s_max=self.idle_after_s_max,
                execs_max=self.execs_max,
                program_bytes_max=self.program_bytes_max,
                exec_timeout_s_max=self.exec_timeout_s_max,
                forks_max=self.forks_max,
            ),
            start_timeout_s=self.start_timeout_s,
            suspend_timeout_s=self.suspend_timeout_s,
            checkpoint_timeout_s=self.checkpoint_timeout_s,
            stop_timeout_s=self.stop_timeout_s,
            placement_backoff_s_max=self.placement_backoff_s_max,
            suspend_retry=RetryRule(
                attempts_max=self.suspend_attempts_max,
                backoff_s=self.suspend_backoff_s,
                backoff_s_max=self.suspend_backoff_s_max,
                deadline_s=86_400.0,
            ),
            checkpoint_retry=RetryRule(
                attempts_max=self.checkpoint_attempts_max,
                backoff_s=self.checkpoint_backoff_s,
                backoff_s_max=self.checkpoint_backoff_s_max,
                deadline_s=self.checkpoint_deadline_s,
            ),
        )
