"""Seeds and rows together: worked by hand, beside scipy, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.statistics import (
    Estimate,
    Spread,
    crossed,
    detectable,
    detectable_by_seeds,
    holm,
    holm_levels,
    power,
    settling,
    smallest,
)


def test_two_seeds_and_three_rows_by_hand() -> None:
    """Seed means 2 and 4, row means 2, 2 and 5, residuals 0, 1, -1 and 0, -1, 1."""
    found = crossed(np.array([[1.0, 2, 3], [3, 2, 7]]))
    assert found.mean == 3
    assert (found.spread.seed, found.spread.row, found.spread.residual) == pytest.approx((2 / 2, 3 / 3, 2 / 6))
    assert found.variance == pytest.approx(5 / 3)
    assert found.df == pytest.approx((25 / 9) / (1 / 1 + 1 / 2 + (1 / 9) / 2))
    half = stats.t.ppf(0.975, 25 / 14) * np.sqrt(5 / 3)
    assert found.interval() == pytest.approx((3 - half, 3 + half))
    assert found.p == pytest.approx(2 * stats.t.sf(3 / np.sqrt(5 / 3), 25 / 14))
    assert found.spread.shares == pytest.approx((0.4, 0.4, 0.2))


def test_where_rows_show_nothing_the_variance_is_that_of_seeds() -> None:
    """All rows of a seed alike, a residual of nothing: a t test over seeds."""
    of_seeds = np.array([0.1, 0.4, 0.2, 0.5])
    found = crossed(np.repeat(of_seeds[:, None], 7, axis=1))
    t = stats.ttest_1samp(of_seeds, 0)
    assert found.p == pytest.approx(t.pvalue)
    assert found.interval(0.1) == pytest.approx(tuple(t.confidence_interval(0.9)))


def test_one_seed_is_a_paired_t_test_over_rows() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 41))
    found, t = crossed((a - b)[None]), stats.ttest_rel(a, b)
    assert found.p == pytest.approx(t.pvalue)
    assert found.interval() == pytest.approx(tuple(t.confidence_interval()))


def test_seeds_that_are_alike_leave_a_paired_t_test_over_rows() -> None:
    a, b = np.random.default_rng(1).normal(size=(2, 41))
    found = crossed(np.repeat((a - b)[None], 3, axis=0))
    assert found.variance == pytest.approx(np.var(a - b, ddof=1) / 41)
    assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_the_variance_never_falls_below_that_of_rows() -> None:
    d = np.array([[1.0, 2, 9], [0, 2, 10], [2, 2, 8]])  # seed means 4, 4, 4
    found = crossed(d)
    assert found.spread.seed == pytest.approx(0)
    assert found.variance == found.spread.row


def test_seeds_that_cancel_out_in_every_row_are_not_certainty() -> None:
    found = crossed(np.array([[1.0, -1, 0, 0], [-1, 1, 0, 0]]))
    assert found.spread.seed == found.spread.row == 0
    assert found.variance == found.spread.residual > 0
    assert found.df == pytest.approx(3)


def test_no_difference_anywhere() -> None:
    found = crossed(np.zeros((3, 5)))
    assert (found.p, found.interval()) == (1.0, (0.0, 0.0))
    assert crossed(np.ones((3, 5))).p == 0.0


@given(st.integers(1, 5), st.integers(2, 9), st.integers(0, 10**6), st.floats(-3, 3), st.floats(0.1, 5))
@settings(max_examples=40, deadline=None)
def test_the_other_way_round_the_sign_flips_and_units_do_not_matter(s: int, n: int, seed: int, shift: float, unit: float) -> None:
    d = np.random.default_rng(seed).normal(size=(s, n)) + shift
    one, swapped, scaled = crossed(d), crossed(-d), crossed(unit * d)
    low, high = one.interval()
    assert swapped.interval() == pytest.approx((-high, -low))
    assert scaled.interval() == pytest.approx((unit * low, unit * high))
    assert one.p == pytest.approx(swapped.p) == pytest.approx(scaled.p)
    assert crossed(d[:, ::-1]).df == pytest.approx(one.df)


# ---------------------------------------------------------------- coverage


def covered(d: np.ndarray) -> float:
    """Share of (T, S, N) simulated differences, of which the true mean is 0, whose interval holds it."""
    found = [crossed(one).interval() for one in d]
    return float(np.mean([low <= 0 <= high for low, high in found]))


def gaussian(trials: int, seeds: int, *, seed: float, row: float, residual: float) -> np.ndarray:
    draw = np.random.default_rng(seeds).normal
    n = 150
    return seed * draw(size=(trials, seeds, 1)) + row * draw(size=(trials, 1, n)) + residual * draw(size=(trials, seeds, n))


def binary(trials: int, seeds: int, *, seed: float, row: float, residual: float) -> np.ndarray:
    """Two arms of equal worth, right or wrong on rows that are easy or hard for both."""
    draw = np.random.default_rng(seeds).normal
    n = 200
    easy = 1 + 1.5 * draw(size=(trials, 1, n))

    def right() -> np.ndarray:
        own = seed * draw(size=(trials, seeds, 1)) + row * draw(size=(trials, 1, n)) + residual * draw(size=(trials, seeds, n))
        return (easy + own > 0).astype(float)

    return right() - right()


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("kind", [gaussian, binary])
@pytest.mark.parametrize(
    "parts",
    [
        {"seed": 0.0, "row": 0.0, "residual": 1.0},
        {"seed": 0.1, "row": 0.5, "residual": 1.0},
        {"seed": 1.0, "row": 0.3, "residual": 0.5},
    ],
    ids=["residual", "all", "seeds"],
)
def test_intervals_hold_the_truth(kind, parts: dict[str, float], seeds: int) -> None:
    """At least .93; 1500 trials know a share of .95 to .006."""
    assert covered(kind(1500, seeds, **parts)) >= 0.93


@pytest.mark.parametrize(("seeds", "least"), [(3, 0.915), (5, 0.93), (10, 0.93)])
def test_the_least_that_intervals_hold(seeds: int, least: float) -> None:
    """Where seeds vary 5 to 8 times as much as rows and there is nothing else: .922, .941 and .948, from 400,000 trials. Means and mean
    squares are drawn as they are distributed, which is cheaper than drawing rows."""
    rng, trials, n, of_seeds, of_rows = np.random.default_rng(seeds), 6000, 2000, 6.0, 1.0
    seed = of_seeds * rng.chisquare(seeds - 1, trials) / (seeds - 1)
    row = of_rows * rng.chisquare(n - 1, trials) / (n - 1)
    mean = np.sqrt(of_seeds + of_rows) * rng.normal(size=trials)
    found = [Estimate(m, Spread(s, r, 0.0), seeds, n).interval() for m, s, r in zip(mean, seed, row, strict=True)]
    held = np.mean([low <= 0 <= high for low, high in found])
    assert least <= held <= 0.96


def test_intervals_over_seeds_alone_or_rows_alone_do_not() -> None:
    """What the crossed interval is for: the simulation can tell."""
    d = gaussian(500, 5, seed=0.2, row=1.5, residual=1.0)
    over_seeds, over_rows = (np.array([stats.ttest_1samp(one.mean(axis), 0).pvalue > 0.05 for one in d]) for axis in (1, 0))
    assert over_seeds.mean() < 0.9
    assert over_rows.mean() < 0.92
    assert covered(d) >= 0.93


# ---------------------------------------------------------------- Holm


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_levels_end_where_the_procedure_ends() -> None:
    """.005 <= .05/4 and .01 <= .05/3, but .03 > .05/2: that and the last are judged at .025."""
    assert holm_levels([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert holm_levels([0.03, 0.04]) == pytest.approx([0.025, 0.025])
    assert holm_levels([0.02]) == [0.05]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_level_rejects_exactly_what_holm_rejects(p: list[float]) -> None:
    for one, adjusted, level in zip(p, holm(p), holm_levels(p), strict=True):
        if abs(adjusted - 0.05) > 1e-9:
            assert (one <= level) == (adjusted <= 0.05)


# ---------------------------------------------------------------- power


@pytest.mark.parametrize(("seeds", "deviations"), [(3, 3.3), (5, 1.7), (10, 1.0)])
def test_what_seeds_find_by_simulation(seeds: int, deviations: float) -> None:
    least = detectable_by_seeds(seeds)
    assert round(least, 1) == deviations
    d = least + np.random.default_rng(0).normal(size=(20_000, seeds))
    assert np.mean(stats.ttest_1samp(d, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.012)


def test_power_with_nothing_to_find_is_the_level() -> None:
    estimate = Estimate(0.0, Spread(0.1, 0.05, 0.01), 5, 100)
    assert power(1e-9, estimate, 0.03) == pytest.approx(0.015, abs=1e-4)  # NOTE: to the one side
    assert power(detectable(estimate), estimate) == pytest.approx(0.8)
    assert power(1e6, estimate) == 1.0


def test_what_settles_is_enough_and_one_less_is_not() -> None:
    estimate = crossed(gaussian(1, 5, seed=0.3, row=0.5, residual=1.0)[0])
    found = settling(estimate, 0.2)
    assert found.seeds
    assert power(0.2, estimate.with_more(found.seeds, estimate.rows)) >= 0.8
    assert power(0.2, estimate.with_more(found.seeds - 1, estimate.rows)) < 0.8


def test_rows_cannot_settle_what_seeds_leave_open_nor_seeds_what_rows_leave_open() -> None:
    by_seeds, by_rows = Estimate(0.1, Spread(0.01, 1e-6, 1e-7), 3, 500), Estimate(0.1, Spread(1e-7, 0.01, 1e-7), 3, 500)
    assert (settling(by_seeds, 0.1).rows, settling(by_rows, 0.1).seeds) == (None, None)
    assert settling(by_seeds, 0.1).seeds
    assert settling(by_rows, 0.1).rows
    both = settling(Estimate(0.1, Spread(0.01, 0.01, 1e-7), 3, 500), 0.1)
    assert (both.seeds, both.rows) == (None, None)
    assert both.both
    assert both.both[0] / 3 == pytest.approx(both.both[1] / 500, rel=0.2)


def test_more_of_what_there_is_leaves_what_simulation_finds() -> None:
    """From 4 seeds and 60 rows to 9 and 150: the expected variance, from many estimates."""
    draw = np.random.default_rng(3).normal
    small = [0.3 * draw(size=(4, 1)) + 0.5 * draw(size=(1, 60)) + draw(size=(4, 60)) for _ in range(1500)]
    expected = 0.09 / 9 + 0.25 / 150 + 1 / (9 * 150)
    estimates = [crossed(d) for d in small]
    projected = np.mean([(e.spread.seed - e.spread.residual) * 4 / 9 + (e.spread.row - e.spread.residual) * 60 / 150 for e in estimates])
    assert projected + 1 / (9 * 150) == pytest.approx(expected, rel=0.05)
    assert np.mean([e.with_more(9, 150).variance for e in estimates]) == pytest.approx(expected, rel=0.1)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 800))
def test_the_smallest_that_is_enough(least: int, more: int, bound: int) -> None:
    most = least + more
    expected = max(least, bound) if bound <= most else None
    assert smallest(lambda x: x >= bound, least, most) == expected
