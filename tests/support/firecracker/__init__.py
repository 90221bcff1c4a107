"""A Firecracker and a jailer for tests: they take what the real ones take, and their machines are our agent's process.

What is real here: the programs' command lines, the HTTP interface checked against its definition, the order in which
requests are allowed, the files, the userfaultfd, the vsock handshake, the agent. What is not: there is no hardware, no
kernel, no jail, and memory is the files below /dev/shm and /tmp: running programs do not survive a restore.
"""
