"""Whose a machine is, and the life of a clean-up, as pure functions."""
