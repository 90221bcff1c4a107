"""The life of a machine, as pure functions."""
