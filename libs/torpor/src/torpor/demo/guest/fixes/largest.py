"""Splitting an amount among people, in proportion to their weights."""


def split(cents, weights):
    """The share of each, in whole cents; the shares add up to the amount."""
    total = sum(weights)
    shares = [cents * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: -(cents * weights[place] % total))
    for place in by_remainder[: cents - sum(shares)]:
        shares[place] += 1
    return shares
