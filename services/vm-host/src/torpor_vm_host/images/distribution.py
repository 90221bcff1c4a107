"""Which distribution this machine runs: guests are made of its packages, with its kernel."""

from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected

OS_RELEASE: Final = Path("/etc/os-release")


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A release of Debian or Ubuntu; `modules_apart`: its kernel's modules are a package of their own."""

    name: str
    suite: str
    kernel: str
    components: str
    modules_apart: bool = False


def find_distribution(release: Path = OS_RELEASE) -> Distribution:
    """This machine's distribution; raises `Rejected("image-build-unsupported")`."""
    found = read_release(release)
    suite = found.get("VERSION_CODENAME", "")
    if suite and found.get("ID") == "ubuntu":
        return Distribution(
            name="ubuntu",
            suite=suite,
            kernel="linux-image-virtual",
            components="main,universe",
            modules_apart=True,
        )
    if suite and found.get("ID") == "debian":
        return Distribution(name="debian", suite=suite, kernel="linux-image-cloud-amd64", components="main")
    raise Rejected(
        "image-build-unsupported",
        "this machine is not a Debian or Ubuntu release with a code name",
        "use one: guests are made of its packages; or take another driver (--driver simulated)",
    )


def read_release(release: Path = OS_RELEASE) -> dict[str, str]:
    """What `os-release` says; empty where there is none."""
    try:
        lines = release.read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip("\"'") for name, _, value in (line.partition("=") for line in lines)}
