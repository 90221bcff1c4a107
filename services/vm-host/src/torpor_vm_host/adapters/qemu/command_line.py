"""The command line of a machine: everything it opens comes to it as an open file, so no path need be open to it."""

from typing import Final

import msgspec

from torpor_contracts.session import MachineSpec
from torpor_vm_host.adapters.qemu.engine import Engine

AGENT_PORT: Final = "torpor.agent"
SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
TRANSLATED_MIB: Final = 128
"""Room for translated code under emulation; full, it is emptied, so it need not be larger."""
DISK_NODE: Final = "disk"
KERNEL_LINE: Final = "quiet panic=-1 console=ttyS0 audit=0 random.trust_cpu=on"
EMULATED_KERNEL_LINE: Final = "norandmaps mitigations=off nowatchdog"
"""Under emulation code is translated anew at each address, and no guest's speculation is a processor's."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is made of, as descriptors that it inherits. `memory` and `disk` are its own to write.

    `memory_is_shared`: what the machine writes to its memory lands in the file, as for a template that is being made.
    `template_disk` is absent while the template's own disk is being made.
    """

    kernel: int
    initrd: int
    rootfs: int
    template_disk: int | None
    disk: int
    memory: int
    memory_is_shared: bool
    qmp: int
    agent: int
    console: int | None = None

    def inherited(self) -> list[int]:
        """All of them."""
        always = [self.kernel, self.initrd, self.rootfs, self.disk, self.memory, self.qmp, self.agent]
        return always + [one for one in (self.template_disk, self.console) if one is not None]


def kernel_line(engine: Engine) -> str:
    """What the guest's kernel is told at its one boot."""
    own = f"{KERNEL_LINE} tsc_early_khz={engine.tsc_khz} tsc=reliable"
    return f"{own} {EMULATED_KERNEL_LINE}" if engine.accelerator == "tcg" else own


def command_line(engine: Engine, spec: MachineSpec, opened: Opened, *, incoming: bool) -> list[str]:
    """QEMU's arguments. The devices are the same for boot and restore, or the device state would not load."""
    threads = "single" if spec.vcpus == 1 else "multi"
    emulation = f"tcg,thread={threads},tb-size={TRANSLATED_MIB}"
    sharing = "on" if opened.memory_is_shared else "off"
    console = "null,id=console" if opened.console is None else "file,id=console,path=/dev/fdset/9"
    return [
        str(engine.binary),
        "-name", "torpor",
        "-M", "microvm,rtc=on,memory-backend=mem0",
        "-accel", "kvm" if engine.accelerator == "kvm" else emulation,
        "-cpu", engine.cpu,
        "-m", str(spec.memory_mib),
        "-smp", str(spec.vcpus),
        "-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
        "-sandbox", SANDBOX,
        "-object",
        f"memory-backend-file,id=mem0,size={spec.memory_mib}M,mem-path={_path(opened.memory)},share={sharing}",
        "-kernel", _path(opened.kernel),
        "-initrd", _path(opened.initrd),
        "-append", kernel_line(engine),
        "-chardev", f"socket,id=qmp,fd={opened.qmp},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
        "-device", "virtio-serial-device,id=serial0",
        "-chardev", f"socket,id=agent,fd={opened.agent},server=on,wait=off",
        "-device", f"virtserialport,chardev=agent,name={AGENT_PORT}",
        *_disk(opened),
        "-device", f"virtio-blk-device,drive={DISK_NODE},id=disk0",
        "-device", "virtio-rng-device",
        *([] if opened.console is None else ["-add-fd", f"fd={opened.console},set=9"]),
        "-chardev", console,
        "-serial", "chardev:console",
        *(["-incoming", "defer"] if incoming else []),
    ]  # fmt: skip


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _disk(opened: Opened) -> list[str]:
    """The chain of images, each named: what an image's own header says of its backing file is not looked at."""
    template = opened.template_disk
    chain = [
        "-add-fd", f"fd={opened.rootfs},set=1",
        "-add-fd", f"fd={opened.disk},set=2",
        "-blockdev", "driver=file,node-name=rootfs-file,filename=/dev/fdset/1,read-only=on",
        "-blockdev", "driver=raw,node-name=rootfs,file=rootfs-file,read-only=on",
    ]  # fmt: skip
    if template is not None:
        chain += [
            "-add-fd", f"fd={template},set=3",
            "-blockdev", "driver=file,node-name=template-file,filename=/dev/fdset/3,read-only=on",
            "-blockdev", "driver=qcow2,node-name=template,file=template-file,backing=rootfs,read-only=on",
        ]  # fmt: skip
    backing = "rootfs" if template is None else "template"
    return [
        *chain,
        "-blockdev", "driver=file,node-name=disk-file,filename=/dev/fdset/2,cache.direct=off",
        "-blockdev", f"driver=qcow2,node-name={DISK_NODE},file=disk-file,backing={backing},discard=unmap",
    ]  # fmt: skip
