"""What the supervisor says: lines for people, or one JSON object a line for programs."""

import json
import sys
from typing import Any


class Console:
    """Prints to standard output; a reader that has gone away is no reason to stop the whole."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, event: str, text: str, **details: Any) -> None:
        """One thing that happened: `text` for people, `event` and `details` for programs; nothing when empty."""
        line = json.dumps({"event": event, **details}) if self._as_json else text
        if not line:
            return
        try:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        except (BrokenPipeError, ValueError):
            # ValueError: closed by the branch below. The devnull keeps the interpreter's own last flush quiet.
            sys.stdout = open("/dev/null", "w", encoding="utf-8")  # noqa: PTH123, SIM115
        except OSError:
            return
