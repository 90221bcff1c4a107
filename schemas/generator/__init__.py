"""Writes everything in `schemas/` that is made from the code, and finds out when the two have come apart."""
