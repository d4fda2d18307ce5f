"""Looks at a comparison before its last seed: how they share the error rate.

Whoever tests after 3, 5 and 10 seeds, each time at 5 %, finds a difference that is not there in more than 8 of 100 comparisons. So each
look gets a part of the 5 %: that of the seeds which came since the look before (with 3, 5, 10: 1.5, 1.0 and 2.5 %). The parts add up, so
the looks together err in at most 5 % of cases, however they hang together.

Of the usual rules this is the plainest. O'Brien and Fleming's leaves so little to 3 seeds, where t has two degrees of freedom, that no
comparison would ever stop there. What looks have in common could give each a little more; computed as usual, by normal distributions, that
is too much for t of so few seeds (5.4 % for 3, 5, 10, simulated), and it is worth 5 % of an interval at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.statistics import ALPHA


def share(looks: Sequence[int], look: int) -> float:
    """Of all the error, what the look with that number in the row may spend. Without looks: all of it."""
    if not looks:
        return 1.0
    return (looks[look] - (looks[look - 1] if look else 0)) / looks[-1]


def level(looks: Sequence[int], look: int, alpha: float = ALPHA) -> float:
    return alpha * share(looks, look)


def overall(p: float, looks: Sequence[int], look: int) -> float:
    """The p value at a look, for all looks: it is at most alpha exactly if p is at most the level of the look within alpha."""
    return min(1.0, p / share(looks, look))
