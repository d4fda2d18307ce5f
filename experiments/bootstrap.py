"""The multi-bootstrap with paired seeds (Sellam et al., ICLR 2022), for metrics that are no means over rows.

Rows are drawn with replacement, the same for every seed and arm. What seeds add is known without drawing them, because the statistic is
a mean over seeds: drawing three of three seeds finds two thirds of their variance, and percentiles know no t. Here the variances of seeds,
rows and residual are put together as for means over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from experiments.statistics import Estimate, Spread

SAMPLES = 1000  # a standard error is then known to 2 %
NUMBERS = 400_000  # weights that are in memory at once: a processor's cache holds them


def row_samples(
    metrics: Sequence[Callable[[np.ndarray], np.ndarray]], rows: int, *, samples: int = SAMPLES, numbers: int = NUMBERS
) -> np.ndarray:
    """Each metric on samples of the rows, (B, M). One stream of numbers: the same files give the same verdict."""
    generator = np.random.default_rng(0)
    most = max(1, numbers // rows)
    found = []
    for start in range(0, samples, most):
        size = min(most, samples - start)
        weights = np.zeros((size, rows))
        for weight in weights:  # row by row, so that the chunks do not matter
            weight[:] = np.bincount(generator.integers(rows, size=rows), minlength=rows)
        found.append(np.stack([metric(weights) for metric in metrics], axis=1))
    return np.concatenate(found)


def estimated(values: np.ndarray, samples: np.ndarray, rows: int) -> Estimate:
    """From the values of S seeds (S,) and their samples (B, S), the mean and its spread.

    The variance over row samples of one seed holds rows and residual, that of the mean over seeds the rows and an S-th of the residual.
    """
    s = len(values)
    row = float(samples.mean(1).var(ddof=1)) * rows / (rows - 1)
    if s == 1:
        return Estimate(float(values.mean()), Spread(0.0, row, 0.0), s, rows)
    of_one = float(samples.var(axis=0, ddof=1).mean()) * rows / (rows - 1)
    spread = Spread(float(values.var(ddof=1)) / s, row, max(of_one - row, 0.0) / (s - 1))
    return Estimate(float(values.mean()), spread, s, rows)
