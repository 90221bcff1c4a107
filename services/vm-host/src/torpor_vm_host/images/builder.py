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
from torpor_vm_host.images.initrd import agent_archive, boot_archive
from torpor_vm_host.images.recipe import LoadedRecipe, load_recipe, recipe_key
from torpor_vm_host.images.rootfs import PLAIN, Progress, fetch_kernel, make_rootfs

CHAIN_MAX: Final = 8
KEY_DIGITS: Final = 16
TOOLS: Final = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs", "dpkg-deb": "dpkg", "apt-get": "apt"}


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

    def chain(self, recipe: str | Path) -> list[LoadedRecipe]:
        """The recipe (a name, or a file) after those it is based on."""
        path = recipe if isinstance(recipe, Path) else self._recipes / recipe / "recipe.toml"
        if not path.is_file():
            known = ", ".join(self.names()) or "none"
            raise Rejected("unknown-image", f"there is no recipe {recipe}", f"known images: {known}")
        chain = [load_recipe(path)]
        while (below := chain[0].recipe.base) is not None:
            if len(chain) == CHAIN_MAX:
                raise Rejected("malformed-recipe", f"more than {CHAIN_MAX} recipes on each other", "shorten the chain")
            chain.insert(0, load_recipe(self._recipes / below / "recipe.toml"))
        return chain

    def names(self) -> list[str]:
        """The recipes there are, by name."""
        return sorted(path.parent.name for path in self._recipes.glob("*/recipe.toml"))

    def key(self, recipe: str | Path) -> str:
        """The content key the recipe's image has now."""
        return recipe_key(self.chain(recipe), _suite())

    def built(self) -> list[ImageInfo]:
        """Every image in the cache, by name; half-built ones are not there."""
        return [_read(path) for path in sorted(self.cache.glob("*/image.json"))]

    def find(self, recipe: str | Path) -> Image | None:
        """The recipe's image as it should be now, with the agent of now, if it has been built."""
        chain = self.chain(recipe)
        path = self._folder(chain[-1].recipe.name, self.key(recipe)) / "image.json"
        return self._with_agent(path.parent, _read(path)) if path.is_file() else None

    def build(self, recipe: str | Path, progress: Progress) -> Image:
        """The recipe's image, built if it is not there; raises `Rejected` with what to install or what failed."""
        found = self.find(recipe)
        if found is not None:
            return found
        lacking = missing_tools()
        if lacking:
            raise Rejected(
                "image-tools-missing",
                f"building an image needs {', '.join(lacking)}",
                f"sudo apt-get install {' '.join(lacking)} (or: torpor doctor --fix)",
            )
        self.cache.mkdir(parents=True, exist_ok=True)
        with _exclusive(self.cache / ".lock", progress):
            _drop_abandoned(self.cache)
            found = self.find(recipe)
            return found or self._build(self.chain(recipe), self.key(recipe), progress)

    def _folder(self, name: str, key: str) -> Path:
        return self.cache / f"{name}-{key[:KEY_DIGITS]}"

    def _build(self, chain: list[LoadedRecipe], key: str, progress: Progress) -> Image:
        name, suite = chain[-1].recipe.name, _suite()

        def told(step: str) -> None:
            progress(f"image {name}: {step}")

        disk_mib = max(loaded.recipe.disk_mib for loaded in chain)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=self.cache) as scratch:
            work, out = Path(scratch), Path(scratch) / "out"
            out.mkdir()
            told("fetching the guest's kernel")
            tree, version = fetch_kernel(work, told)
            kernel = next(iter(sorted(tree.glob("boot/vmlinuz-*"))))
            shutil.copyfile(kernel, out / "vmlinuz")
            busybox = next((path for path in (tree / "bin/busybox", tree / "usr/bin/busybox") if path.is_file()), tree)
            (out / "boot.gz").write_bytes(boot_archive(tree, busybox))
            told(f"installing {_count(chain)} packages and what they need ({suite})")
            make_rootfs(chain, suite, out / "rootfs.ext4", disk_mib, told)
            told("taking digests")
            info = ImageInfo(
                name=name,
                key=key,
                suite=suite,
                kernel_version=version,
                disk_mib=disk_mib,
                size_bytes=sum(path.stat().st_blocks * 512 for path in out.iterdir()),
                digests={path.name: _digest(path) for path in sorted(out.iterdir())},
            )
            (out / "image.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
            for path in out.iterdir():
                path.chmod(0o444)
            out.chmod(0o755)
            folder = self._folder(name, key)
            out.rename(folder)
        told(f"ready ({info.size_bytes / 2**20:.0f} MiB)")
        return self._with_agent(folder, info)

    def _with_agent(self, folder: Path, info: ImageInfo) -> Image:
        """The image, with an initrd that holds the agent: made when there is none for the agent as it is now."""
        archive = agent_archive(self._agent)
        image = Image(info=info, folder=folder, agent_key=hashlib.sha256(archive).hexdigest())
        if not image.initrd.is_file():
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as fresh:
                fresh.write((folder / "boot.gz").read_bytes() + archive)
            Path(fresh.name).chmod(0o444)
            Path(fresh.name).rename(image.initrd)
        return image


def missing_tools() -> list[str]:
    """The packages that a build needs and this machine lacks."""
    return sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})


def _read(path: Path) -> ImageInfo:
    return msgspec.json.decode(path.read_bytes(), type=ImageInfo)


def _count(chain: list[LoadedRecipe]) -> int:
    return len({package for loaded in chain for package in loaded.recipe.packages})


def _suite() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip().strip('"')
    raise Rejected(
        "image-build-unsupported",
        "this machine is not a Debian or Ubuntu release with a code name",
        "build the image on one and copy the image cache here",
    )


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
    for folder in cache.glob(".building-*"):
        subprocess.run(["umount", str(folder / PLAIN)], check=False, capture_output=True, timeout=60)  # noqa: S603, S607
        shutil.rmtree(folder, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
