"""What is compared, gathered from a plan's runs or from finished runs by path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import config as flags
from experiments.arms import Cell, Comparison
from experiments.cells import Place
from experiments.grid import BY_THEMSELVES
from experiments.plan import FILE, Plan, shown_arms, sources_of
from experiments.read import results as read_results
from experiments.verdict import Verdicts, judge
from run.directory import RESULTS
from utils import BadOption, did_you_mean, understood


def compared(comparison: Comparison) -> Verdicts:
    return judge(comparison)


def from_plan(plan: Plan, found: Sequence[tuple[Place, str]], same_as: Mapping[str, str]) -> Comparison:
    """A plan's comparison, with as many runs as there are."""
    cells = [Cell(place.arm, place.seed, state, place.run if (place.run / RESULTS).exists() else None) for place, state in found]
    exploratory = {arm.name for arm in plan.arms if arm.exploratory}
    return Comparison(
        arms=tuple(shown_arms(plan.arms, plan.within)),
        baseline=plan.baseline,
        metric=plan.metric,
        margin=plan.margin,
        cells=tuple(within(cells, [arm.name for arm in plan.arms], plan.within)),
        exploratory=frozenset(n for arm in plan.arms if arm.name in exploratory for n in shown_arms([arm], plan.within, len(plan.arms))),
        exploratory_seeds=frozenset(plan.later_seeds),
        looks=plan.verdicts_after,
        calibrated=plan.calibrated,
        same_as={} if plan.within else same_as,
    )


def within(cells: Sequence[Cell], arms: Sequence[str], sources: Sequence[str]) -> list[Cell]:
    """Predictors inside the runs as arms of their own."""
    if not sources:
        return list(cells)
    names = {(arm, source): source if len(arms) == 1 else f"{arm}: {source}" for arm in arms for source in sources}
    return [Cell(names[c.arm, source], c.seed, c.state, c.run, source) for c in cells for source in sources]


# ---------------------------------------------------------------- finished runs


def finished_runs(paths: Sequence[str], declared: Mapping[str, Any]) -> Comparison:
    """Runs by path: those that differ in their seed alone are one arm, whose name tells in what it differs from the others."""
    found = [(Path(path), identified(Path(path))) for path in paths]
    groups: dict[str, dict[str, Any]] = {}
    cells: list[tuple[str, int, Path]] = []
    for path, (seed, values) in found:
        key = json.dumps(values, sort_keys=True, default=str)
        groups.setdefault(key, values)
        if other := next((p for k, s, p in cells if (k, s) == (key, seed)), None):
            raise BadOption("compare", f"must name each run once: {other} and {path} have one configuration and seed ({seed})")
        cells.append((key, seed, path))
    names = dict(zip(groups, names_of(list(groups.values())), strict=True))
    sources = tuple(declared.get("within", ()))
    arms = list(names.values())
    shown = [name for arm in arms for name in ([arm] if not sources else [s if len(arms) == 1 else f"{arm}: {s}" for s in sources])]
    made = [Cell(names[key], seed, "done", path) for key, seed, path in cells]
    rest = {name: value for name, value in declared.items() if name not in ("within", "baseline")}
    baseline = declared.get("baseline", shown[0])
    if baseline not in shown:
        raise BadOption("baseline", f"must be one of the arms {', '.join(shown)}{did_you_mean(baseline, shown)}", baseline)
    return Comparison(arms=tuple(shown), baseline=baseline, cells=tuple(within(made, arms, sources)), **rest)


def identified(run: Path) -> tuple[int, dict[str, Any]]:
    with understood("compare", str(run)):
        return identity(run)


def identity(run: Path) -> tuple[int, dict[str, Any]]:
    """Seed and configuration of a finished run, without place and manner of running."""
    if (run / FILE).exists():
        raise BadOption("compare", "must name runs; this is a comparison (--output_dir goes on with it)", str(run))
    if not (run / RESULTS).exists():
        why = "has no results.json" if run.exists() else "does not exist"
        raise BadOption("compare", f"must name finished runs; this {why}", str(run))
    about = read_results(run)["about"]
    values = {n: v for n, v in flags.of_saved_run(about.get("config", {})).items() if n not in flags.PLACE}
    seed = values.pop("seed")
    rows = {"rows": about["data"]["sha256"]} if "data" in about else {}
    return int(seed), {**{n: v for n, v in values.items() if n not in about.get("ignored", {})}, **rows}


def names_of(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between configurations, and no more."""
    every = {name for values in configurations for name in values}
    order = [n for n in (*flags.TOPIC_OF, "rows") if n in every]
    differ = [n for n in order if len({repr(values.get(n, "")) for values in configurations}) > 1]
    # What follows from other options, or has no effect in one of them, is told only where it tells two apart that nothing else does.
    told = [n for n in differ if n not in flags.DERIVED and all(n in values for values in configurations)]
    for name in differ:
        more = [n for n in differ if n in told or n == name]
        if len(set(joined(configurations, more))) > len(set(joined(configurations, told))):
            told = more
    names = joined(configurations, told)
    return names if len(set(names)) == len(names) else [f"{name} ({number})" for number, name in enumerate(names, 1)]


def joined(configurations: Sequence[Mapping[str, Any]], told: Sequence[str]) -> list[str]:
    return [", ".join(words(values, told)) or "all" for values in configurations]


def words(values: Mapping[str, Any], told: Sequence[str]) -> list[str]:
    found = []
    for name in told:
        if name in values:
            value = str(values[name])[:8] if name == "rows" else values[name]
            found.append(str(value) if name in BY_THEMSELVES else f"{name}={value}")
    return found


__all__ = ["compared", "finished_runs", "from_plan", "sources_of"]
