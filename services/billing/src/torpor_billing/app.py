"""The composition root of billing: settings from the environment, ports from the edge."""

import sys
from functools import partial

from pydantic import ValidationError

from torpor_billing.assembly import SERVICE, build
from torpor_billing.settings import BillingSettings
from torpor_messaging.edge import EXIT_REFUSED, run_service


def main() -> int:
    """Run billing until it is told to stop; the process's exit code."""
    try:
        settings = BillingSettings()
    except ValidationError as error:
        sys.stderr.write(f"{SERVICE}: correct these variables, TORPOR_BILLING_…: {error}\n")
        return EXIT_REFUSED
    return run_service(SERVICE, partial(build, settings))
