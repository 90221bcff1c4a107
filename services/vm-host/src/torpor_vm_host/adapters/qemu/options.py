"""What an operator may choose about real machines; imports nothing heavy, as it is read wherever settings are."""

from typing import Literal

import msgspec

WantedAccelerator = Literal["auto", "tcg", "kvm"]
"""`auto`: KVM if a machine has really booted with it here, else emulation."""

Enforcement = Literal["required", "if-possible"]
"""Whether machines run without control groups where there are none."""


class SlotPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How many slots of each kind are kept for a template that was used within `idle_s`; memory in MiB.

    `memory_mib_max` bounds all slots together; what one is reckoned with (`warm_mib`, `blank_mib`) is measured.
    `free_mib_min` must stay free on this host.
    """

    warm: int = 1
    blank: int = 1
    memory_mib_max: int = 512
    warm_mib: int = 96
    blank_mib: int = 48
    free_mib_min: int = 512
    idle_s: float = 300.0


class QemuOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    accelerator: WantedAccelerator = "auto"
    limits: Enforcement = "if-possible"
    slots: SlotPolicy = SlotPolicy()
