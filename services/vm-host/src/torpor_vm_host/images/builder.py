"""Builds guest images into a cache keyed by content: what is there is whole, and is never written again."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_contracts.ids import is_token
from torpor_vm_host.images.distribution import Distribution, find_distribution
from torpor_vm_host.images.failures import MALFORMED, of_system
from torpor_vm_host.images.initrd import agent_archive, boot_archive
from torpor_vm_host.images.naming import Named, Names
from torpor_vm_host.images.recipe import LoadedRecipe, load_recipe, recipe_key
from torpor_vm_host.images.rootfs import fetch_kernel, make_rootfs
from torpor_vm_host.images.steps import Progress

CHAIN_MAX: Final = 8
KEY_DIGITS: Final = 16
TOOLS: Final = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "unshare": "util-linux",
    "mount": "mount",
}
NEEDED: Final = "python3"
"""What our agent in the guest runs on."""
NAMES: Final = "names"
DEFAULT: Final = "default"
RECIPE: Final = "recipe.toml"


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A built image: `key` is its content key, digests are SHA-256 in hex of the files beside `image.json`."""

    name: str
    key: str
    suite: str
    kernel_version: str
    disk_mib: int
    size_bytes: int
    digests: dict[str, str]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A built image with an agent: `kernel`, `initrd` and the read-only root file system `rootfs`."""

    info: ImageInfo
    folder: Path
    agent_key: str

    @property
    def key(self) -> str:
        """The content key of image and agent."""
        return hashlib.sha256(
            f"{self.info.key}\n{self.info.digests['rootfs.ext4']}\n{self.agent_key}".encode()
        ).hexdigest()

    @property
    def kernel(self) -> Path:
        """The kernel (a Linux bzImage)."""
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initial RAM disk, with the agent."""
        return self.folder / f"initrd-{self.agent_key[:KEY_DIGITS]}.gz"

    @property
    def rootfs(self) -> Path:
        """The root file system: raw ext4, never written again."""
        return self.folder / "rootfs.ext4"


class ImageLibrary:
    """Recipes in `recipes` (one folder each), built images in `cache`; `agent` is the folder of the agent's modules."""

    def __init__(self, recipes: Path, cache: Path, agent: Path) -> None:
        self._recipes = recipes
        self.cache = cache
        self._agent = agent
        self._given = Names(cache / NAMES)

    def chain(self, recipe: str | Path) -> list[LoadedRecipe]:
        """The recipe (a name of the checkout, or a file) after those it is based on."""
        path = recipe if isinstance(recipe, Path) else self.recipe_named(recipe)
        chain = [load_recipe(path)]
        self._check_name(chain[-1].recipe.name, path)
        while (below := chain[0].recipe.base) is not None:
            if len(chain) == CHAIN_MAX:
                raise Rejected(MALFORMED, f"{path}: more than {CHAIN_MAX} recipes on each other", "shorten the chain")
            if below not in self.names():
                known = ", ".join(self.names()) or "none"
                raise Rejected(MALFORMED, f"{path}: there is no recipe {below!r} to be its base", f"known: {known}")
            chain.insert(0, load_recipe(self.recipe_named(below)))
        if not any(NEEDED in loaded.recipe.packages for loaded in chain):
            advice = f'write base = "default", or add {NEEDED} to its packages'
            raise Rejected(MALFORMED, f"{path}: a guest needs {NEEDED}, and this one has none", advice)
        return chain

    def names(self) -> list[str]:
        """The recipes of the checkout, by name."""
        return sorted(path.parent.name for path in self._recipes.glob(f"*/{RECIPE}"))

    def given_names(self) -> dict[str, Named]:
        """The names of images that were built from other recipe files, and what they stand for."""
        found = {name: self._given.get(name) for name in self._given}
        return {name: named for name, named in found.items() if named is not None}

    def key(self, recipe: str | Path) -> str:
        """The content key the recipe's image has now."""
        try:
            return recipe_key(self.chain(recipe), find_distribution().suite)
        except OSError as error:
            raise Rejected(MALFORMED, f"{error.filename} cannot be read: {error.strerror}", "check it") from error

    def built(self) -> list[ImageInfo]:
        """Every image in the cache, by name; half-built ones are not there."""
        infos = (_read(path) for path in sorted(self.cache.glob("*/image.json")))
        return [info for info in infos if info is not None]

    def find(self, recipe: str | Path) -> Image | None:
        """The recipe's image as it should be now, with the agent of now, if it has been built.

        A name is that of a recipe of the checkout, or one that was given to an image built from another recipe file.
        Raises `Rejected`: `unknown-image`, `malformed-recipe`.
        """
        if isinstance(recipe, str) and recipe not in self.names():
            named = self._given.get(recipe) if is_token(recipe) else None
            if named is None:
                raise self._unknown(recipe)
            folder = self.cache / named.folder
        else:
            folder = self.folder(self.chain(recipe)[-1].recipe.name, self.key(recipe))
        info = _read(folder / "image.json")
        return None if info is None else self._with_agent(folder, info)

    def version(self, name: str) -> int:
        """Changes when a name comes to stand for another image, for names of the checkout never; cheap."""
        return self._given.version(name)

    def to_start_from(self, name: str, progress: Progress) -> Image:
        """The image that a session asks for by name; `default` is built if it must be.

        Nobody else's is: that is for the operator to do, and takes longer than a start may. Raises `Rejected`.
        """
        found = self.find(name)
        if found is not None:
            return found
        if name == DEFAULT:
            return self.build(name, progress)
        raise Rejected(
            "image-not-built", f"the image {name!r} is not built here as its recipe says now", _to_build(name)
        )

    def build(self, recipe: str | Path, progress: Progress) -> Image:
        """The recipe's image, built if it is not there; raises `Rejected` with what to install or what failed."""
        if isinstance(recipe, str) and recipe not in self.names() and (named := self._given.get(recipe)) is not None:
            recipe = Path(named.recipe)
        image = self.find(recipe) or self._built_alone(recipe, progress)
        if isinstance(recipe, Path) and image.info.name not in self.names():
            self._given.give(image.info.name, Named(folder=image.folder.name, recipe=str(recipe.resolve())))
        return image

    def _built_alone(self, recipe: str | Path, progress: Progress) -> Image:
        lacking = missing_tools()
        if lacking:
            raise Rejected(
                "image-tools-missing",
                f"building an image needs {', '.join(lacking)}",
                f"torpor doctor --fix (or: sudo apt-get install {' '.join(lacking)})",
            )
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with _exclusive(self.cache / ".lock", progress):
                _drop_abandoned(self.cache)
                found = self.find(recipe)
                return found or self._build(self.chain(recipe), self.key(recipe), progress)
        except OSError as error:
            raise of_system(error, self.cache) from error

    def recipe_named(self, name: str) -> Path:
        """The recipe file of the checkout that has this name; raises `Rejected("unknown-image")`."""
        if name not in self.names():
            raise self._unknown(name)
        return self._recipes / name / RECIPE

    def _unknown(self, name: str) -> Rejected:
        known = ", ".join(sorted({*self.names(), *self._given})) or "none"
        return Rejected(
            "unknown-image", f"there is no image {name!r}", f"known images: {known}; see torpor image build"
        )

    def _check_name(self, name: str, path: Path) -> None:
        """A name of the checkout means that recipe and no other."""
        of_checkout = path.resolve().is_relative_to(self._recipes.resolve())
        if of_checkout and path.parent.name != name:
            raise Rejected(MALFORMED, f"{path}: its name is {name!r}", f"name it as its folder: {path.parent.name}")
        if of_checkout or name not in self.names():
            return
        raise Rejected(
            MALFORMED, f"{path}: the name {name!r} is that of {self._recipes / name}", "give it another name"
        )

    def folder(self, name: str, key: str) -> Path:
        """Where in the cache the image of this name and content key is, or would be."""
        return self.cache / f"{name}-{key[:KEY_DIGITS]}"

    def _build(self, chain: list[LoadedRecipe], key: str, progress: Progress) -> Image:
        name, distribution = chain[-1].recipe.name, find_distribution()

        def told(step: str) -> None:
            progress(f"image {name}: {step}")

        disk_mib = max(loaded.recipe.disk_mib for loaded in chain)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=self.cache) as scratch:
            work, out = Path(scratch), Path(scratch) / "out"
            out.mkdir()
            version = _lay_out_kernel(chain, work, out, distribution, told)
            told(f"installing {_count(chain)} packages and what they need ({distribution.suite})")
            make_rootfs(chain, distribution, out / "rootfs.ext4", disk_mib, told)
            told("taking digests")
            info = ImageInfo(
                name=name,
                key=key,
                suite=distribution.suite,
                kernel_version=version,
                disk_mib=disk_mib,
                size_bytes=sum(path.stat().st_blocks * 512 for path in out.iterdir()),
                digests={path.name: _digest(path) for path in sorted(out.iterdir())},
            )
            (out / "image.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
            for path in out.iterdir():
                path.chmod(0o444)
            out.chmod(0o755)
            folder = self.folder(name, key)
            shutil.rmtree(folder, ignore_errors=True)  # one whose image.json was damaged: it counts as not built
            out.rename(folder)
        told(f"ready ({info.size_bytes / 2**20:.0f} MiB)")
        return self._with_agent(folder, info)

    def _with_agent(self, folder: Path, info: ImageInfo) -> Image:
        """The image, with an initrd that holds the agent: made when there is none for the agent as it is now."""
        archive = agent_archive(self._agent)
        image = Image(info=info, folder=folder, agent_key=hashlib.sha256(archive).hexdigest())
        if not image.initrd.is_file():
            try:
                _write_whole(image.initrd, (folder / "boot.gz").read_bytes() + archive)
            except OSError as error:
                raise of_system(error, folder) from error
        return image


def missing_tools() -> list[str]:
    """The packages that a build needs and this machine lacks."""
    return sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})


def _lay_out_kernel(
    chain: list[LoadedRecipe], work: Path, out: Path, distribution: Distribution, told: Progress
) -> str:
    """The kernel and its part of the initrd; the kernel's version."""
    told("fetching the guest's kernel")
    tree, version = fetch_kernel(chain, work, distribution, told)
    kernel = next(iter(sorted(tree.glob("boot/vmlinuz-*"))), None)
    if kernel is None:
        raise Rejected("image-build-failed", f"the package of {version} holds no kernel", "report this: it changed")
    shutil.copyfile(kernel, out / "vmlinuz")
    busybox = next((path for path in (tree / "bin/busybox", tree / "usr/bin/busybox") if path.is_file()), tree)
    (out / "boot.gz").write_bytes(boot_archive(tree, busybox))
    shutil.rmtree(tree)
    return version


def _write_whole(path: Path, content: bytes) -> None:
    """The file appears when all of it is there; nothing is left of one that cannot be written."""
    fresh = Path(tempfile.mkstemp(dir=path.parent)[1])
    try:
        fresh.write_bytes(content)
        fresh.chmod(0o444)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _read(path: Path) -> ImageInfo | None:
    """What an image says of itself; None when it is not there, or cannot be read: then it is built anew."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ImageInfo)
    except (OSError, msgspec.MsgspecError):
        return None


def _to_build(name: str) -> str:
    return f"on the host: torpor image build {name}"


def _count(chain: list[LoadedRecipe]) -> int:
    return len({package for loaded in chain for package in loaded.recipe.packages})


@contextmanager
def _exclusive(path: Path, progress: Progress) -> Iterator[None]:
    """One build at a time; the kernel takes the lock back from a process that dies."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process builds images; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _drop_abandoned(cache: Path) -> None:
    """Remove what a build left whose process was killed; the lock says that no other one goes on."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for folder in cache.glob(".building-*"):
        for place in sorted((place for place in mounts if Path(place).is_relative_to(folder)), reverse=True):
            subprocess.run(["umount", "-l", place], check=True, capture_output=True, timeout=60)  # noqa: S603, S607
        shutil.rmtree(folder, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
