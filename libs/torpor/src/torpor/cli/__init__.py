"""The `torpor` command: for people by default, for programs with `--json`.

Exit codes: 0 done; 1 refused, or not as it should be; 2 wrong usage; 3 nobody answered, or not yet so; 130 interrupted.
`session exec` exits with the program's own code (124: it ran out of time, 125: it was lost, 126: it could not run).
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Final

DONE: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 3
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141


def main() -> None:
    """The entry point."""
    sys.exit(run(sys.argv[1:]))


def run(tokens: Sequence[str]) -> int:
    """Carry out one command line; the exit code."""
    _open_what_is_closed()
    try:
        code = _carried_out(tokens)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough. The interpreter's own last flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # A full disk under our output: the error itself cannot be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"torpor: the output cannot be written: {error.strerror}\n  free some space where it goes\n")
        return REFUSED
    return code


def _open_what_is_closed() -> None:
    """Whoever starts us may have closed our output; then Python has none at all, and writing fails oddly."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  (for as long as we run)


def _carried_out(tokens: Sequence[str]) -> int:
    from cyclopts import CycloptsError  # noqa: PLC0415  (imports are what a command's start costs)

    from torpor.cli.app import app  # noqa: PLC0415
    from torpor_contracts.errors import TorporError  # noqa: PLC0415

    try:
        result = app(list(tokens), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        help_for = " ".join(["torpor", *(error.command_chain or ()), "--help"])
        return _failed(tokens, "usage", _one_line(str(error)), f"see {help_for}", USAGE)
    except TorporError as error:
        code = str(getattr(error, "code", type(error).__name__))
        message = str(getattr(error, "message", error))
        advice = str(getattr(error, "advice", "see `torpor status`"))
        notes = getattr(error, "__notes__", [])
        return _failed(tokens, code, message, advice, _exit_code(error), *notes)
    except BrokenPipeError:
        raise
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        advice = "check the path, its permissions and the free space"
        return _failed(tokens, "system", f"{named}{error.strerror or error}", advice, REFUSED)
    return result if isinstance(result, int) else DONE


def _exit_code(error: Exception) -> int:
    from torpor.errors import NotYet, Unavailable  # noqa: PLC0415
    from torpor_contracts.errors import Transient  # noqa: PLC0415

    return UNAVAILABLE if isinstance(error, Unavailable | NotYet | Transient) else REFUSED


def _failed(tokens: Sequence[str], code: str, message: str, advice: str, exit_code: int, *notes: str) -> int:
    own = list(tokens)[: list(tokens).index("--")] if "--" in tokens else tokens
    if "--json" in own:
        told = {"code": code, "message": message, "advice": advice} | ({"notes": list(notes)} if notes else {})
        sys.stdout.write(json.dumps({"error": told}) + "\n")
    else:
        sys.stdout.flush()
        sys.stderr.write("\n  ".join([f"torpor: {message}", advice, *notes]) + "\n")
    return exit_code


def _one_line(text: str) -> str:
    return " ".join(text.split())
