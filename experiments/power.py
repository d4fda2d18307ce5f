"""What a number of seeds can show: before anything has run, and once two seeds of each arm have."""

from __future__ import annotations

import math
from dataclasses import replace

from experiments.arms import Comparison
from experiments.sentences import amount, decimals_for, number
from experiments.statistics import ALPHA, Estimate, Spread, detectable, detectable_by_seeds, settling
from experiments.verdict import SAME, judge


def planned_power(seeds: int, comparisons: int = 1) -> str:
    """Before anything has run."""
    if seeds < 2:
        return "1 seed: no interval will know how much seeds differ; use at least 3"
    one = f"{seeds} seeds find, with 80 % power, paired differences of {detectable_by_seeds(seeds):.1f} standard deviations"
    if comparisons == 1:
        return one
    return f"{one} in one comparison, {detectable_by_seeds(seeds, ALPHA / comparisons):.1f} as the first of {comparisons} (Holm)"


def measured_power(comparison: Comparison, seeds: int) -> str | None:
    """Once each arm has two seeds: what `seeds` of them will find, by the deviation so far; and how many find the margin.

    None before. The mean of the spreads of all arms: that of one, from two seeds, has one degree of freedom.
    """
    verdicts = judge(replace(comparison, looks=()))  # what the seeds so far have shown, whether or not it is time for a verdict
    metric, known = verdicts.metric, [v for v in verdicts.verdicts if v.estimate is not None and v.estimate.seeds >= 2]
    if not known or len(known) < sum(v.verdict != SAME for v in verdicts.verdicts):
        return None
    now = [v.estimate for v in known if v.estimate is not None]
    spreads = [estimate.with_more(seeds, estimate.rows).spread for estimate in now]
    mean = Spread(*(sum(parts) / len(spreads) for parts in zip(*((s.seed, s.row, s.residual) for s in spreads), strict=True)))
    planned = Estimate(0.0, mean, seeds, now[0].rows)
    deviation = math.sqrt(sum(estimate.spread.seed * estimate.seeds for estimate in now) / len(now))
    alpha = ALPHA / max(1, len(comparison.family))
    least, margin = detectable(planned, alpha), known[0].margin
    enough = settling(planned, margin, alpha=alpha).seeds if least > margin else seeds
    text = f"paired differences of seeds deviate by {amount(metric, deviation)}: {seeds} seeds will find {amount(metric, least)}"
    if least <= margin:
        return text
    small = number(metric, margin, decimals_for(metric, margin))
    if enough is None:
        return f"{text}; for {small} no number of seeds is enough on {planned.rows:,} test rows"
    return f"{text}; for {small} you need {enough:,}"
