"""From finished runs to verdicts: which word, from which runs, and how it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.arms import Cell, Comparison
from experiments.metrics import METRICS
from experiments.power import measured_power, planned_power
from experiments.sentences import sentence
from experiments.statistics import crossed
from experiments.verdict import BETTER, EQUIVALENT, NOTHING, SAME, UNDECIDED, WORSE, Verdict, judge, verdict_of
from tests.experiments.made import arm_of, finished, labels, log_probs
from utils import BadOption

ROWS = 60
LABEL = labels(ROWS)


def right(share: float, seeds: int, *, spread: float = 0.0, seed: int = 0) -> np.ndarray:
    """(S, N): rows are easy or hard for all, `share` of them right on average, seeds apart by `spread`."""
    draw = np.random.default_rng(seed)
    easy = np.random.default_rng(99).permutation(ROWS)  # the same for every arm
    worth = share * ROWS + spread * ROWS * draw.normal(size=seeds)
    flips = draw.random((seeds, ROWS)) < 0.02
    return (easy[None] < worth[:, None]) ^ flips


def compared(cells: list[Cell], **more: Any) -> Comparison:
    arms = tuple(dict.fromkeys(cell.arm for cell in cells))
    return Comparison(**{"arms": arms, "baseline": arms[0], "cells": tuple(cells), **more})


def only(comparison: Comparison) -> Verdict:
    (found,) = judge(comparison).verdicts
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    """A baseline, an arm that is far better, and one that nobody can tell from the baseline; four seeds."""
    place = tmp_path_factory.mktemp("three")
    arms = {"base": right(0.6, 4, seed=1), "good": right(0.9, 4, seed=2), "like": right(0.6, 4, spread=0.03, seed=3)}
    return [cell for arm, rows in arms.items() for cell in arm_of(place, arm, rows, LABEL)]


def of(cells: list[Cell], *arms: str) -> list[Cell]:
    return [cell for arm in arms for cell in cells if cell.arm == arm]


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("low", "high", "word", "word_if_lower_is_better"),
    [
        (0.1, 0.9, BETTER, WORSE),
        (-0.9, -0.1, WORSE, BETTER),
        (0.1, 0.2, BETTER, WORSE),  # inside the margin, and there
        (-0.2, 0.29, EQUIVALENT, EQUIVALENT),
        (-0.2, 0.3, UNDECIDED, UNDECIDED),
        (-0.5, 0.1, UNDECIDED, UNDECIDED),
        (0.0, 0.9, UNDECIDED, UNDECIDED),
    ],
)
def test_the_word_is_read_from_the_interval(low: float, high: float, word: str, word_if_lower_is_better: str) -> None:
    assert verdict_of(low, high, 0.3, METRICS["accuracy"]) == word
    assert verdict_of(low, high, 0.3, METRICS["nll"]) == word_if_lower_is_better


def test_the_estimate_is_that_of_the_rows(three: list[Cell]) -> None:
    verdicts = judge(compared(three))
    good, like = verdicts.verdicts
    assert (good.verdict, like.verdict) == (BETTER, UNDECIDED)
    d = right(0.9, 4, seed=2).astype(float) - right(0.6, 4, seed=1)
    assert good.estimate == crossed(d)
    assert good.wins == 4
    assert (good.level, like.level) == (0.025, 0.05)  # Holm: the first of two, then the last
    assert (good.low, good.high) == crossed(d).interval(0.025)
    assert good.p_holm == pytest.approx(2 * crossed(d).p)
    assert verdicts.open_arms == ("like",)
    assert good.telling_rows == int((d != 0).any(0).sum())


@pytest.mark.parametrize("metric", ["accuracy", "nll", "ece", "aurc", "f1_macro"])
def test_the_other_way_round_better_is_worse(three: list[Cell], metric: str) -> None:
    one = only(compared(of(three, "base", "good"), metric=metric))
    other = only(compared(of(three, "base", "good"), metric=metric, baseline="good"))
    assert one.estimate
    assert other.estimate
    assert other.estimate.mean == pytest.approx(-one.estimate.mean)
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low))
    assert {one.verdict, other.verdict} in ({BETTER, WORSE}, {UNDECIDED}, {EQUIVALENT})
    assert one.wins + other.wins == 4 - one.ties


def test_a_wide_margin_makes_it_equivalent_and_percents_of_the_baseline_are_one(three: list[Cell]) -> None:
    assert only(compared(of(three, "base", "like"), margin=30)).verdict == EQUIVALENT
    found = only(compared(of(three, "base", "like"), metric="nll"))
    base = np.mean([-log_probs(r, LABEL).numpy()[np.arange(ROWS), LABEL].mean() for r in right(0.6, 4, seed=1)])
    assert found.margin == pytest.approx(0.02 * base)
    assert only(compared(of(three, "base", "like"))).margin == 0.003


def test_better_inside_the_margin_says_both(three: list[Cell]) -> None:
    verdicts = judge(compared(of(three, "base", "good"), margin=60))
    (found,) = verdicts.verdicts
    assert (found.verdict, found.within_margin) == (BETTER, True)
    assert "better than base" in sentence(found, verdicts)
    assert "smaller than the margin of 60.0 points" in sentence(found, verdicts)


def test_calibrated_probabilities_are_compared_if_asked_for(three: list[Cell]) -> None:
    raw, calibrated = (only(compared(of(three, "base", "good"), metric="nll", calibrated=c)) for c in (False, True))
    assert raw.estimate
    assert calibrated.estimate
    assert abs(calibrated.estimate.mean) < abs(raw.estimate.mean)


# ---------------------------------------------------------------- which runs count


def test_pairs_only_and_they_are_counted(three: list[Cell]) -> None:
    cells = [replace(c, state="failed", run=None) if (c.arm, c.seed) == ("good", 2) else c for c in of(three, "base", "good")]
    found = only(compared(cells))
    assert (found.seeds, found.missing) == ((0, 1, 3), (2,))
    d = (right(0.9, 4, seed=2).astype(float) - right(0.6, 4, seed=1))[[0, 1, 3]]
    assert found.estimate == crossed(d)


@pytest.mark.parametrize("state", ["running", "failed", "stopped", "stale", "pending"])
def test_an_arm_without_a_pair_has_no_result(three: list[Cell], state: str) -> None:
    cells = [replace(c, state=state) if c.arm == "good" else c for c in of(three, "base", "good")]
    verdicts = judge(compared(cells))
    (found,) = verdicts.verdicts
    assert found.verdict == NOTHING
    assert "good: no result" in sentence(found, verdicts)
    assert verdicts.open_arms == ("good",)


def test_an_arm_without_a_result_counts_in_the_family(three: list[Cell]) -> None:
    cells = [replace(c, state="pending", run=None) if c.arm == "like" else c for c in three]
    assert judge(compared(cells)).verdicts[0].level == 0.025


def test_one_seed_is_about_rows_and_says_so(three: list[Cell]) -> None:
    verdicts = judge(compared([c for c in of(three, "base", "like") if c.seed == 0]))
    (found,) = verdicts.verdicts
    assert found.estimate
    assert found.estimate.df == ROWS - 1
    assert "One seed: this interval knows test rows only" in sentence(found, verdicts)
    assert found.pairing is None


def test_exploratory_arms_stand_outside_of_the_family(three: list[Cell]) -> None:
    verdicts = judge(compared(three, exploratory=frozenset({"like"})))
    good, like = verdicts.verdicts
    assert (good.level, good.exploratory, like.level, like.exploratory) == (0.05, False, 0.05, True)
    assert "(exploratory)" in sentence(like, verdicts)


def test_the_verdict_of_declared_seeds_stays_when_seeds_are_added(three: list[Cell]) -> None:
    verdicts = judge(compared(three, exploratory_seeds=frozenset({3})))
    as_planned = judge(compared([c for c in three if c.seed != 3])).verdicts
    assert all(v.exploratory and len(v.seeds) == 4 for v in verdicts.verdicts)
    assert [v.declared for v in verdicts.verdicts] == [v.verdict for v in as_planned]
    assert "(exploratory; the declared seeds alone: better)" in sentence(verdicts.verdicts[0], verdicts)


def test_seeds_added_to_a_plan_with_looks_count_and_are_exploratory(three: list[Cell]) -> None:
    """Looks are made of the declared seeds; an arm that has no seed beyond them keeps its verdict."""
    cells = [c for c in three if c.arm != "good" or c.seed < 3]
    verdicts = judge(compared(cells, looks=(2, 3), exploratory_seeds=frozenset({3})))
    good, like = verdicts.verdicts
    as_planned = judge(compared([c for c in three if c.seed < 3], looks=(2, 3))).verdicts
    assert (like.seeds, like.exploratory, like.declared, like.look) == ((0, 1, 2, 3), True, as_planned[1].verdict, None)
    assert (good.seeds, good.verdict, good.level) == (as_planned[0].seeds, as_planned[0].verdict, as_planned[0].level)
    assert (good.exploratory, good.declared, good.missing) == (False, None, (3,))


def test_two_names_of_one_configuration(three: list[Cell]) -> None:
    more = {"arms": ("base", "good", "again", "fine"), "same_as": {"again": "base", "fine": "good"}}
    verdicts = judge(compared(of(three, "base", "good"), **more))
    good, again, fine = verdicts.verdicts
    assert (again.verdict, fine.verdict) == (SAME, BETTER)
    assert (fine.estimate, fine.level) == (good.estimate, 0.05)  # one comparison, told twice
    assert sentence(again, verdicts) == "again is the same configuration as base."
    as_baseline = judge(compared(of(three, "base", "good"), **{**more, "baseline": "again"})).verdicts
    assert [v.verdict for v in as_baseline] == [SAME, BETTER, BETTER]


def test_predictors_inside_a_run_are_arms(tmp_path: Path) -> None:
    runs = []
    for seed in range(3):
        both = {"linear": log_probs(right(0.6, 3, seed=5)[seed], LABEL), "uniform": log_probs(right(0.95, 3, seed=6)[seed], LABEL)}
        runs.append(finished(tmp_path / str(seed), both, LABEL))
    sources = ("linear", "uniform.raw", "uniform.calibrated")
    cells = [Cell(source, seed, "done", run, source) for source in sources for seed, run in enumerate(runs)]
    verdicts = judge(compared(cells))
    raw, calibrated = verdicts.verdicts
    assert (raw.verdict, raw.estimate, raw.time) == (BETTER, calibrated.estimate, None)
    assert "training time" not in sentence(raw, verdicts)
    assert judge(compared(cells, metric="nll")).verdicts[0].estimate != judge(compared(cells, metric="nll")).verdicts[1].estimate


def test_right_on_the_very_same_rows_is_not_certainty(tmp_path: Path) -> None:
    rows = right(0.7, 3)
    cells = [*arm_of(tmp_path, "a", rows, LABEL), *arm_of(tmp_path, "b", rows, LABEL)]
    found = only(compared(cells))
    assert found.verdict == UNDECIDED
    assert found.high == -found.low == pytest.approx(1 - 0.025 ** (1 / ROWS))
    assert sentence(found, judge(compared(cells))).endswith(
        # 1 - 0.025 ** (1 / n) is below 0.003 from n = log(0.025) / log(0.997) = 1227.8 on
        "To show that it is within the margin of 0.3 points: 1,228 test rows, none of which tells them apart."
    )
    assert only(compared(cells, margin=8)).verdict == EQUIVALENT
    assert only(compared(cells, metric="nll")).verdict == EQUIVALENT  # that the very same probabilities come by chance need not be feared


# ---------------------------------------------------------------- looks


def test_looks_decide_in_their_order_and_early_verdicts_stay(three: list[Cell]) -> None:
    comparison = compared(three, looks=(2, 4))
    verdicts = judge(comparison)
    good, like = verdicts.verdicts
    two = judge(compared([c for c in three if c.seed < 2], looks=(2, 4))).verdicts
    assert two[0].level == pytest.approx(0.025 / 2)  # half of the error at this look, half of that for the first of two
    assert (good.look, good.verdict) in ((2, BETTER), (4, BETTER))
    assert (like.look, like.seeds) == (4, (0, 1, 2, 3))
    if two[0].verdict == BETTER:
        assert good.seeds == (0, 1)


def test_before_the_first_look_and_between_looks(three: list[Cell]) -> None:
    pending = [c if c.seed < 3 else replace(c, state="pending", run=None) for c in of(three, "base", "like")]
    early = judge(compared(pending, looks=(4, 6)))
    assert early.verdicts[0].verdict == UNDECIDED
    assert "No verdict before the first look, at 4 seeds" in sentence(early.verdicts[0], early)
    between = only(compared(pending, looks=(2, 4)))
    assert (between.look, between.seeds) == (2, (0, 1))


def test_a_failed_seed_is_left_out_of_its_look_and_no_later_one_takes_its_place(three: list[Cell]) -> None:
    failed = [replace(c, state="failed", run=None) if c.seed == 1 else c for c in of(three, "base", "like")]
    assert only(compared(failed, looks=(3, 4))).seeds == (0, 2, 3)
    at_three = only(compared([c for c in failed if c.seed < 3], looks=(3, 4)))
    assert (at_three.look, at_three.seeds, at_three.early) == (3, (0, 2), False)


def test_a_look_that_has_not_come_is_not_made_with_the_seeds_of_the_last(three: list[Cell]) -> None:
    """Else the same three seeds would be tested at the levels of all looks."""
    found = only(compared([c for c in of(three, "base", "like") if c.seed < 3], looks=(3, 4)))
    assert (found.look, found.level) == (3, pytest.approx(0.05 * 3 / 4))


def test_seeds_come_in_the_order_of_the_plan(three: list[Cell]) -> None:
    backwards = sorted(of(three, "base", "like"), key=lambda c: -c.seed)
    pending = [replace(c, state="pending", run=None) if c.seed == 0 else c for c in backwards]
    assert only(compared(pending, looks=(2, 4))).seeds == (3, 2)


# ---------------------------------------------------------------- plans that can't be judged


def test_other_test_rows_are_refused(three: list[Cell], tmp_path: Path) -> None:
    other = arm_of(tmp_path, "other", right(0.6, 1), LABEL, test_rows="others")
    with pytest.raises(BadOption, match=r"compare needs runs with the same test rows, and these differ, got '.*0 and .*0'"):
        judge(compared([*of(three, "base"), *other]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"baseline": "goo"}, r"baseline must be one of the arms: a, good \(did you mean 'good'\?\), got 'goo'"),
        ({"metric": "acuracy"}, r"metric must be one of .* \(did you mean 'accuracy'\?\)"),
        ({"margin": 0.0}, "margin must be above 0, got 0.0"),
        ({"looks": (3, 3)}, "looks must be numbers of seeds, each larger than the one before, got '3,3'"),
        ({"looks": (1, 3)}, "looks must be a whole number of at least 2, got 1"),
        ({"arms": ("good",)}, "compare needs at least two arms"),
    ],
)
def test_wrong_comparisons_end_in_one_line(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Comparison(**{"arms": ("a", "good"), "baseline": "good", **more})


# ---------------------------------------------------------------- sentences, and what seeds can show


def test_the_sentence_has_effect_interval_and_price(tmp_path: Path) -> None:
    attention = arm_of(tmp_path, "Attention", right(0.6, 4, seed=1), LABEL)
    kvt = arm_of(tmp_path, "Kvt(K=9)", right(0.9, 4, seed=2), LABEL, seconds=10.2)
    verdicts = judge(compared([*attention, *kvt]))
    (found,) = verdicts.verdicts
    assert found.estimate
    low, high = found.low * 100, found.high * 100
    size, bounds = f"{found.estimate.mean * 100:.1f} points", f"({low:.1f} to {high:.1f})"
    assert sentence(found, verdicts) == f"Kvt(K=9) is {size} better than Attention {bounds}, 1.02 x the training time."
    turned = judge(replace(verdicts.comparison, baseline="Kvt(K=9)"))
    assert sentence(turned.verdicts[0], turned) == f"Attention is {size} worse than Kvt(K=9) {bounds}, 0.98 x the training time."


def test_lower_is_better_reads_the_same(three: list[Cell]) -> None:
    verdicts = judge(compared(of(three, "base", "good"), metric="nll"))
    (found,) = verdicts.verdicts
    assert found.estimate
    assert found.estimate.mean < 0
    assert f"good is {-found.estimate.mean:.3f} nats better than base ({-found.high:.3f} to {-found.low:.3f})" in sentence(found, verdicts)


def test_what_would_settle_it_is_said(three: list[Cell]) -> None:
    verdicts = judge(compared(of(three, "base", "like")))
    (found,) = verdicts.verdicts
    assert found.settling
    text = sentence(found, verdicts)
    assert f"4 seeds on {ROWS} test rows find a difference of" in text
    assert any(words in text for words in ("seeds on these rows", "test rows with these seeds", "neither alone would do"))


def test_what_seeds_can_show_before_and_after_the_first_two(three: list[Cell]) -> None:
    assert planned_power(5) == "5 seeds find, with 80 % power, paired differences of 1.7 standard deviations"
    assert "as the first of 3 (Holm)" in planned_power(3, 3)
    assert "use at least 3" in planned_power(1)
    first_two = compared([c for c in three if c.seed < 2], looks=(3, 5))
    line = measured_power(first_two, 5)
    assert line
    assert "5 seeds will find" in line
    assert "; for 0.3 " in line
    assert measured_power(compared([c for c in three if c.seed < 1]), 5) is None
    assert measured_power(compared([c for c in three if c.seed < 2 or c.arm != "like"] + [Cell("more", 0, "pending", None)]), 5) is None
