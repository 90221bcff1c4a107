"""Audit: proves that the log, its copies and its views say the same, exports evidence, rebuilds what is derived."""
