"""The QEMU driver: microVMs with kernels of their own on any Linux machine, under KVM where it works, else TCG."""
