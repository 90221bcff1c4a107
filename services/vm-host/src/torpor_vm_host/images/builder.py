"""Builds a guest image with mmdebstrap from the machine's own package sources, into a cache keyed by content."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from torpor_contracts.errors import Rejected
from torpor_guest_agent.identity import FOLDER, LINKED
from torpor_vm_host.images.initrd import build_initrd
from torpor_vm_host.images.recipe import LoadedRecipe, load_recipe, recipe_key

KERNEL_META: Final = "linux-image-cloud-amd64"
AGENT_FOLDER: Final = "/usr/lib/torpor"
CHAIN_MAX: Final = 8
BUILD_TIMEOUT_S: Final = 1800
TOOLS: Final = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs", "dpkg-deb": "dpkg", "apt-get": "apt"}

Progress = Callable[[str], None]


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A built image: `key` is its content key, digests are `sha256:<hex>` of the files beside `image.json`."""

    name: str
    key: str
    suite: str
    kernel_version: str
    disk_mib: int
    size_bytes: int
    digests: dict[str, str]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A built image and where it is: `kernel`, `initrd` and the read-only root file system `rootfs`."""

    info: ImageInfo
    folder: Path

    @property
    def kernel(self) -> Path:
        """The kernel (a Linux bzImage)."""
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initial RAM disk."""
        return self.folder / "initrd.gz"

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
        while (base := chain[0].recipe.base) is not None:
            if len(chain) == CHAIN_MAX:
                raise Rejected("malformed-recipe", f"more than {CHAIN_MAX} recipes on each other", "shorten the chain")
            chain.insert(0, load_recipe(self._recipes / base / "recipe.toml"))
        return chain

    def names(self) -> list[str]:
        """The recipes there are, by name."""
        return sorted(path.parent.name for path in self._recipes.glob("*/recipe.toml"))

    def key(self, recipe: str | Path) -> str:
        """The content key the recipe's image has now."""
        return recipe_key(self.chain(recipe), _suite(), _agent_bytes(self._agent))

    def built(self) -> list[Image]:
        """Every image in the cache, newest name first; half-built ones are not there."""
        images = []
        for path in sorted(self.cache.glob("*/image.json")):
            info = msgspec.json.decode(path.read_bytes(), type=ImageInfo)
            images.append(Image(info=info, folder=path.parent))
        return images

    def find(self, recipe: str | Path) -> Image | None:
        """The recipe's image as it should be now, if it has been built."""
        chain = self.chain(recipe)
        path = self._folder(chain[-1].recipe.name, self.key(recipe)) / "image.json"
        if not path.is_file():
            return None
        return Image(info=msgspec.json.decode(path.read_bytes(), type=ImageInfo), folder=path.parent)

    def build(self, recipe: str | Path, progress: Progress) -> Image:
        """The recipe's image, built if it is not there; raises `Rejected` with what to install or what failed."""
        found = self.find(recipe)
        if found is not None:
            return found
        lacking = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
        if lacking:
            raise Rejected(
                "image-tools-missing",
                f"building an image needs {', '.join(lacking)}",
                f"sudo apt-get install {' '.join(lacking)} (or: torpor doctor --fix)",
            )
        self.cache.mkdir(parents=True, exist_ok=True)
        with _exclusive(self.cache / ".lock", progress):
            found = self.find(recipe)
            return found or self._build(recipe, progress)

    def _folder(self, name: str, key: str) -> Path:
        return self.cache / f"{name}-{key[:16]}"

    def _build(self, recipe: str | Path, progress: Progress) -> Image:
        chain, suite = self.chain(recipe), _suite()
        name, key = chain[-1].recipe.name, self.key(recipe)
        disk_mib = max(loaded.recipe.disk_mib for loaded in chain)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=self.cache) as scratch:
            work, out = Path(scratch), Path(scratch) / "out"
            out.mkdir()
            progress(f"image {name}: fetching the guest kernel")
            tree, version = _fetch_kernel(work)
            shutil.copyfile(next(iter(sorted(tree.glob("boot/vmlinuz-*")))), out / "vmlinuz")
            busybox = next((path for path in (tree / "bin/busybox", tree / "usr/bin/busybox") if path.is_file()), tree)
            (out / "initrd.gz").write_bytes(build_initrd(tree, busybox))
            progress(f"image {name}: installing {_count(chain)} packages and what they need ({suite})")
            _make_rootfs(chain, suite, self._agent, out / "rootfs.ext4", disk_mib)
            progress(f"image {name}: taking digests")
            digests = {path.name: _digest(path) for path in sorted(out.iterdir())}
            info = ImageInfo(
                name=name,
                key=key,
                suite=suite,
                kernel_version=version,
                disk_mib=disk_mib,
                size_bytes=sum(path.stat().st_blocks * 512 for path in out.iterdir()),
                digests=digests,
            )
            (out / "image.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
            for path in out.iterdir():
                path.chmod(0o444)
            out.chmod(0o755)
            folder = self._folder(name, key)
            out.rename(folder)
        progress(f"image {name}: ready ({info.size_bytes / 2**20:.0f} MiB)")
        return Image(info=info, folder=folder)


def _agent_bytes(agent: Path) -> bytes:
    """All of the agent's source, named, as it goes into an image's key."""
    paths = [agent / "init", *sorted(agent.glob("*.py"))]
    return b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in paths)


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
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process builds images; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(step: str, *command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise Rejected(
            "image-build-failed", f"{step} took longer than {BUILD_TIMEOUT_S} s", "check the network, then try again"
        ) from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise Rejected("image-build-failed", f"{step} failed: {last}", "mend what it names, then try again")
    return done.stdout


def _fetch_kernel(work: Path) -> tuple[Path, str]:
    """Debian's cloud kernel and a static busybox, unpacked below one folder; and the kernel package's name."""
    depends = _run("finding the kernel package", "apt-cache", "depends", KERNEL_META).splitlines()
    package = next((line.split()[1] for line in depends if line.strip().startswith("Depends: linux-image-")), None)
    if package is None:
        raise Rejected("image-build-failed", f"{KERNEL_META} is unknown to apt", "run: apt-get update")
    _run("downloading the kernel", "apt-get", "-qq", "download", package, "busybox-static", cwd=work)
    tree = work / "kernel"
    for archive in sorted(work.glob("*.deb")):
        _run("unpacking the kernel", "dpkg-deb", "-x", str(archive), str(tree))
        archive.unlink()
    return tree, package.removeprefix("linux-image-")


def _make_rootfs(chain: list[LoadedRecipe], suite: str, agent: Path, target: Path, disk_mib: int) -> None:
    packages = sorted({package for loaded in chain for package in loaded.recipe.packages})
    hooks = [
        hook
        for path in sorted(agent.glob("*.py"))
        for hook in _file_hooks(path, f"{AGENT_FOLDER}/torpor_guest_agent/{path.name}", "0644")
    ]
    hooks += _file_hooks(agent / "init", f"{AGENT_FOLDER}/agent", "0755")
    hooks += _file_hooks(agent / "torpor_guest.py", "/usr/lib/python3/dist-packages/torpor_guest.py", "0644")
    for loaded in chain:
        for file in loaded.recipe.files:
            hooks += _file_hooks(loaded.folder / file.source, file.target, file.mode)
        hooks += [f"--customize-hook=chroot \"$1\" sh -ec '{_quoted(command)}'" for command in loaded.recipe.commands]
    hooks.append('--customize-hook=rm -rf "$1"/var/cache/apt/*.bin "$1"/var/log/*.log')
    # Who the machine is lies in its memory: a wake then writes to no disk.
    hooks += [f'--customize-hook=ln -sf {FOLDER}/{name} "$1"{link}' for name, link in LINKED.items()]
    # A plain bind shows the tree without the /proc and /sys that are mounted in it while hooks run.
    plain = target.parent.parent / "plain"
    plain.mkdir()
    hooks.append(
        f"--customize-hook=mount --bind \"$1\" '{plain}' && "
        f"mke2fs -q -t ext4 -O ^has_journal -m 0 -d '{plain}' '{target}' {disk_mib}M; "
        f"made=$?; umount '{plain}'; exit $made"
    )
    _run(
        "installing the guest's packages",
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--format=null",
        f"--include={','.join(packages)}",
        '--aptopt=Apt::Install-Recommends "false"',
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        *hooks,
        suite,
        os.devnull,
    )


def _file_hooks(source: Path, target: str, mode: str) -> list[str]:
    quoted = _quoted(str(source)), _quoted(target)
    return [f"--customize-hook=install -D -m {mode} '{quoted[0]}' \"$1\"'{quoted[1]}'"]


def _quoted(text: str) -> str:
    """Text as it stands between single quotes of a shell."""
    return text.replace("'", "'\\''")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
