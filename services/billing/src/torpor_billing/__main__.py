"""`python -m torpor_billing` runs billing."""

import sys

from torpor_billing.app import main

if __name__ == "__main__":
    sys.exit(main())
