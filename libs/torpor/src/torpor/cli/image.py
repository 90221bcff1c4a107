"""`torpor image …`: what the guests of sessions are made of."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from torpor.cli import printing
from torpor.cli.options import DEFAULTS, Common


def build_(
    recipe: Annotated[str, Parameter(help="The name of a recipe, or a recipe file of your own.")] = "default",
    *,
    common: Common = DEFAULTS,
) -> int:
    """Build a guest image, unless the recipe's image is there; sessions ask for it by its name."""
    from torpor_vm_host.images.library import default_library, meant  # noqa: PLC0415  (only where images are meant)

    began_s = time.monotonic()
    done: list[str] = []

    def told(step: str) -> None:
        done.append(step)
        printing.note(f"[{time.monotonic() - began_s:6.1f} s] {step}")

    image = default_library().build(meant(recipe), told)
    took_s = time.monotonic() - began_s
    if common.json:
        printing.emit({"image": image.info, "folder": str(image.folder), "built": bool(done), "seconds": took_s})
        return 0
    size = f"{image.info.size_bytes / 2**20:.0f} MiB"
    how = f"built in {took_s:.0f} s" if done else "is there already"
    printing.say(f"{image.info.name}  {how}  {image.info.suite}, kernel {image.info.kernel_version}, {size}")
    printing.say(f"torpor session create --image {image.info.name}")
    return 0


def list_(*, common: Common = DEFAULTS) -> int:
    """List images: those that can be asked for, and those that newer ones have taken the place of."""
    from torpor_vm_host.images.library import default_library  # noqa: PLC0415  (only where images are meant)
    from torpor_vm_host.images.listing import listed  # noqa: PLC0415

    images = listed(default_library())
    if common.json:
        printing.emit(images)
        return 0
    rows = [
        (
            image.name,
            image.state,
            image.key[:16] or None,
            image.info and f"{image.info.suite}, {image.info.kernel_version}",
            image.info and f"{image.info.size_bytes / 2**20:.0f}",
            image.built_at,
            _short(image.recipe),
            image.problem or None,
        )
        for image in images
    ]
    headings = ("image", "state", "key", "made of", "MiB", "built", "recipe", "problem")
    printing.table(headings, rows, "no images; see `torpor image build`")
    return 0


def _short(recipe: str) -> str | None:
    try:
        return str(Path(recipe).relative_to(Path.cwd())) if recipe else None
    except ValueError:
        return recipe
