"""Looks at a comparison before its last seed: how they share the error rate.

Whoever tests after 3, 5 and 10 seeds, each time at 5 %, finds a difference that is not there more often than in 5 of 100 comparisons.
Here each look may spend the share of the error that its seeds are of all seeds (with looks 3, 5, 10: 1.5, then 1.0, then 2.5 of the 5 %).
Of the usual rules this is the plain one: O'Brien and Fleming's leaves so little for 3 seeds, where t has 2 degrees of freedom, that no
comparison would ever stop there, and Pocock's takes more from the last look. The looks overlap (they share seeds), which is computed, by
integrating over what the earlier looks left open, and gives each look more than its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import ndtr

from experiments.statistics import ALPHA

NODES, WEIGHTS = np.polynomial.legendre.leggauss(128)  # of an integral from -1 to 1


def levels(looks: Sequence[int], alpha: float = ALPHA) -> tuple[float, ...]:
    """The two-sided level of each look at so many seeds: together they find a difference that is not there with probability `alpha`.

    NOTE: computed for seeds that bring independent information. Looks that share test rows, too, overlap more: less than `alpha` then.
    """
    return _levels(tuple(looks), alpha)


@lru_cache(maxsize=1024)
def _levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """Under no difference the sum over seeds wanders: the density of what stays within the bounds is carried from look to look."""
    found: list[float] = []
    density, at = (np.zeros(1), np.ones(1)), 0.0  # points and their probabilities: all of it at 0 before the first look
    for look in looks:
        share = look / looks[-1]
        step = math.sqrt(share - at)
        points, probability = density

        def beyond(bound: float, points: np.ndarray = points, probability: np.ndarray = probability, step: float = step) -> float:
            return float(probability @ (ndtr((points - bound) / step) + ndtr((-points - bound) / step)))

        bound = falling(beyond, alpha * (share - at), 0.0, 40.0)
        found.append(float(2 * ndtr(-bound / math.sqrt(share))))
        reached = bound * NODES
        kernel = np.exp(-np.square((reached[:, None] - points) / step) / 2) / (step * math.sqrt(2 * math.pi))
        density, at = (reached, kernel @ probability * bound * WEIGHTS), share
    return tuple(found)


def overall(p: float, looks: Sequence[int], look: int) -> float:
    """The p value at a look, for all looks: it is at most alpha exactly if p is at most the level of the look within alpha."""
    if p == 0 or len(looks) == 1:
        return p
    if p >= levels(looks, 0.999)[look]:
        return 1.0
    # the level rises with alpha: alpha is found by its logarithm
    return math.exp(-falling(lambda x: levels(looks, math.exp(-x))[look], p, -math.log(0.999), 700.0))


def falling(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a function that falls comes down to the target."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > target else (low, middle)
    return high
