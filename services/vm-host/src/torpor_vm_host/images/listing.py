"""What images there are: those of the checkout's recipes, those built from other files, and those left behind."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from torpor_contracts.errors import Rejected
from torpor_vm_host.images.builder import ImageInfo, ImageLibrary


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One image, or one recipe without.

    `ready`: sessions may ask for it. `not built`: there is none of the recipe as it is now. `unsound`: the recipe is
    wrong, as `problem` says. `superseded`: a newer one has its name; old checkpoints do not need it. `changed`: it is
    ready, and the recipe file it was built from is another by now.
    """

    name: str
    state: Literal["ready", "changed", "not built", "unsound", "superseded"]
    recipe: str = ""
    key: str = ""
    info: ImageInfo | None = None
    built_at: datetime | None = None
    problem: str = ""


def listed(library: ImageLibrary) -> list[Listed]:
    """All of them, by name, those that can be asked for first."""
    infos = {library.folder(info.name, info.key).name: info for info in library.built()}
    found: list[Listed] = []
    taken: set[str] = set()
    for name in library.names():
        recipe = str(library.recipe_named(name))
        try:
            key = library.key(name)
        except Rejected as error:
            found.append(Listed(name=name, state="unsound", recipe=recipe, problem=error.message))
            continue
        folder = library.folder(name, key)
        taken.add(folder.name)
        image = Listed(name=name, state="ready", recipe=recipe, key=key, info=infos.get(folder.name))
        found.append(_with_date(image, folder))
    for name, named in library.given_names().items():
        if name in library.names():  # the checkout has come to have a recipe of this name
            continue
        taken.add(named.folder)
        info, folder = infos.get(named.folder), library.cache / named.folder
        state, problem = _of_file(library, Path(named.recipe), info)
        key = info.key if info else ""
        image = Listed(name=name, state=state, recipe=named.recipe, key=key, info=info, problem=problem)
        found.append(_with_date(image, folder))
    for place, info in infos.items():
        if place not in taken:
            image = Listed(name=info.name, state="superseded", key=info.key, info=info)
            found.append(_with_date(image, library.cache / place))
    return found


def _with_date(image: Listed, folder: Path) -> Listed:
    """The image with the date it was built at; or as not built."""
    if image.info is None:
        return msgspec.structs.replace(image, state="not built")
    built_at = datetime.fromtimestamp((folder / "image.json").stat().st_mtime, UTC)
    return msgspec.structs.replace(image, built_at=built_at)


def _of_file(library: ImageLibrary, recipe: Path, info: ImageInfo | None) -> tuple[Literal["ready", "changed"], str]:
    try:
        same = info is not None and library.key(recipe) == info.key
    except Rejected as error:
        return "changed", error.message
    return ("ready" if same else "changed"), ""
