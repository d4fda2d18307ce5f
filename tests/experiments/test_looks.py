"""Looks: together they err no more often than one test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from experiments.looks import level, overall


def test_each_look_spends_what_its_new_seeds_are_of_all() -> None:
    assert [level([3, 5, 10], look) for look in range(3)] == pytest.approx([0.015, 0.01, 0.025])
    assert level([10], 0) == level([], 0) == 0.05
    assert level([2, 4], 1, 0.01) == pytest.approx(0.005)


def test_the_error_of_t_tests_at_looks_by_simulation() -> None:
    """Seeds come one after another, each look tests all that came: at 5 % each time it errs too often, at these levels it does not."""
    d, looks = np.random.default_rng(0).normal(size=(40_000, 10)), (3, 5, 10)
    p = np.stack([stats.ttest_1samp(d[:, :s], 0, axis=1).pvalue for s in looks], axis=1)
    assert (p < 0.05).any(1).mean() > 0.08
    assert 0.035 < (p < [level(looks, look) for look in range(3)]).any(1).mean() <= 0.05


def test_a_look_finds_exactly_what_its_overall_p_says() -> None:
    looks = (3, 5, 10)
    for look in range(3):
        assert overall(level(looks, look), looks, look) == pytest.approx(0.05)
    assert overall(0.03, (), 0) == 0.03
    assert overall(0.9, looks, 1) == 1.0
