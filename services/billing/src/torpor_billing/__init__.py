"""Billing: owns the meters of running and stored time, projected from what hosts observed, and what they cost."""
