"""The supervisor's process: `python -m torpor.embedded OPTIONS`, where `torpor up` puts its options as JSON."""

import json
import sys
from typing import Final

from torpor.embedded.console import Console
from torpor.errors import CannotStart

EXIT_REFUSED: Final = 1


def main() -> int:
    """Run one whole until it is told to stop."""
    from torpor.embedded.starting import start  # noqa: PLC0415  (so that an error at import is said as any other)

    options = json.loads(sys.argv[1])
    console = Console(as_json=bool(options["json"]))
    try:
        return start(options["data_dir"], options["driver"], int(options["nats_port"]), console)
    except CannotStart as error:
        if options["json"]:
            console.say("error", "", error={"code": error.code, "message": error.message, "advice": error.advice})
        else:
            sys.stderr.write(f"torpor up: {error.message}\n  {error.advice}\n")
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
