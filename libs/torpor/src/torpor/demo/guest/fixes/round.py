"""Splitting an amount among people, in proportion to their weights."""


def split(cents, weights):
    """The share of each, in whole cents; the shares add up to the amount."""
    total = sum(weights)
    return [round(cents * weight / total) for weight in weights]
