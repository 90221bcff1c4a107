"""Shares of a bill: who owes what, to the cent."""
