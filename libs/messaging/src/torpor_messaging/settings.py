"""What every service is told by its environment: `TORPOR_…`. Read in `app.py` and nowhere below."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """`TORPOR_NATS_URL` and the rest.

    `nats_url`: one server, or several separated by commas. `nkey_seed_file`: the key of this service. `log_dsn`: the
    event log. `views_dsn`: this service's own views, an SQLite file or a PostgreSQL database (in a schema of its own).
    `die_with_parent`: end with the process that started this one. `drain_s`: how long stopping may take.
    """

    model_config = SettingsConfigDict(env_prefix="TORPOR_", frozen=True)

    nats_url: str = "nats://127.0.0.1:4222"
    nkey_seed_file: Path | None = None
    log_dsn: str
    views_dsn: str
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    die_with_parent: bool = False
    start_s: float = Field(default=60.0, gt=0)
    drain_s: float = Field(default=8.0, gt=0)

    @field_validator("nats_url")
    @classmethod
    def _must_name_servers(cls, given: str) -> str:
        for server in given.split(","):
            parts = urlsplit(server.strip())
            if parts.scheme not in {"nats", "tls"} or not parts.hostname:
                raise ValueError(f"{server!r} is no NATS URL; write nats://host:port")
            if parts.username or parts.password:
                raise ValueError("put no password into the URL; name a seed file with TORPOR_NKEY_SEED_FILE")
        return given
