"""The programs `firecracker` and `jailer` of the tests: their command lines are those of the real ones, and no more."""

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.support.firecracker.interface import Interface
from tests.support.firecracker.machine import Machine
from tests.support.firecracker.server import Server

ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
CGROUP: Final = re.compile(r"[a-z.]+(_[a-z]+)*=.+")
LIMIT: Final = re.compile(r"(fsize|no-file)=\d+")
SNAPSHOT_VERSION: Final = "9.0.0"


class Fault(Exception):  # noqa: N818  (what a person reads)
    """What the jailer would say before it ends."""


def main(program: str, version: str, interface: str, log: str) -> None:
    """Be the program; `interface` is a file with the definition, requests and command lines are noted in `log`."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        sys.stdout.write(f"{program.capitalize()} v{version}\n")
    elif program == "firecracker" and arguments == ["--snapshot-version"]:
        sys.stdout.write(f"v{SNAPSHOT_VERSION}\n")
    elif program == "jailer":
        try:
            _jail(arguments, version, json.loads(Path(interface).read_text()), Path(log))
        except Fault as fault:
            sys.exit(f"Jailer error: {fault}")
    else:
        sys.exit("this firecracker runs in a jail only")


def _jail(arguments: list[str], version: str, definition: dict[str, Any], log: Path) -> None:
    options = _parsed(arguments)
    exec_file = Path(options.exec_file).resolve()
    root = Path(options.chroot_base_dir) / exec_file.name / options.id / "root"
    if not root.is_relative_to(Path(options.chroot_base_dir).resolve()):
        raise Fault("the chroot folder is a link")
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(exec_file, root / exec_file.name)
    with log.open("a") as file:
        file.write(json.dumps({"jailer": vars(options)}) + "\n")
    os.chown(root, options.uid, options.gid)
    os.chdir(root)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _be_firecracker(options, version, definition, log)
    Path(f"{exec_file.name}.pid").write_text(str(child))


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jailer", allow_abbrev=False)
    for name in ("--id", "--exec-file", "--chroot-base-dir"):
        parser.add_argument(name, required=True)
    for name in ("--uid", "--gid"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--cgroup-version", choices=["1", "2"])
    for name in ("--parent-cgroup", "--netns"):
        parser.add_argument(name)
    for name in ("--cgroup", "--resource-limit"):
        parser.add_argument(name, action="append", default=[])
    for name in ("--new-pid-ns", "--daemonize"):
        parser.add_argument(name, action="store_true")
    own = [*arguments, "--"].index("--")
    options = parser.parse_args(arguments[:own])
    inner = argparse.ArgumentParser(prog="firecracker", allow_abbrev=False)
    inner.add_argument("--api-sock", default="/run/firecracker.socket")
    options.api_sock = inner.parse_args(arguments[own + 1 :]).api_sock
    if not ID.fullmatch(options.id):
        raise Fault(f"Invalid instance ID: {options.id}")
    if "firecracker" not in Path(options.exec_file).name or not Path(options.exec_file).is_file():
        raise Fault(f"Invalid filename. The filename of `--exec-file` option must contain firecracker: {options}")
    if not Path(options.chroot_base_dir).is_dir():
        raise Fault(f"Failed to canonicalize path {options.chroot_base_dir}")
    wrong = [one for one in options.cgroup if not CGROUP.fullmatch(one)]
    wrong += [one for one in options.resource_limit if not LIMIT.fullmatch(one)]
    if wrong:
        raise Fault(f"Invalid format: {wrong}")
    return options


def _be_firecracker(options: argparse.Namespace, version: str, definition: dict[str, Any], log: Path) -> NoReturn:
    """The process that is the machine, in the jail as its working directory."""
    code = 1
    try:
        major, minor, patch = map(int, version.split("."))
        machine = Machine(Path.cwd(), options.uid, (major, minor, patch))
        server = Server(machine, Interface(definition), options.id, log)
        asyncio.run(server.run(options.api_sock.lstrip("/")))
        code = 0 if machine.succeeded else 1
        sys.stdout.write(f"Firecracker exiting. exit_code={code}\n")
        sys.stdout.flush()
    finally:
        os._exit(code)
