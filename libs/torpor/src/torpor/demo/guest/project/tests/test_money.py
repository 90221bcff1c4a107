"""Amounts are read and written to the cent."""

import unittest

from shares.money import parse, text_of


class Money(unittest.TestCase):
    def test_what_is_written_is_read_again(self):
        for cents in range(0, 12_000, 7):
            self.assertEqual(parse(text_of(cents)), cents)

    def test_what_is_no_amount_is_refused(self):
        for text in ("", "x", "1.5", "1.234", "-1.00"):
            with self.assertRaises(ValueError):
                parse(text)
