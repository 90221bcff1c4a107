"""A guest's root file system, made with mmdebstrap from the machine's own package sources."""

import os
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from torpor_contracts.errors import Rejected
from torpor_guest_agent.identity import FOLDER, LINKED
from torpor_vm_host.images.initrd import AGENT
from torpor_vm_host.images.recipe import LoadedRecipe

KERNEL_META: Final = "linux-image-cloud-amd64"
STEP_S_MAX: Final = 1800
TOLD: Final = ("running apt-get update", "downloading", "extracting", "installing")
"""How the lines of mmdebstrap begin that say how far it is."""
SAID_MAX: Final = 12
"""Lines of a failed step that its error quotes."""
HELPER: Final = "/usr/lib/python3/dist-packages/torpor_guest.py"
PLAIN: Final = "plain"
LEFT_OUT: Final = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")

Progress = Callable[[str], None]


def run(step: str, *command: str, cwd: Path | None = None, told: Progress | None = None) -> str:
    """Run one step of a build; raises `Rejected("image-build-failed")` with what it said. `told` hears its progress."""
    try:
        process = subprocess.Popen(  # noqa: S603
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if told else subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise _failed(step, str(error)) from error
    with process:
        if told is None:
            try:
                output, errors = process.communicate(timeout=STEP_S_MAX)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise _failed(step, f"it took longer than {STEP_S_MAX} s") from error
        else:
            output = errors = _followed(process, told)
    if process.returncode != 0:
        raise _failed(step, "\n".join(errors.strip().splitlines()[-SAID_MAX:]))
    return output


def _followed(process: "subprocess.Popen[str]", told: Progress) -> str:
    """Hand on what mmdebstrap says of its steps; its last words."""
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=SAID_MAX)
    for line in process.stdout:
        last.append(line.rstrip())
        step = line.removeprefix("I: ").rstrip(". \n")
        if step.startswith(TOLD):
            told(step)
    return "\n".join(last)


def _failed(step: str, why: str) -> Rejected:
    return Rejected("image-build-failed", f"{step} failed: {why}", "mend what it names, then try again")


def fetch_kernel(work: Path, told: Progress) -> tuple[Path, str]:
    """Debian's cloud kernel and a static busybox, unpacked below one folder; and the kernel's version."""
    package = _kernel_package()
    if package is None and os.geteuid() == 0:
        told("fetching the lists of packages")
        run("fetching the lists of packages", "apt-get", "-qq", "update")
        package = _kernel_package()
    if package is None:
        raise Rejected("image-build-failed", f"{KERNEL_META} is unknown to apt", "run: apt-get update")
    run("downloading the kernel", "apt-get", "-qq", "download", package, "busybox-static", cwd=work)
    tree = work / "kernel"
    for archive in sorted(work.glob("*.deb")):
        run("unpacking the kernel", "dpkg-deb", "-x", str(archive), str(tree))
        archive.unlink()
    return tree, package.removeprefix("linux-image-")


def _kernel_package() -> str | None:
    depends = run("finding the kernel package", "apt-cache", "depends", KERNEL_META).splitlines()
    return next((line.split()[1] for line in depends if line.strip().startswith("Depends: linux-image-")), None)


def make_rootfs(chain: list[LoadedRecipe], suite: str, target: Path, disk_mib: int, told: Progress) -> None:
    """Make the root file system (ext4) of a chain of recipes."""
    packages = sorted({package for loaded in chain for package in loaded.recipe.packages})
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    run(
        "installing the guest's packages",
        "mmdebstrap",
        "--variant=minbase",
        "--format=null",
        f"--include={','.join(packages)}",
        '--aptopt=Apt::Install-Recommends "false"',
        *excluded,
        *_hooks(chain, target, disk_mib),
        suite,
        os.devnull,
        told=told,
    )


def _hooks(chain: list[LoadedRecipe], target: Path, disk_mib: int) -> list[str]:
    hooks: list[str] = []
    for loaded in chain:
        for file in loaded.recipe.files:
            source, place = quoted(str(loaded.folder / file.source)), quoted(file.target)
            hooks.append(f"install -D -m {file.mode} '{source}' \"$1\"'{place}'")
        hooks += [f"chroot \"$1\" sh -ec '{quoted(command)}'" for command in loaded.recipe.commands]
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
        f"made=$?; umount '{plain}'; exit $made"
    )
    return [f"--customize-hook={hook}" for hook in hooks]


def quoted(text: str) -> str:
    """Text as it stands between single quotes of a shell."""
    return text.replace("'", "'\\''")
