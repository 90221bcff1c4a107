"""What the services have warned of lately, as their logs tell: why something that was asked for does not happen."""

import re
import time
from calendar import timegm
from typing import Final

from torpor.embedded.layout import DataDir
from torpor.embedded.log_files import last_lines

RECENT_S: Final = 60.0
_LINES_MAX: Final = 100
_LINE: Final = re.compile(
    r'time=(?P<time>[0-9T:-]{19})\.\d+Z level=(?:warning|error|critical) .*?message="(?P<message>(?:[^"\\]|\\.)*)"'
)

_SERVER_LINE: Final = re.compile(r"\[\d+\] (?P<time>\d{4}/\d\d/\d\d [0-9:]{8})\.\d+ \[(?:ERR|FTL)\] (?P<message>.*)")


def recent_warnings(data: DataDir, within_s: float = RECENT_S) -> dict[str, str]:
    """The last warning of each process that has given one within so many seconds."""
    found = {}
    oldest_s = time.time() - within_s
    for log in sorted(data.logs.glob("*.log")):
        for line in reversed(last_lines(log, _LINES_MAX)):
            said = _LINE.match(line) or _SERVER_LINE.match(line)
            if said is None:
                continue
            instant = said["time"].replace("/", "-").replace(" ", "T")
            if timegm(time.strptime(instant, "%Y-%m-%dT%H:%M:%S")) >= oldest_s:
                found[log.stem] = re.sub(r"\\(.)", r"\1", said["message"].replace("\\n", " "))
            break
    return found
