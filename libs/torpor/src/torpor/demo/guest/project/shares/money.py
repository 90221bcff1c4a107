"""Amounts of money: whole cents, read and written as people do."""


def parse(text):
    """The cents in a text such as `12.30`; raises `ValueError` for anything else."""
    whole, point, cents = text.partition(".")
    if not whole.isdigit() or (point and not (cents.isdigit() and len(cents) == 2)):
        raise ValueError(f"{text!r} is no amount: write it as 12.30")
    return 100 * int(whole) + int(cents or 0)


def text_of(cents):
    """The amount as people write it."""
    return f"{cents // 100}.{cents % 100:02}"
