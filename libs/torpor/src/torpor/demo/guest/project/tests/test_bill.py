"""A bill as people see it."""

import unittest

from shares.bill import Bill


class Bills(unittest.TestCase):
    def test_three_share_a_hundred(self):
        owed = Bill("100.00", {"ada": 1, "bo": 1, "cy": 1}).owed()
        self.assertEqual(sorted(owed.values()), ["33.33", "33.33", "33.34"])

    def test_who_came_later_pays_less(self):
        owed = Bill("10.00", {"ada": 3, "bo": 1}).owed()
        self.assertEqual(owed, {"ada": "7.50", "bo": "2.50"})
