"""Splitting an amount among people, in proportion to their weights."""


def split(cents, weights):
    """The share of each, in whole cents; the shares add up to the amount."""
    total = sum(weights)
    shares = [cents * weight // total for weight in weights]
    return [*shares[:-1], cents - sum(shares[:-1])]
