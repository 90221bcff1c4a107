"""A guest image's recipe: what it is made of, and the key that changes when any of it does."""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import is_token

FORMAT: Final = 3
"""Part of every key: raised when the way images are built changes, so that all are built anew."""
PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]+")
DISK_MIB_MIN: Final = 64
DISK_MIB_MAX: Final = 65_536


class RecipeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file to put into the image: `source` beside the recipe, `target` absolute in the guest, `mode` in octal."""

    source: str
    target: str
    mode: str = "0644"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an image is made of. `commands` run as root inside the image, with `sh -e`, after packages and files.

    `base` names a recipe of the checkout, whose packages, files and commands come first. `disk_mib`: size the
    file system is built with; a machine has at least that.
    """

    name: str
    base: str | None = None
    packages: list[str] = []
    files: list[RecipeFile] = []
    commands: list[str] = []
    disk_mib: int = 640


class LoadedRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe with the folder its files are in."""

    recipe: Recipe
    folder: Path


def _refuse(path: Path, message: str) -> Rejected:
    return Rejected(
        "malformed-recipe", f"{path}: {message}", "correct it; deploy/images/README.md says what it may hold"
    )


def load_recipe(path: Path) -> LoadedRecipe:
    """Read and check a recipe file; raises `Rejected("malformed-recipe")` that names what is wrong with it."""
    try:
        recipe = msgspec.convert(tomllib.loads(path.read_text()), Recipe)
    except FileNotFoundError as error:
        raise _refuse(path, "there is no such file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise _refuse(path, str(error)) from error
    if not is_token(recipe.name):
        raise _refuse(path, f"name {recipe.name!r} is not made of a-z, 0-9 and -, 63 at most")
    if not DISK_MIB_MIN <= recipe.disk_mib <= DISK_MIB_MAX:
        raise _refuse(path, f"disk_mib must be between {DISK_MIB_MIN} and {DISK_MIB_MAX}")
    for package in recipe.packages:
        if not PACKAGE.fullmatch(package):
            raise _refuse(path, f"{package!r} is not the name of a Debian package")
    if any("\0" in command for command in recipe.commands):
        raise _refuse(path, "commands cannot hold the character U+0000")
    folder = path.parent.resolve()
    for file in recipe.files:
        _check_file(path, folder, file)
    return LoadedRecipe(recipe=recipe, folder=folder)


def _check_file(path: Path, folder: Path, file: RecipeFile) -> None:
    source = (folder / file.source.replace("\0", "\ufffd")).resolve()
    if not source.is_relative_to(folder) or not source.is_file():
        raise _refuse(path, f"file {file.source!r} is not beside the recipe")
    if not file.target.startswith("/") or ".." in Path(file.target).parts or "\0" in file.target:
        raise _refuse(path, f"target {file.target!r} is not an absolute path in the guest")
    if not re.fullmatch(r"0?[0-7]{3,4}", file.mode):
        raise _refuse(path, f"mode {file.mode!r} is not an octal file mode such as 0755")


def recipe_key(chain: list[LoadedRecipe], suite: str) -> str:
    """The content key (64 hex digits) of an image: of each recipe in the chain, their files, and the suite."""
    digest = hashlib.sha256(f"torpor image {FORMAT}\n{suite}\n".encode())
    for loaded in chain:
        digest.update(msgspec.json.encode(loaded.recipe))
        for file in loaded.recipe.files:
            digest.update(hashlib.sha256((loaded.folder / file.source).read_bytes()).digest())
    return digest.hexdigest()
