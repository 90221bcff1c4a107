"""The scheduler's composition root: settings from the environment, ports from the edge."""

import sys
from functools import partial

from pydantic import ValidationError

from torpor_messaging.edge import EXIT_REFUSED, run_service
from torpor_scheduler.assembly import build
from torpor_scheduler.sending import SERVICE
from torpor_scheduler.settings import SchedulerSettings


def main() -> int:
    """Run the scheduler until it is told to stop; the process's exit code."""
    try:
        settings = SchedulerSettings()
    except ValidationError as error:
        sys.stderr.write(f"{SERVICE}: correct these variables, TORPOR_SCHEDULER_…: {error}\n")
        return EXIT_REFUSED
    return run_service(SERVICE, partial(build, settings))
