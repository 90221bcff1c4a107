"""A bill that several people share."""

from shares.money import parse, text_of
from shares.split import split


class Bill:
    """What is to be paid, and by whom; `nights` says how long each has stayed."""

    def __init__(self, amount, nights):
        self.cents = parse(amount)
        self.nights = dict(nights)

    def owed(self):
        """Who owes how much, as text."""
        shares = split(self.cents, list(self.nights.values()))
        return {name: text_of(share) for name, share in zip(self.nights, shares)}
