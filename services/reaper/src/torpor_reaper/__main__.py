"""`python -m torpor_reaper` runs reaper."""

import sys

from torpor_reaper.app import main

if __name__ == "__main__":
    sys.exit(main())
