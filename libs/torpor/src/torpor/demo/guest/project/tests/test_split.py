"""Shares: nothing is lost, nobody is favoured, and who was not there pays nothing."""

import unittest

from shares.split import split

WEIGHTS = ([1], [1, 1, 1], [3, 2, 1], [1, 0, 1, 1], [7, 11, 13], [5, 0, 0, 1])


class Split(unittest.TestCase):
    def test_nothing_is_lost(self):
        for weights in WEIGHTS:
            for cents in range(200):
                self.assertEqual(sum(split(cents, weights)), cents, (cents, weights))

    def test_equal_weights_differ_by_a_cent_at_most(self):
        for cents in range(50):
            shares = split(cents, [1] * 7)
            self.assertLessEqual(max(shares) - min(shares), 1, cents)

    def test_who_was_not_there_pays_nothing(self):
        for cents in range(50):
            self.assertEqual(split(cents, [1, 0, 1, 1])[1], 0, cents)

    def test_each_share_is_within_a_cent_of_what_is_exact(self):
        for weights in WEIGHTS:
            for cents in range(200):
                for share, weight in zip(split(cents, weights), weights):
                    self.assertLess(abs(share * sum(weights) - cents * weight), sum(weights), (cents, weights))
