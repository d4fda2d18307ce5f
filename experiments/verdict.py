"""From finished runs to verdicts: which arm is better than the baseline, how sure that is, at what price, and what would settle it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.arms import Comparison
from experiments.looks import level as level_of
from experiments.looks import overall
from experiments.metrics import METRICS, Metric
from experiments.scored import Scored, score
from experiments.statistics import ALPHA, MOST_ROWS, Estimate, Settling, holm, holm_levels, settling, smallest

BETTER, WORSE, EQUIVALENT, UNDECIDED = "better", "worse", "equivalent", "undecided"
SAME, NOTHING = "same", "no result"  # another name of the baseline's configuration; no pair of runs to compare


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One arm beside the baseline. Numbers as in results.json: the estimate is of arm minus baseline, whichever is better.

    `low` to `high` is the interval at `level`, which Holm's procedure gives (and a look, if there are some); the verdict is read from it.
    `seeds` are those that it rests on, `missing` those that only one of the two has. `within_margin`: the interval lies inside the margin,
    also where it excludes 0. `telling_rows`: on how many rows the two are not alike. `pairing`: standard error over what it were if the
    two had seeds and rows of their own: of seeds, of rows, of both. `time`: training time over the baseline's. `declared`: the verdict of
    the declared seeds alone, where others were added.
    """

    arm: str
    baseline: str
    verdict: str
    estimate: Estimate | None = None
    low: float = 0.0
    high: float = 0.0
    level: float = ALPHA
    p_holm: float | None = None
    margin: float = 0.0
    within_margin: bool = False
    wins: int = 0
    ties: int = 0
    seeds: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    telling_rows: int = 0
    settling: Settling | None = None
    pairing: tuple[float, float, float] | None = None
    exploratory: bool = False
    look: int | None = None
    early: bool = False
    time: float | None = None
    declared: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    comparison: Comparison
    verdicts: tuple[Verdict, ...]
    scored: Scored

    @property
    def metric(self) -> Metric:
        return METRICS[self.comparison.metric]

    @property
    def open_arms(self) -> tuple[str, ...]:
        """Arms that more seeds may still decide. At a look all others may stop, and the baseline if none is open."""
        return tuple(v.arm for v in self.verdicts if v.verdict in (UNDECIDED, NOTHING))


@dataclass(frozen=True)
class Stand:
    """How far an arm has come: the seeds that count, their estimate, and which look it is (0 of one where none were declared).

    `early`: the first look has not come.
    """

    seeds: tuple[int, ...]
    estimate: Estimate
    look: int = 0
    early: bool = False


def judge(comparison: Comparison) -> Verdicts:
    """Reads predictions and results of the finished cells, and compares each arm with the baseline."""
    scored, later = score(comparison), comparison.exploratory_seeds
    if not later:
        return Verdicts(comparison=comparison, verdicts=tuple(_judged(comparison, scored)), scored=scored)
    declared = replace(comparison, cells=tuple(c for c in comparison.cells if c.seed not in later), exploratory_seeds=frozenset())
    as_declared = _judged(declared, scored.without(later))
    of_all = _judged(replace(comparison, looks=()), scored)  # looks were declared for the other seeds
    verdicts = []
    for one, first in zip(of_all, as_declared, strict=True):
        rests_on_later = not later.isdisjoint(one.seeds)
        verdicts.append(replace(one, declared=first.verdict) if rests_on_later else replace(first, missing=one.missing))
    return Verdicts(comparison=comparison, verdicts=tuple(verdicts), scored=scored)


def _judged(comparison: Comparison, scored: Scored) -> list[Verdict]:
    base = comparison.same_as.get(comparison.baseline, comparison.baseline)
    own = [arm for arm in comparison.arms if arm != base and arm not in comparison.same_as]
    found: dict[str, Verdict] = {}
    stands: dict[str, Stand] = {}
    for look in range(max(1, len(comparison.looks))):
        decided = {arm: v for arm, v in found.items() if v.verdict != UNDECIDED}
        stands |= {arm: stand for arm in own if arm not in decided and (stand := _stand(comparison, scored, arm, look))}
        found = _judge_stands(comparison, scored, stands, decided)
    verdicts = []
    for arm in comparison.arms:
        name, mark = comparison.same_as.get(arm, arm), arm in comparison.exploratory
        if arm == comparison.baseline:
            continue
        nothing = Verdict(arm=arm, baseline=comparison.baseline, verdict=SAME if name == base else NOTHING, exploratory=mark)
        verdicts.append(replace(found.get(name, nothing), arm=arm, baseline=comparison.baseline))
    return verdicts


def _stand(comparison: Comparison, scored: Scored, arm: str, look: int) -> Stand | None:
    """Of the seeds that arm and baseline both have, those that count at this look; None if it has not come.

    A look comes with its number of seeds in the order of the plan. One that failed is left out and no later one takes its place: who
    waits for a fifth result because the third is missing looks ahead.
    """
    base = comparison.same_as.get(comparison.baseline, comparison.baseline)
    in_order = list(dict.fromkeys(cell.seed for cell in comparison.cells))
    common = [seed for seed in in_order if seed in scored.seeds(arm) and seed in scored.seeds(base)]
    if not comparison.looks:
        return Stand(tuple(common), scored.difference(arm, base, common)) if common else None
    seen = in_order[: comparison.looks[look]]
    ends = [cell.state in ("done", "failed") for name in (arm, base) for cell in comparison.cells_of(name) if cell.seed in seen]
    early = len(seen) < comparison.looks[look] or not all(ends)
    counted = tuple(seed for seed in common if seed in seen)
    if not counted or (early and look > 0):
        return None
    return Stand(counted, scored.difference(arm, base, counted), look, early)


def _judge_stands(
    comparison: Comparison, scored: Scored, stands: Mapping[str, Stand], decided: Mapping[str, Verdict]
) -> dict[str, Verdict]:
    """Holm's procedure over the family as far as it has come: what has no result yet counts as one without a difference."""
    family = [comparison.same_as.get(arm, arm) for arm in comparison.family]
    p = {arm: 1.0 if stand.early else overall(stand.estimate.p, comparison.looks, stand.look) for arm, stand in stands.items()}
    of_family = [p.get(arm, 1.0) for arm in family]
    adjusted = dict(zip(family, holm(of_family), strict=True))
    level = dict(zip(family, holm_levels(of_family), strict=True))
    found = dict(decided)
    for arm, stand in stands.items():
        if arm not in decided:
            alone = arm not in level
            alpha = ALPHA if alone else level[arm]
            here = level_of(comparison.looks, stand.look, alpha)
            found[arm] = _verdict(comparison, scored, arm, stand, level=here, p_holm=p[arm] if alone else adjusted[arm])
    return found


def _verdict(comparison: Comparison, scored: Scored, arm: str, stand: Stand, *, level: float, p_holm: float) -> Verdict:
    metric, estimate, seeds = scored.metric, stand.estimate, stand.seeds
    base = comparison.same_as.get(comparison.baseline, comparison.baseline)
    margin = metric.margin_beside(scored.mean(base, seeds).mean, comparison.margin)
    differences = scored.differences(arm, base, seeds)
    of_seeds = scored.of_seeds(differences) * (1 if metric.higher_is_better else -1)
    low, high = interval(estimate, metric, level)
    word = UNDECIDED if stand.early else verdict_of(low, high, margin, metric)
    both = set(scored.seeds(arm)) ^ set(scored.seeds(base))
    return Verdict(
        arm=arm,
        baseline=comparison.baseline,
        verdict=word,
        estimate=estimate,
        low=low,
        high=high,
        level=level,
        p_holm=p_holm,
        margin=margin,
        within_margin=-margin < low and high < margin,
        wins=int((of_seeds > 0).sum()),
        ties=int((of_seeds == 0).sum()),
        seeds=seeds,
        missing=tuple(sorted(both)),
        telling_rows=int(np.any(differences != 0, axis=0).sum()) if metric.rows else scored.rows,
        settling=_settling(estimate, margin, level) if word == UNDECIDED else None,
        pairing=_pairing(scored, arm, base, stand),
        exploratory=arm in comparison.exploratory or not comparison.exploratory_seeds.isdisjoint(seeds),
        look=comparison.looks[stand.look] if comparison.looks else None,
        early=stand.early,
        time=_time(scored, arm, base, seeds),
    )


def interval(estimate: Estimate, metric: Metric, level: float) -> tuple[float, float]:
    """NOTE: where both are right on the very same rows there is no variance to be seen, and yet another row may tell them apart: with
    N rows, one in N would have been missed with a probability of 1/e. The bound is the share of rows that is missed in `level` of cases."""
    if metric.name == "accuracy" and estimate.mean == estimate.variance == 0:
        return -(most := _unseen(estimate.rows, level)), most
    return estimate.interval(level)


def _unseen(rows: int, level: float) -> float:
    return float(1 - (level / 2) ** (1 / rows))


def verdict_of(low: float, high: float, margin: float, metric: Metric) -> str:
    """NOTE: an interval inside the margin that excludes 0 is of a difference that is there, and too small to matter: `better` or `worse`
    is the word, and the sentence says that it is within the margin."""
    if low > 0 or high < 0:
        return BETTER if (low > 0) == metric.higher_is_better else WORSE
    return EQUIVALENT if -margin < low and high < margin else UNDECIDED


def _settling(estimate: Estimate, margin: float, level: float) -> Settling | None:
    """What would show a difference of the size that was seen or, if that is closer to nothing, that it lies within the margin.

    With one seed nobody knows what others would do.
    """
    if estimate.seeds == 1:
        return None
    if estimate.variance == 0:  # not one row tells them apart
        enough = smallest(lambda rows: _unseen(rows, level) < margin, estimate.rows, MOST_ROWS)
        return Settling(margin, None, enough, None, within=True)
    size = abs(estimate.mean)
    within = margin - size > size
    return settling(estimate, margin - size if within else size, alpha=level, at=0.9 if within else 0.8, within=within)


def _pairing(scored: Scored, arm: str, base: str, stand: Stand) -> tuple[float, float, float] | None:
    if len(stand.seeds) == 1:
        return None
    paired, parts = stand.estimate.spread, [scored.mean(name, stand.seeds).spread for name in (arm, base)]
    apart = [sum(p.seed for p in parts), sum(p.row for p in parts), sum(p.variance for p in parts)]
    if min(apart) == 0:
        return None
    seeds, rows, both = (float(np.sqrt(a / b)) for a, b in zip((paired.seed, paired.row, paired.variance), apart, strict=True))
    return seeds, rows, both


def _time(scored: Scored, arm: str, base: str, seeds: Sequence[int]) -> float | None:
    """Median over seeds; None for predictors of one run, and where a run does not tell."""
    pairs = [(scored.results[arm, seed]["about"], scored.results[base, seed]["about"]) for seed in seeds]
    if any(a is b or not a.get("seconds") or not b.get("seconds") for a, b in pairs):
        return None
    return statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
