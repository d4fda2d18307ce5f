"""How sure a difference is when seeds and test rows both vary: pure functions of numbers.

Seeds share the test rows, so that neither a spread over seeds nor one over rows says how far a difference may be off. The two are crossed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtr, stdtr, stdtrit

ALPHA = 0.05
POWER = 0.8
MOST_SEEDS, MOST_ROWS = 1000, 100_000_000  # beyond, "more of it" is no advice


@dataclass(frozen=True)
class Spread:
    """Parts of the variance of a mean over seeds and rows, as the mean squares give them: what seeds, rows and the residual show.

    NOTE: the residual is in the first two as well. With one seed there is neither a spread over seeds nor a residual.
    """

    seed: float
    row: float
    residual: float

    @property
    def variance(self) -> float:
        # Where seeds cancel out in every single row neither shows a spread (two seeds, two rows that tell): the residual is the least.
        found = max(self.seed + self.row - self.residual, self.row)
        return self.residual if found < 1e-9 * self.residual else found

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of seeds, rows and residual in the variance, the residual counted once: they add up to 1."""
        own = (max(self.seed - self.residual, 0.0), max(self.row - self.residual, 0.0), self.residual)
        return (0.0, 0.0, 0.0) if sum(own) == 0 else (own[0] / sum(own), own[1] / sum(own), own[2] / sum(own))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and rows, and how far it may be off."""

    mean: float
    spread: Spread
    seeds: int
    rows: int

    @property
    def variance(self) -> float:
        return self.spread.variance

    @property
    def df(self) -> float:
        """Degrees of freedom of the variance, after Satterthwaite."""
        if self.seeds == 1:
            return float(self.rows - 1)
        parts = ((self.spread.seed, self.seeds - 1), (self.spread.row, self.rows - 1))
        below = sum(part**2 / df for part, df in parts) + self.spread.residual**2 / ((self.seeds - 1) * (self.rows - 1))
        return self.variance**2 / below if below > 0 else float(self.rows - 1)

    @property
    def p(self) -> float:
        """Of no difference, two-sided."""
        if self.variance == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(self.df, -abs(self.mean) / math.sqrt(self.variance)))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        half = t_quantile(self.df, alpha) * math.sqrt(self.variance) if self.variance > 0 else 0.0
        return self.mean - half, self.mean + half

    def with_more(self, seeds: int, rows: int) -> Estimate:
        """The same mean with the variance that so many seeds and rows are expected to leave."""
        residual = self.spread.residual * self.seeds * self.rows
        of_seed = max(self.spread.seed - self.spread.residual, 0.0) * self.seeds
        of_row = max(self.spread.row - self.spread.residual, 0.0) * self.rows
        left = residual / (seeds * rows)
        return Estimate(self.mean, Spread(of_seed / seeds + left, of_row / rows + left, left), seeds, rows)


def t_quantile(df: float, alpha: float) -> float:
    return float(-stdtrit(df, alpha / 2))


def crossed(differences: np.ndarray) -> Estimate:
    """Of (S, N) numbers, seed s and test row i, their mean with the variance of crossed random effects.

    One seed: rows alone, and it is for the caller to say so.
    """
    s, n = differences.shape
    mean = float(differences.mean())
    of_row = differences.mean(0)
    row = float(of_row.var(ddof=1)) / n
    if s == 1:
        return Estimate(mean, Spread(0.0, row, 0.0), s, n)
    of_seed = differences.mean(1)
    left = differences - of_seed[:, None] - of_row + mean
    residual = float(np.square(left).sum()) / ((s - 1) * (n - 1))
    return Estimate(mean, Spread(float(of_seed.var(ddof=1)) / s, row, residual / (s * n)), s, n)


# ---------------------------------------------------------------- several comparisons


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p values: each at most alpha exactly if Holm's procedure rejects at alpha."""
    found, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, p[i] * (len(p) - rank)))
        found[i] = largest
    return found


def holm_levels(p: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """The level at which each comparison is judged: an interval at it excludes 0 exactly if Holm's procedure rejects.

    The first that is not rejected ends the procedure: it and all after it are judged at the level that it was tested at.
    """
    found, level = [0.0] * len(p), 0.0
    open_ = True
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if open_:
            level = alpha / (len(p) - rank)
            open_ = p[i] <= level
        found[i] = level
    return found


# ---------------------------------------------------------------- what would be found, and what would settle it


def power(difference: float, estimate: Estimate, alpha: float = ALPHA) -> float:
    """Probability that an interval of that variance and these degrees of freedom excludes 0, if the true difference is `difference`."""
    if estimate.variance == 0:
        return 1.0
    shift = abs(difference) / math.sqrt(estimate.variance)
    critical = t_quantile(estimate.df, alpha)
    if shift > critical + 40:  # certain, and out of the range of the function
        return 1.0
    return float(1 - nctdtr(estimate.df, shift, critical))


def detectable(estimate: Estimate, alpha: float = ALPHA, at: float = POWER) -> float:
    """The smallest true difference that is found with a probability of `at`."""
    step = math.sqrt(estimate.variance)
    if step == 0:
        return 0.0
    low, high = 0.0, step
    while power(high, estimate, alpha) < at:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, estimate, alpha) < at else (low, middle)
    return high


def detectable_by_seeds(seeds: int, alpha: float = ALPHA, at: float = POWER) -> float:
    """In standard deviations of the paired difference of two seeds' scores: 3.3, 1.7 and 1.0 with 3, 5 and 10 seeds."""
    return detectable(Estimate(0.0, Spread(1 / seeds, 0.0, 0.0), seeds, 10**9), alpha, at)


@dataclass(frozen=True)
class Settling:
    """What would find a difference of `target`: seeds on the same rows, rows with the same seeds, or both multiplied. None where it alone
    would not do. `within`: the target is the room that is left up to the margin."""

    target: float
    seeds: int | None
    rows: int | None
    both: tuple[int, int] | None
    within: bool = False


def settling(estimate: Estimate, target: float, *, alpha: float = ALPHA, at: float = POWER, within: bool = False) -> Settling:
    """How many seeds or rows it takes until a difference of `target` is found with a probability of `at`. At least two seeds."""

    def enough(seeds: int, rows: int) -> bool:
        return power(target, estimate.with_more(seeds, rows), alpha) >= at

    def times(factor: int) -> tuple[int, int]:
        return math.ceil(estimate.seeds * factor / 100), math.ceil(estimate.rows * factor / 100)

    s, n = estimate.seeds, estimate.rows
    seeds = smallest(lambda more: enough(more, n), s, MOST_SEEDS)
    rows = smallest(lambda more: enough(s, more), n, MOST_ROWS)
    factor = None if seeds or rows else smallest(lambda f: enough(*times(f)), 100, 100 * MOST_SEEDS)
    return Settling(target, seeds, rows, times(factor) if factor else None, within)


def smallest(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest number from `least` to `most` that is enough, if more is never worse."""
    low, high = least - 1, least
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
