"""Verdicts in words, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.metrics import Metric
from experiments.statistics import Settling, detectable
from experiments.verdict import BETTER, EQUIVALENT, NOTHING, SAME, WORSE, Verdict, Verdicts

MOST_DECIMALS = 6


# ---------------------------------------------------------------- numbers


def decimals_for(metric: Metric, *bounds: float) -> int:
    """As many as the width of an interval earns: one of points, three of nats; more where a bound would else read as 0."""
    least = 1 if metric.scale == 100 else 3
    shown = [abs(bound * metric.scale) for bound in bounds if bound]
    return next((d for d in range(least, MOST_DECIMALS) if all(round(number, d) for number in shown)), MOST_DECIMALS)


def number(metric: Metric, value: float, decimals: int, sign: str = "") -> str:
    text = f"{value * metric.scale:{sign}.{decimals}f}"
    return text.replace("-", "", 1) if not float(text) else text  # no -0.0


def with_unit(metric: Metric, text: str) -> str:
    """ "0.4 points", "0.012 nats", "0.004 of ECE"; of other metrics in points, which one."""
    if metric.unit in ("", "points") and metric.name != "accuracy":
        return f"{text} {metric.unit} of {metric.title}".replace("  ", " ")
    return f"{text} {metric.unit}"


def amount(metric: Metric, value: float) -> str:
    return with_unit(metric, number(metric, value, decimals_for(metric, value)))


def times(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio < 9.95 else f"{ratio:.0f} x"


def seeds_in_words(seeds: Sequence[int]) -> str:
    return ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))


# ---------------------------------------------------------------- an arm


def sentence(verdict: Verdict, verdicts: Verdicts) -> str:
    """What is known of an arm beside the baseline; and, where nothing is decided, what would."""
    alone = f"; the declared seeds alone: {verdict.declared}" if verdict.declared else ""
    mark = f" (exploratory{alone})" if verdict.exploratory else ""
    if verdict.verdict == SAME:
        return f"{verdict.arm} is the same configuration as {verdict.baseline}{mark}."
    if verdict.verdict == NOTHING or verdict.estimate is None:
        return f"{verdict.arm}: no result{mark}; it has no seed with a finished run that {verdict.baseline} has, too."
    price = f", {times(verdict.time)} the training time" if verdict.time else ""
    text = f"{_judgment(verdict, verdicts.metric)}{price}{mark}."
    if verdict.estimate.seeds == 1:
        text += " One seed: this interval knows test rows only. It is about these two trained models, not about what they are made of."
    if verdict.early:
        text += f" No verdict before the first look, at {verdicts.comparison.looks[0]} seeds."
    elif verdict.look and verdict.verdict in (BETTER, WORSE, EQUIVALENT) and verdict.look < verdicts.comparison.looks[-1]:
        text += f" Decided at the look with {len(verdict.seeds)} seeds."
    if verdict.settling and not verdict.early:
        text += " " + _what_settles(verdict.settling, verdict, verdicts)
    elif verdict.verdict not in (BETTER, WORSE, EQUIVALENT) and verdict.estimate.seeds == 1:
        text += " What would settle it shows with three seeds or more."
    return text


def _judgment(verdict: Verdict, metric: Metric) -> str:
    assert verdict.estimate is not None
    arm, base = verdict.arm, verdict.baseline
    sign = 1 if metric.higher_is_better else -1
    mean, low, high = sign * verdict.estimate.mean, sign * verdict.low, sign * verdict.high
    low, high = min(low, high), max(low, high)
    d = decimals_for(metric, *((low, high) if low * high > 0 else (high - low,)))
    margin = amount(metric, verdict.margin)
    if verdict.verdict in (BETTER, WORSE):
        size, near, far = sorted((abs(mean), abs(low), abs(high)))[1], min(abs(low), abs(high)), max(abs(low), abs(high))
        bounds = f"{number(metric, near, d)} to {number(metric, far, d)}"
        text = f"{arm} is {with_unit(metric, number(metric, size, d))} {verdict.verdict} than {base} ({bounds})"
        return text + (f": a difference that is there, and smaller than the margin of {margin}" if verdict.within_margin else "")
    side = "alike" if not float(number(metric, mean, d)) else with_unit(metric, number(metric, abs(mean), d))
    side += "" if side == "alike" else " better" if mean > 0 else " worse"
    side += f" ({_signed(metric, low, d)} to {_signed(metric, high, d)})"
    if verdict.verdict == EQUIVALENT:
        return f"{arm} and {base} are equivalent within the margin of {margin}: {arm} is {side}"
    text = f"{arm} against {base} is undecided: {side}"
    if -low < verdict.margin:
        text += f", not worse by the margin of {margin}"
    if high < verdict.margin:
        text += f", not better by the margin of {margin}"
    return text


def _signed(metric: Metric, gain: float, decimals: int) -> str:
    return f"{number(metric, abs(gain), decimals)} {'better' if gain > 0 else 'worse'}"


def _what_settles(found: Settling, verdict: Verdict, verdicts: Verdicts) -> str:
    estimate, metric = verdict.estimate, verdicts.metric
    assert estimate is not None
    within = f"show that it is within the margin of {amount(metric, verdict.margin)}"
    if estimate.variance == 0:
        rows = f"{found.rows:,} test rows" if found.rows else "more test rows than can be had"
        return f"To {within}: {rows}, none of which tells them apart."
    of_seeds, of_rows, _ = (f"{share:.0%}".replace("%", " %") for share in estimate.spread.shares)
    least = amount(metric, detectable(estimate, verdict.level))
    known = f"{estimate.seeds} seeds on {estimate.rows:,} test rows find a difference of {least} (80 % power)."
    seeds = f"{found.seeds:,} seeds on these rows" if found.seeds else ""
    rows = f"{found.rows:,} test rows with these seeds" if found.rows else ""
    if seeds and rows:
        ways = " or ".join((seeds, rows) if estimate.spread.seed >= estimate.spread.row else (rows, seeds))
    elif seeds:
        ways = f"{seeds}; more test rows alone would not do ({of_seeds} of the variance is between seeds, and stays)"
    elif rows:
        ways = f"{rows}; more seeds alone would not do ({of_rows} of the variance is between test rows, and stays)"
    elif found.both:
        ways = f"{found.both[0]:,} seeds on {found.both[1]:,} test rows; neither alone would do"
    else:
        ways = "no number of seeds and test rows that can be had"
    aim = within if found.within else f"find one of {amount(metric, found.target)}"
    return f"{known} To {aim}: {ways}."
