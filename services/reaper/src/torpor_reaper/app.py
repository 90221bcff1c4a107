"""The composition root of reaper: settings from the environment, ports from the edge."""

import sys
from functools import partial

from pydantic import ValidationError

from torpor_messaging.edge import EXIT_REFUSED, run_service
from torpor_reaper.assembly import SERVICE, build
from torpor_reaper.settings import ReaperSettings


def main() -> int:
    """Run reaper until it is told to stop; the process's exit code."""
    try:
        settings = ReaperSettings()
    except ValidationError as error:
        sys.stderr.write(f"{SERVICE}: correct these variables, TORPOR_REAPER_…: {error}\n")
        return EXIT_REFUSED
    return run_service(SERVICE, partial(build, settings))
