"""`python -m torpor_scheduler` runs the scheduler."""

import sys

from torpor_scheduler.app import main

if __name__ == "__main__":
    sys.exit(main())
