"""A guest's root file system, made with mmdebstrap from the machine's own package sources."""

import os
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_guest_agent.identity import FOLDER, LINKED
from torpor_vm_host.images.distribution import Distribution
from torpor_vm_host.images.failures import (
    COMMAND_FAILED,
    FILE_FAILED,
    FILE_SYSTEM_FAILED,
    of_installation,
    unknown_packages,
)
from torpor_vm_host.images.initrd import AGENT
from torpor_vm_host.images.recipe import LoadedRecipe
from torpor_vm_host.images.steps import Progress, StepFailed, follow, run

HELPER: Final = "/usr/lib/python3/dist-packages/torpor_guest.py"
PLAIN: Final = "plain"
TEMPORARY: Final = "tmp"
LEFT_OUT: Final = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")


def fetch_kernel(chain: list[LoadedRecipe], work: Path, distribution: Distribution, told: Progress) -> tuple[Path, str]:
    """The distribution's kernel and a static busybox, unpacked below one folder; and the kernel's version.

    On the way, the packages of the chain are looked for.
    """
    package = _kernel_package(distribution)
    if package is None and os.geteuid() == 0:
        told("fetching the lists of packages")
        run("fetching the lists of packages", "apt-get", "-qq", "update")
        package = _kernel_package(distribution)
    if package is None:
        raise Rejected("image-build-failed", f"{distribution.kernel} is unknown to apt", "run: sudo apt-get update")
    version = package.removeprefix("linux-image-")
    check_packages(chain)
    wanted = [package, "busybox-static"]
    if distribution.modules_apart:
        wanted.append(f"linux-modules-{version}")
    run("downloading the kernel", "apt-get", "-qq", "download", *wanted, cwd=work)
    tree = work / "kernel"
    for archive in sorted(work.glob("*.deb")):
        run("unpacking the kernel", "dpkg-deb", "-x", str(archive), str(tree))
        archive.unlink()
    return tree, version


def check_packages(chain: list[LoadedRecipe]) -> None:
    """Ask apt for the recipe's packages, which takes a moment; otherwise a wrong name is found after a minute."""
    wanted = {package for loaded in chain for package in loaded.recipe.packages}
    said = run("looking for the packages", "apt-cache", "policy", "--", *sorted(wanted))
    unknown = wanted - {line.removesuffix(":") for line in said.splitlines() if not line.startswith(" ")}
    if unknown:
        raise unknown_packages(unknown, chain)


def _kernel_package(distribution: Distribution) -> str | None:
    depends = run("finding the kernel package", "apt-cache", "depends", distribution.kernel).splitlines()
    return next((line.split()[1] for line in depends if line.strip().startswith("Depends: linux-image-")), None)


def make_rootfs(
    chain: list[LoadedRecipe], distribution: Distribution, target: Path, disk_mib: int, told: Progress
) -> None:
    """Make the root file system (ext4) of a chain of recipes; raises `Rejected` that says which of it is wrong."""
    packages = sorted({package for loaded in chain for package in loaded.recipe.packages})
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    work = target.parent.parent
    temporary = work / TEMPORARY
    temporary.mkdir()
    command = (
        "mmdebstrap",
        "--variant=minbase",
        "--format=null",
        f"--components={distribution.components}",
        f"--include={','.join(packages)}",
        '--aptopt=Apt::Install-Recommends "false"',
        *excluded,
        *_hooks(chain, target, disk_mib),
        distribution.suite,
        os.devnull,
    )
    try:
        follow(command, told, {"TMPDIR": str(temporary), "LC_ALL": "C.UTF-8"})
    except StepFailed as error:
        raise of_installation(error.said, chain, work.parent) from error


def _hooks(chain: list[LoadedRecipe], target: Path, disk_mib: int) -> list[str]:
    hooks: list[str] = []
    for level, loaded in enumerate(chain):
        for number, file in enumerate(loaded.recipe.files):
            source, place = quoted(str(loaded.folder / file.source)), quoted(file.target)
            put = f"install -DT -m {file.mode} '{source}' \"$1\"'{place}'"
            hooks.append(f"{put} || {{ echo '{FILE_FAILED}' {level} {number}; exit 1; }}")
        for number, command in enumerate(loaded.recipe.commands):
            done = f"chroot \"$1\" sh -ec '{quoted(command)}'"
            hooks.append(f"{done} || {{ echo '{COMMAND_FAILED}' {level} {number} $?; exit 1; }}")
    hooks.append('rm -rf "$1"/var/cache/apt/*.bin "$1"/var/log/*.log')
    # Who the machine is, and our agent, lie in its memory: a wake then writes to no disk.
    hooks += [f'ln -sf {FOLDER}/{name} "$1"{link}' for name, link in LINKED.items()]
    hooks.append(
        f'mkdir -p "$1"{Path(HELPER).parent} && ln -sf {AGENT}/torpor_guest_agent/torpor_guest.py "$1"{HELPER}'
    )
    # A plain bind shows the tree without the /proc and /sys that are mounted in it while hooks run.
    plain = quoted(str(target.parent.parent / PLAIN))
    hooks.append(
        f"mkdir -p '{plain}' && mount --bind \"$1\" '{plain}' && "
        f"mke2fs -q -t ext4 -O ^has_journal -m 0 -d '{plain}' '{quoted(str(target))}' {disk_mib}M; "
        f"made=$?; umount '{plain}'; [ $made = 0 ] || echo '{FILE_SYSTEM_FAILED}'; exit $made"
    )
    return [f"--customize-hook={hook}" for hook in hooks]


def quoted(text: str) -> str:
    """Text as it stands between single quotes of a shell."""
    return text.replace("'", "'\\''")
