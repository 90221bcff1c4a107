"""`python -m torpor_log_relay` runs the log-relay."""

import sys

from torpor_log_relay.app import main

if __name__ == "__main__":
    sys.exit(main())
