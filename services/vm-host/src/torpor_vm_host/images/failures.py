"""What it means when a step of a build fails: a typed error that names the cause and what to do about it."""

import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_vm_host.images.recipe import LoadedRecipe

SAID_MAX: Final = 12
"""Lines of a failed step that its error quotes."""
COMMAND_FAILED: Final = "torpor: this command of the recipe failed:"
FILE_FAILED: Final = "torpor: this file of the recipe cannot be put in place:"
FILE_SYSTEM_FAILED: Final = "torpor: the file system cannot be made"
NO_SPACE: Final = "No space left on device"
MALFORMED: Final = "malformed-recipe"

_UNKNOWN_PACKAGE: Final = re.compile(
    r"Unable to locate package (\S+)|Package '?([a-z0-9.+-]+)'? has no installation candidate"
)
_NO_PEER: Final = re.compile(
    r"Could not resolve|Could not connect|Connection (refused|timed out|failed)|Failed to fetch"
)
_COMMAND: Final = re.compile(re.escape(COMMAND_FAILED) + r" (\d+) (\d+) (\d+)")
_FILE: Final = re.compile(re.escape(FILE_FAILED) + r" (\d+) (\d+)")
_FULL_FILE_SYSTEM: Final = re.compile(r"while populating file system|Could not allocate|No free space")


def failed(step: str, why: str) -> Rejected:
    """A step that failed for a reason of its own."""
    return Rejected("image-build-failed", f"{step} failed: {why}", "mend what it names, then try again")


def no_space(place: Path) -> Rejected:
    """The build ran out of space."""
    advice = (
        f"free some below {place} (an image takes up to 3 GiB while it is built), or name another: TORPOR_CACHE_DIR"
    )
    return Rejected("image-no-space", f"the image cannot be built: there is no space left in {place}", advice)


def of_system(error: OSError, place: Path) -> Rejected:
    """What the system refused while an image was built below `place`."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return no_space(place)
    named = f"{error.filename}: " if error.filename else ""
    why = f"{named}{error.strerror or error}"
    return Rejected("image-cache-unusable", f"the image cannot be built: {why}", f"check {place}, or TORPOR_CACHE_DIR")


def unknown_packages(unknown: set[str], chain: Sequence[LoadedRecipe]) -> Rejected:
    """The recipe names packages that nobody knows."""
    advice = f"correct the recipe {chain[-1].recipe.name}; apt-cache search WORD finds names, apt-get update new ones"
    return Rejected("image-package-unknown", f"there is no package {', '.join(sorted(unknown))}", advice)


def of_installation(said: Sequence[str], chain: Sequence[LoadedRecipe], place: Path) -> Rejected:
    """What the last lines of mmdebstrap and of the recipe's commands come to."""
    text = "\n".join(said)
    if NO_SPACE in text:
        return no_space(place)
    last = failed("installing the guest's packages", "\n".join(said[-SAID_MAX:]))
    return _of_recipe(said, text, chain) or _of_packages(said, text, chain) or last


def _of_recipe(said: Sequence[str], text: str, chain: Sequence[LoadedRecipe]) -> Rejected | None:
    if found := _COMMAND.search(text):
        recipe, number = chain[int(found[1])].recipe, int(found[2])
        message = f"command {number + 1} of {recipe.name} ended with {found[3]}: {recipe.commands[number]}"
        return Rejected("image-command-failed", _quoting(message, _before(said, COMMAND_FAILED)), "correct the recipe")
    if found := _FILE.search(text):
        file = chain[int(found[1])].recipe.files[int(found[2])]
        message = f"{file.source} cannot be put at {file.target}"
        return Rejected("image-file-failed", _quoting(message, _before(said, FILE_FAILED)), "correct the recipe")
    if FILE_SYSTEM_FAILED in text and _FULL_FILE_SYSTEM.search(text):
        disk_mib = max(loaded.recipe.disk_mib for loaded in chain)
        advice = f"raise disk_mib in the recipe {chain[-1].recipe.name}"
        return Rejected("image-disk-too-small", f"what is installed does not fit into {disk_mib} MiB", advice)
    return None


def _of_packages(said: Sequence[str], text: str, chain: Sequence[LoadedRecipe]) -> Rejected | None:
    unknown = {a or b for a, b in _UNKNOWN_PACKAGE.findall(text)}
    if unknown:
        return unknown_packages(unknown, chain)
    if _NO_PEER.search(text):
        advice = "check the network, and what apt says: apt-get update"
        return Rejected("image-packages-unreachable", _quoting("packages cannot be fetched", said), advice)
    return None


def _before(said: Sequence[str], mark: str) -> list[str]:
    """What was said between mmdebstrap's last own word and the mark."""
    end = next(number for number, line in enumerate(said) if line.startswith(mark))
    begin = max((n + 1 for n, line in enumerate(said[:end]) if line.startswith("I: ")), default=0)
    return list(said[begin:end])


def _quoting(message: str, said: Sequence[str]) -> str:
    last = [line for line in said if line.strip()][-SAID_MAX:]
    return "\n".join([f"{message}; it said:", *last]) if last else message
