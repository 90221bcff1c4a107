"""The Firecracker driver: jailed microVMs under KVM, driven by Firecracker's HTTP interface on a Unix socket."""
