"""How the ports are satisfied: drivers, and the host's disk."""
