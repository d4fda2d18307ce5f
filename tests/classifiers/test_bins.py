"""Calibration errors of votes, whose probabilities lie on the edges of bins, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from classifiers.metrics import bin_of, detailed_metrics, standard_metrics


def exact_bin(probability: Fraction, bins: int) -> int:
    """The bin (low, high] that holds it; 0 lies in the first."""
    return max(0, -(-probability.numerator * bins // probability.denominator) - 1)


@pytest.mark.parametrize("k", [15, 30, 7, 16])
@pytest.mark.parametrize("bins", [15, 10])
def test_votes_fall_into_the_bins_of_exact_arithmetic(k: int, bins: int) -> None:
    votes = [Fraction(n, k) for n in range(k + 1)]
    through_log = torch.tensor([float(v) for v in votes]).clamp_min(1e-7).log().exp()  # float32, as a predictor gives them
    assert bin_of(through_log, bins).tolist() == [exact_bin(v, bins) for v in votes]


@pytest.mark.parametrize("k", [15, 30])
def test_ece_of_votes_is_that_of_exact_arithmetic(k: int) -> None:
    """Two classes; n of k neighbors vote for the first, and every third row is of it."""
    counts = [n for n in range(k + 1) if 2 * n != k] * 3
    rows = [(Fraction(n, k), 0 if i % 3 else 1) for i, n in enumerate(counts)]
    gaps, sums = [Fraction(0)] * 15, Fraction(0)
    for first, label in rows:
        confidence, predicted = max((first, 0), (1 - first, 1), key=lambda pair: pair[0])
        gaps[exact_bin(confidence, 15)] += Fraction(predicted == label) - confidence
    sums = sum((abs(gap) for gap in gaps), Fraction(0)) / len(rows)
    probs = torch.tensor([[float(f), float(1 - f)] for f, _ in rows])
    target = torch.tensor([label for _, label in rows])
    found = standard_metrics(probs.clamp_min(1e-12).log(), target)["ece"]
    assert found == pytest.approx(float(sums), abs=1e-6)
    assert detailed_metrics(probs.clamp_min(1e-12).log(), target)["ece_classwise"] >= 0
