"""Meters and prices, as pure functions."""
