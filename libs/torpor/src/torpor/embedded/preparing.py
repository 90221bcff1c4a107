"""What a start needs heavy libraries for, in a process that is gone once the whole is ready.

`python -m torpor.embedded.preparing OPTIONS` writes keys and the server's configuration, makes the streams, and waits
until everything answers. Each step is told to the supervisor as one JSON object on standard output.
"""

import asyncio
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from torpor.embedded.answering import operator, until_ready
from torpor.embedded.layout import DataDir
from torpor.embedded.process_table import age_s
from torpor.embedded.settings import services_of, sqlite_dsn
from torpor_contracts.errors import Rejected, TorporError
from torpor_messaging.nats_config import ADMIN, OPERATOR, Configuration, ServerSettings, write_configuration
from torpor_messaging.nats_link import Identity, Link
from torpor_messaging.streams import create_all

TENANT: Final = "default"
CONNECT_TIMEOUT_S: Final = 20.0
READY_TIMEOUT_S: Final = 55.0
WORKING_S: Final = 5.0
_OUTPUT_BYTES_MAX: Final = 1024 * 1024 * 1024
_OUTPUT_BYTES_MIN: Final = 64 * 1024 * 1024


def tell(step: str, **details: Any) -> None:
    """One step for the supervisor."""
    sys.stdout.write(json.dumps({"step": step, **details}) + "\n")
    sys.stdout.flush()


async def prepare(data: DataDir, driver: str, port: int, supervisor_pid: int) -> None:
    """All steps in order; raises a `TorporError` when one cannot be done."""
    chosen = await prepare_machines(driver)
    url = f"nats://127.0.0.1:{port}"
    settings = ServerSettings(store_dir=data.nats / "store", port=port, name="torpor-embedded")
    written = write_configuration(data.nats, settings, tenants=(TENANT,), keys=data.keys)
    tell(
        "configured",
        nats_url=url,
        nats_config=str(written.server),
        driver=chosen,
        log_dsn=sqlite_dsn(data.log_database),
        client_seed_file=str(written.seeds[f"tenant-{TENANT}"]),
        operator_seed_file=str(written.seeds[OPERATOR]),
        admin_seed_file=str(written.seeds[ADMIN]),
        services=services_of(data, url, written.seeds, chosen),
    )
    await _make_streams(data, url, written)
    tell("streams")
    link = await Link.open(url, operator(written.seeds[OPERATOR]), timeout_s=CONNECT_TIMEOUT_S)
    try:
        missing = await until_ready(link, list(services_of(data, url, written.seeds, chosen)), READY_TIMEOUT_S)
    finally:
        await link.close()
    if missing:
        raise Rejected("not-ready", f"these do not answer: {', '.join(missing)}", f"see {data.logs}")
    await _wake_interrupted(data, url, written)
    tell("ready", ready_s=age_s(supervisor_pid))


async def _make_streams(data: DataDir, url: str, written: Configuration) -> None:
    admin = Identity(ADMIN, f"_INBOX.system.{ADMIN}", written.seeds[ADMIN])
    link = await Link.open(url, admin, timeout_s=CONNECT_TIMEOUT_S)
    try:
        # The server sets aside what a stream may grow to: a small disk gets a small one.
        free = shutil.disk_usage(data.root).free
        await create_all(link, output_bytes_max=max(_OUTPUT_BYTES_MIN, min(_OUTPUT_BYTES_MAX, free // 8)))
    finally:
        await link.close()


async def _wake_interrupted(data: DataDir, url: str, written: Configuration) -> None:
    if not data.interrupted.exists():
        return
    from torpor.client.api import Torpor  # noqa: PLC0415  (only then)
    from torpor.client.connection import Connection  # noqa: PLC0415
    from torpor.client.discovery import Endpoint  # noqa: PLC0415
    from torpor.embedded.leaving import wake_again  # noqa: PLC0415

    endpoint = Endpoint(url, written.seeds[f"tenant-{TENANT}"], TENANT)
    connection = await Connection.open(endpoint, CONNECT_TIMEOUT_S)
    try:
        woken = await wake_again(Torpor(connection), data.interrupted)
    finally:
        await connection.close()
    if woken:
        tell("working", text=f"waking {woken} session{'s' * (woken > 1)} whose programs were interrupted")


async def prepare_machines(wanted: str) -> str:
    """The driver to use, with what it needs once and what may take minutes; the supervisor hears that it goes on."""
    from pydantic import ValidationError  # noqa: PLC0415  (heavy; told as any other error)

    from torpor_messaging.system import SystemClock  # noqa: PLC0415
    from torpor_vm_host.drivers import choose_driver  # noqa: PLC0415
    from torpor_vm_host.settings import VmHostSettings  # noqa: PLC0415

    try:
        options = VmHostSettings().driver_options()
    except ValidationError as error:
        raise Rejected("illegal-setting", f"a variable TORPOR_VM_HOST_… is wrong: {error}", "correct it") from error

    def told(text: str) -> None:
        tell("working", text=text)

    kind = await choose_driver(wanted)
    work = asyncio.ensure_future(kind.prepare(options, SystemClock(), told))
    while not (await asyncio.wait([work], timeout=WORKING_S))[0]:
        tell("working")
    await work
    return kind.name


def main() -> int:
    """Read the options, prepare, tell; the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    options = json.loads(sys.argv[1])
    data = DataDir(Path(options["data_dir"]))
    try:
        asyncio.run(prepare(data, options["driver"], int(options["nats_port"]), int(options["supervisor_pid"])))
    except TorporError as error:
        tell(
            "refused",
            code=str(getattr(error, "code", "cannot-start")),
            message=str(getattr(error, "message", error)),
            advice=str(getattr(error, "advice", f"see {data.logs}")),
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
