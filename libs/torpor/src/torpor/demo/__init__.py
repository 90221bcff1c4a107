"""`torpor demo`: one agent's story on a real machine, in which everything that is said is checked."""
