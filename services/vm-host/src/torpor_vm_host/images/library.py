"""Where images are: the checkout's recipes, the user's cache, and the agent that goes into each."""

import os
from pathlib import Path

import torpor_guest_agent
from torpor_vm_host.images.builder import RECIPE, ImageLibrary


def cache_home() -> Path:
    """Torpor's own folder for what can be made anew: `TORPOR_CACHE_DIR`, or below the XDG cache directory."""
    chosen = os.environ.get("TORPOR_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torpor"


def recipes_home() -> Path:
    """The folder of recipes: `TORPOR_IMAGES_DIR`, or `deploy/images` of the checkout this runs from."""
    chosen = os.environ.get("TORPOR_IMAGES_DIR")
    if chosen:
        return Path(chosen)
    here = Path(__file__).resolve()
    return next((up / "deploy" / "images" for up in here.parents if (up / "deploy" / "images").is_dir()), here.parent)


def default_library() -> ImageLibrary:
    """The library that the command and the vm-host use."""
    return ImageLibrary(recipes_home(), cache_home() / "images", Path(torpor_guest_agent.__file__).parent)


def meant(recipe: str) -> str | Path:
    """What a user means by a recipe: a name, or a file (a path with a `/` or the ending `.toml`; a folder has one)."""
    if "/" not in recipe and not recipe.endswith(".toml") and recipe not in {".", ".."}:
        return recipe
    path = Path(recipe)
    return path / RECIPE if path.is_dir() else path
