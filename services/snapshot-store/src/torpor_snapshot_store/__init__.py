"""Owns checkpoints: verifies them, keeps their tree and what holds them, and frees what nothing holds any more."""
