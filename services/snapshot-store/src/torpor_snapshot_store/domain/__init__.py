"""The life of a checkpoint, as pure functions."""
