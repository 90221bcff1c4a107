"""`python -m torpor_vm_host` runs one vm-host."""

import sys

from torpor_vm_host.app import main

if __name__ == "__main__":
    sys.exit(main())
