"""One line of the table for each arm: scores, and what it costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from experiments.arms import Cell
from experiments.sentences import decimals_for, number
from experiments.statistics import Estimate
from experiments.verdict import Verdict, Verdicts

COST = ("params", "gflops", "images_per_second", "images_per_second_low", "images_per_second_high", "peak_memory_mb", "seconds")


@dataclass(frozen=True)
class Summary:
    """`estimate` of the metric that is compared; `raw` and `calibrated` are its means over seeds as results.json has them.

    `cost`: medians over seeds of what results.json says. `later`: how many of the seeds were added after the plan.
    """

    arm: str
    estimate: Estimate | None
    raw: float | None
    calibrated: float | None
    cost: dict[str, float | None]
    states: tuple[str, ...]
    exploratory: bool
    verdict: Verdict | None  # None: the baseline
    later: int = 0

    @property
    def word(self) -> str:
        if self.verdict is None:
            return "baseline"
        within = ", within the margin" if self.verdict.within_margin and self.verdict.verdict in ("better", "worse") else ""
        return self.verdict.verdict + within


def summaries(verdicts: Verdicts) -> list[Summary]:
    """In the order of the plan."""
    comparison, scored, of_arm = verdicts.comparison, verdicts.scored, {v.arm: v for v in verdicts.verdicts}
    found = []
    for arm in comparison.arms:
        name, cells = comparison.same_as.get(arm, arm), comparison.cells_of(arm)
        results = [scored.results[name, seed] for seed in scored.seeds(name)]
        source = next((c.source for c in cells if c.source), "")
        found.append(
            Summary(
                arm,
                scored.mean(name) if results else None,
                _mean([scores_of(r, source, "raw").get(comparison.metric) for r in results]),
                _mean([scores_of(r, source, "calibrated").get(comparison.metric) for r in results]),
                {key: _median([cost_of(r)[key] for r in results]) for key in COST},
                tuple(c.state for c in cells),
                arm in comparison.exploratory,
                of_arm.get(arm),
                len(comparison.exploratory_seeds.intersection(scored.seeds(name))),
            )
        )
    return found


def scores_of(results: dict[str, Any], source: str, variant: str) -> dict[str, float]:
    """What results.json says: of the head's own predictor, or of `source`, whose variant counts."""
    if not source:
        return dict(results.get("test" if variant == "raw" else "test_calibrated") or {})
    wanted = (source, f"{source}.{variant}")
    of_variants = {s: of for s, of in all_scores(results, source.partition(".")[0]).items() if s.removesuffix("_tta") in wanted}
    last = list(of_variants)[-1:]  # averaged over views, where that was done
    return dict(of_variants[last[0]]) if last and last[0].rpartition(".")[2].removesuffix("_tta") == variant else {}


def all_scores(results: dict[str, Any], own: str = "own") -> dict[str, dict[str, float]]:
    """Of every predictor and variant, "linear.raw" and so on. `own`: what a run with one predictor calls it."""
    if "predictors" in results:
        of_each = results["predictors"]["scores"]
        return {f"{n}.{v}": s for n, of in of_each.items() for v, s in of.items() if isinstance(s, dict)}
    return {f"{own}.{v}": s for v, s in results["about"].get("test_variants", {}).items()}


def cost_of(results: dict[str, Any]) -> dict[str, float | None]:
    about = results["about"]
    quartiles = about.get("images_per_second_quartiles") or (None, None)
    named = {"images_per_second_low": quartiles[0], "images_per_second_high": quartiles[1]}
    return {key: named.get(key, about.get(key)) for key in COST}


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def _median(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


# ---------------------------------------------------------------- as text


def cells(summary: Summary, verdicts: Verdicts) -> dict[str, str]:
    """A line of the table as people read it, by heading; empty where nothing is known."""
    comparison, metric, estimate, verdict = verdicts.comparison, verdicts.metric, summary.estimate, summary.verdict
    percent = " %" if metric.scale == 100 else ""
    title = f"{metric.title}{percent}"
    now, other_way = ("calibrated", "as trained") if comparison.calibrated else ("as trained", "calibrated")
    named = all(c.source.endswith((".raw", ".calibrated", "_tta")) for c in comparison.cells)  # the arms' names tell
    heading, other = f"{title} ({'' if named else f'{now}, '}95 % interval)", f"{title}, {other_way}"
    second = None if named else summary.raw if comparison.calibrated else summary.calibrated
    line = {"arm": summary.arm + (" (exploratory)" if summary.exploratory else ""), heading: "", other: "", "seeds": "", "wins": ""}
    if estimate is not None:
        low, high = metric.interval(estimate)
        d = decimals_for(metric, high - low)
        line[heading] = f"{number(metric, estimate.mean, d)} ({number(metric, low, d)} to {number(metric, high, d)})"
        line["seeds"] = str(estimate.seeds) + (f" ({summary.later} exploratory)" if summary.later else "")
        line[other] = "" if second is None else number(metric, second, d)
    line[difference_heading(verdicts)] = ""
    if verdict is not None and verdict.estimate is not None:
        line["wins"] = f"{verdict.wins}/{len(verdict.seeds)}" + (f", {verdict.ties} equal" if verdict.ties else "")
        mean, low, high = verdict.estimate.mean, verdict.low, verdict.high
        d = decimals_for(metric, *((low, high) if low * high > 0 else (high - low,)))
        bounds = f"{number(metric, low, d, '+')} to {number(metric, high, d, '+')}"
        line[difference_heading(verdicts)] = f"{number(metric, mean, d, '+')} ({bounds})"
    line["verdict"] = summary.word
    return {**line, **_cost_cells(summary)}


def difference_heading(verdicts: Verdicts) -> str:
    return "difference" + (f" ({verdicts.metric.unit})" if verdicts.metric.unit else "")


def _cost_cells(summary: Summary) -> dict[str, str]:
    cost = summary.cost
    speed, params = cost["images_per_second"], cost["params"]
    ratio = f", {summary.verdict.time:.2f} x" if summary.verdict and summary.verdict.time else ""
    quartiles = [cost[f"images_per_second_{end}"] for end in ("low", "high")]
    between = "" if None in quartiles else f" ({quartiles[0]:,.0f} to {quartiles[1]:,.0f})"
    return {
        "parameters": "" if params is None else f"{params / 1e6:.3f} M" if params >= 1e5 else f"{params:,.0f}",
        "GFLOPs": "" if cost["gflops"] is None else f"{cost['gflops']:.4g}",
        "images/s (quartiles)": "" if speed is None else f"{speed:,.0f}{between}",
        "peak memory": "" if not cost["peak_memory_mb"] else f"{cost['peak_memory_mb']:,.0f} MB",
        "training time": "" if not cost["seconds"] else f"{cost['seconds']:,.1f} s{ratio}",
    }


# ---------------------------------------------------------------- below the table


def shares_lines(verdicts: Verdicts) -> list[str]:
    """Where the variance of each difference comes from, and what it gained that both arms had the same seeds and rows."""
    lines = []
    for verdict in verdicts.verdicts:
        if verdict.estimate is None or verdict.estimate.seeds == 1 or verdict.estimate.variance == 0:
            continue
        seed, row, residual = (f"{share:.0%}".replace("%", " %") for share in verdict.estimate.spread.shares)
        line = f"{verdict.arm}: seeds {seed}, test rows {row}, seeds x rows {residual}"
        if verdict.pairing is not None:
            seeds, rows, both = verdict.pairing
            line += f"; paired, the standard error is {both:.2f} of what it were unpaired (seeds {seeds:.2f}, rows {rows:.2f})"
        lines.append(line)
    return lines


def notes(verdicts: Verdicts) -> list[str]:
    """What must be known before these numbers are trusted."""
    comparison, found = verdicts.comparison, []
    if (family := len(comparison.family)) > 1:
        found.append(f"the {family} comparisons of the family share the error rate of 5 % (Holm): their intervals are wider for it")
    if comparison.looks:
        shared = f"looks at {', '.join(map(str, comparison.looks))} seeds share the error rate: intervals are wider for it"
        found.append(shared)
    for verdict in verdicts.verdicts:
        if verdict.missing and verdict.seeds:
            which = ", ".join(f"{seed} ({_why_missing(verdict, seed, verdicts)})" for seed in verdict.missing)
            pair = f"{verdict.arm} and {verdict.baseline}"
            found.append(f"{pair} have {len(verdict.seeds)} seeds in common, and these count; without a pair: {which}")
        if 0 < verdict.telling_rows < 10 and comparison.metric == "accuracy":
            rows = "1 test row tells" if verdict.telling_rows == 1 else f"{verdict.telling_rows} test rows tell"
            found.append(f"only {rows} {verdict.arm} from {verdict.baseline}: the interval is rough")
        if verdict.estimate and verdict.estimate.mean == verdict.estimate.variance == 0:
            alike = "are right on the very same test rows" if comparison.metric == "accuracy" else "say the same of every test row"
            found.append(f"{verdict.arm} and {verdict.baseline} {alike}")
    found += [f"{arm} is the same configuration as {first}: its runs are shown twice" for arm, first in comparison.same_as.items()]
    if comparison.exploratory:
        found.append("exploratory arms were added after the plan was written: judged each alone at 5 %, outside of the family")
    if comparison.exploratory_seeds:
        seeds = ", ".join(map(str, sorted(comparison.exploratory_seeds)))
        found.append(f"seeds added after the plan was written: {seeds}; what rests on them is exploratory")
    counts = {state: [c for c in comparison.cells if c.state == state] for state in ("failed", "stopped", "stale", "running", "pending")}
    if left := ", ".join(f"{len(cells)} {state}" for state, cells in counts.items() if cells):
        found.append(f"cells without a result that counts: {left}")
    return found + _circumstances(verdicts)


def _why_missing(verdict: Verdict, seed: int, verdicts: Verdicts) -> str:
    """Which of the two lacks it, and in what state."""
    for name in (verdict.arm, verdict.baseline):
        cell: Cell | None = next((c for c in verdicts.comparison.cells_of(name) if c.seed == seed), None)
        if cell is None or cell.state != "done":
            return f"{name}: {cell.state if cell else 'none'}"
    return "no pair"


def _circumstances(verdicts: Verdicts) -> list[str]:
    results = list({id(r): r for r in verdicts.scored.results.values()}.values())
    found, of_each = [], [r["about"] for r in results]
    busy = [about["load"] for about in of_each if about.get("load") and about["load"] > about.get("threads", 1) + 0.5]
    if busy:
        found.append(f"times and images/s were measured on a busy machine (load up to {max(busy):.1f}): compare them with care")
    commits = {git["commit"] for about in of_each if (git := about.get("git")) and git.get("commit")}
    if len(commits) > 1:
        found.append(f"the runs were made by {len(commits)} versions of the code")
    if warned := [r["warnings"] for r in results if r.get("warnings")]:
        found.append(f"{len(warned)} of {len(results)} runs have warnings, such as: {warned[0][0]}")
    return found
