"""`python -m torpor_snapshot_store` runs the snapshot store."""

import sys

from torpor_snapshot_store.app import main

if __name__ == "__main__":
    sys.exit(main())
