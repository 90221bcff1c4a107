"""The append-only event log: the single source of truth, and everything that can be derived from it."""
