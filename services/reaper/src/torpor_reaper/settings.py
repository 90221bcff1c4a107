"""The reaper's settings, from the environment only (`TORPOR_REAPER_…`); times in seconds."""

import pydantic
import pydantic_settings

from torpor_contracts.session import RetryRule
from torpor_reaper.domain.cleanup import Rules


class ReaperSettings(pydantic_settings.BaseSettings):
    """`grace_s`: how long a frozen machine is left alone before the log is read again and it is destroyed.

    `notice_s`: how long a host must report a machine as nobody's before that is proposed. `silent_after_s`: after so
    long without a heartbeat, a host's word is called old. The rest bounds how often a host is asked.
    """

    model_config = pydantic_settings.SettingsConfigDict(env_prefix="TORPOR_REAPER_", frozen=True)

    grace_s: float = pydantic.Field(default=30.0, ge=0.0, le=86_400.0)
    notice_s: float = pydantic.Field(default=5.0, ge=0.0, le=3_600.0)
    silent_after_s: float = pydantic.Field(default=30.0, gt=0.0, le=86_400.0)
    attempts_max: int = pydantic.Field(default=5, ge=1, le=100)
    backoff_s: float = pydantic.Field(default=10.0, gt=0.0, le=3_600.0)
    backoff_s_max: float = pydantic.Field(default=60.0, gt=0.0, le=3_600.0)
    deadline_s: float = pydantic.Field(default=600.0, gt=0.0, le=86_400.0)

    def rules(self) -> Rules:
        """The rules as the domain knows them, and as they are put on record with each proposal."""
        return Rules(
            grace_s=self.grace_s,
            retry=RetryRule(
                attempts_max=self.attempts_max,
                backoff_s=self.backoff_s,
                backoff_s_max=self.backoff_s_max,
                deadline_s=self.deadline_s,
            ),
        )
