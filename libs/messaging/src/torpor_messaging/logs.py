"""Logs: one line a record on standard error, `key=value`, and nothing in it that is secret."""

import logging
import re
import sys
import time
from typing import Final

_SECRET: Final = re.compile(r"\bS[UAONCX][A-Z2-7]{50,}\b|(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")
"""Nkey seeds, and passwords in URLs."""

_LONG_MAX: Final = 4000


class LineFormatter(logging.Formatter):
    """`time=… level=… service=… logger=… message=…`; whatever looks like a secret is struck out."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One record, one line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        message = _SECRET.sub("***", message[:_LONG_MAX])
        return (
            f"time={stamp}.{int(record.msecs):03d}Z level={record.levelname.lower()} service={self._service}"
            f" logger={record.name} message={_quoted(message)}"
        )


def set_up(service: str, level: str) -> None:
    """Log to standard error, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Its own lines repeat ours: every reconnect, every handler.
    logging.getLogger("faststream").setLevel(logging.ERROR)
    logging.getLogger("nats").setLevel(logging.ERROR)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
