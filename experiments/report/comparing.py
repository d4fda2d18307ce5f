"""Figures that set arms side by side: differences, scores with intervals, scores against cost, time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.report.ink import COLORS, TEXT, Picture, Table, cut, legend_below, legend_height, log_scale, mark_of, series
from experiments.report.material import Material
from experiments.summary import summaries
from experiments.verdict import Verdict

# Name in results.json, title, unit, whether less is better
COSTS = (
    ("seconds", "training time", "s", True),
    ("images_per_second", "throughput", "images/s", False),
    ("gflops", "computation", "GFLOPs", True),
    ("params", "parameters", "M", True),
    ("peak_memory_mb", "peak memory", "MB", True),
)
# Of small models: below a tenth of a unit, the next smaller one
SMALLER = {"M": ("thousand", 1e3), "thousand": ("", 1e3), "GFLOPs": ("MFLOPs", 1e3), "MFLOPs": ("kFLOPs", 1e3)}
ROW = 0.3  # inches of an arm in a list


def pictures(material: Material) -> Iterator[Picture]:
    if material.verdicts is not None:
        yield forest(material)
    if len(material.runs) > 1 and any(material.estimate(arm) for arm in material.arms):
        yield scores(material)
    if len(material.arms) > 1:  # of one arm, the table has all of it
        for cost in COSTS:
            if picture := against_cost(material, *cost):
                yield picture
        yield from (p for cost in (COSTS[0], COSTS[1], COSTS[4]) if (p := bars(material, *cost)))


# ---------------------------------------------------------------- lists of arms


def listed(axes: Any, names: Sequence[str]) -> None:
    """A line for each arm, the first on top, its name above the line: long names fit."""
    axes.set(yticks=[], ylim=(-0.45, len(names) - 0.1))
    axes.spines["left"].set_visible(False)
    for i, name in enumerate(reversed(names)):
        axes.text(0, i + 0.34, cut(name, 52), transform=axes.get_yaxis_transform(), fontsize=7, va="center")


def forest(material: Material) -> Picture:
    verdicts = material.verdicts
    assert verdicts is not None
    metric = verdicts.metric
    arms = list(verdicts.verdicts)
    better = "right" if metric.higher_is_better else "left"
    unit = metric.unit or metric.title

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, v in enumerate(reversed(arms)):
            if v.estimate is not None:
                low, mean, high = (x * metric.scale for x in (v.low, v.estimate.mean, v.high))
                color = COLORS[0] if v.verdict == "better" else COLORS[1] if v.verdict == "worse" else TEXT
                axes.plot([low, high], [i, i], color=color, linewidth=1.6, gid=series(len(arms) - 1 - i))
                axes.plot([mean], [i], marker="D" if v.exploratory else "o", color=color, gid=series(len(arms) - 1 - i))
            else:
                axes.text(0.02, i, "no result", transform=axes.get_yaxis_transform(), fontsize=7, va="center")
        margins = [v.margin * metric.scale for v in arms if v.estimate is not None]
        if margins:
            axes.axvspan(-max(margins), max(margins), color=TEXT, alpha=0.1, linewidth=0)
        for i in range(len(arms)):  # not through the names
            axes.plot([0, 0], [i - 0.34, i + 0.14], color=TEXT, linewidth=0.8, zorder=1)
        axes.set_xlabel(f"difference in {metric.title} ({unit}); better is {better}")
        listed(axes, [v.arm for v in arms])

    rows = [_difference(v, metric.scale) for v in arms]
    heads = ("arm", f"difference ({unit})", "from", "to", "margin", "seeds", "p (Holm)", "verdict")
    about = (
        f"Each arm minus {material.baseline} with its interval; the gray band is the margin of indifference, "
        "blue is better, orange is worse, a diamond is exploratory."
    )
    names = tuple(f"{v.arm}: {v.verdict}" for v in arms)
    height = 0.65 + ROW * max(1, len(arms))
    title = f"Differences in {metric.title} from the baseline"
    return Picture(name="forest", title=title, about=about, table=Table(heads, rows), draw=draw, height=height, series=names)


def _difference(v: Verdict, scale: float) -> tuple[Any, ...]:
    arm = v.arm + " (exploratory)" * v.exploratory
    if v.estimate is None:
        return (arm, None, None, None, None, 0, None, v.verdict)
    numbers = (round(x * scale, 6) for x in (v.estimate.mean, v.low, v.high, v.margin))
    return (arm, *numbers, len(v.seeds), None if v.p_holm is None else round(v.p_holm, 6), v.verdict)


def scores(material: Material) -> Picture:
    metric = material.metric
    arms = list(material.arms)
    of_seeds = {arm: seed_values(material, arm) for arm in arms}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, arm in enumerate(reversed(arms)):
            number = len(arms) - 1 - i
            estimate = material.estimate(arm)
            if estimate is not None:
                low, high = (x * metric.scale for x in metric.interval(estimate))
                color = TEXT if arm == material.baseline else COLORS[0]
                axes.plot([low, high], [i, i], color=color, linewidth=1.6, gid=series(number))
                axes.plot([estimate.mean * metric.scale], [i], marker="o", color=color, gid=series(number))
                values = list(of_seeds[arm].values())
                if len(values) > 1:
                    axes.plot(values, [i - 0.18] * len(values), marker="|", linestyle="none", color=TEXT, alpha=0.6)
        axes.set_xlabel(f"{metric.title}{' (%)' if metric.scale == 100 else ''}")
        listed(axes, arms)

    rows = []
    for arm in arms:
        estimate = material.estimate(arm)
        found = (estimate.mean, *metric.interval(estimate)) if estimate else (None, None, None)
        told = ", ".join(f"{seed}: {value:.4g}" for seed, value in of_seeds[arm].items())
        rows.append((arm, *(None if x is None else round(x * metric.scale, 6) for x in found), len(of_seeds[arm]), told))
    heads = ("arm", metric.title, "from", "to", "seeds", "each seed")
    how = "calibrated" if material.calibrated else "as trained"
    about = f"Mean over seeds, {how}, with the 95 % interval over seeds and test rows (of one seed: over test rows only); ticks are seeds."
    height = 0.65 + ROW * len(arms)
    title = f"{metric.title[0].upper()}{metric.title[1:]} on the test split"
    return Picture(name="scores", title=title, about=about, table=Table(heads, rows), draw=draw, height=height, series=tuple(arms))


def seed_values(material: Material, arm: str) -> dict[int, float]:
    """The metric of each seed, in the unit that people read."""
    metric = material.metric
    if material.verdicts is not None:
        scored = material.verdicts.scored
        name = material.verdicts.comparison.same_as.get(arm, arm)
        means = {seed: scored.numbers[name, seed] for seed in scored.seeds(name)}
        return {seed: metric.scale * float(x.mean() if metric.rows else x[0]) for seed, x in means.items()}
    return {cell.run.seed: metric.scale * metric.of(cell.said["raw"]) for cell in material.of(arm) if "raw" in cell.said}


# ---------------------------------------------------------------- score against cost


def costs_of(material: Material, key: str) -> dict[str, float]:
    """Median over seeds, of each arm that tells it."""
    if material.verdicts is not None:
        found = {s.arm: s.cost[key] for s in summaries(material.verdicts)}
    else:
        of_arm = {arm: [r for cell in material.of(arm) if (r := cell.run.about.get(key)) is not None] for arm in material.arms}
        found = {arm: sorted(values)[len(values) // 2] for arm, values in of_arm.items() if values}
    scale = 1e-6 if key == "params" else 1.0
    return {arm: value * scale for arm, value in found.items() if value is not None}


def pareto(points: Sequence[tuple[float, float]], *, less_cost: bool, higher: bool) -> list[int]:
    """Numbers of the (cost, score) points that no other beats in both, by cost."""

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        cost, score = (a[0] <= b[0]) if less_cost else (a[0] >= b[0]), (a[1] >= b[1]) if higher else (a[1] <= b[1])
        return cost and score and a != b

    front = [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]
    return sorted(front, key=lambda i: points[i])


def in_unit(unit: str, most: float) -> tuple[str, float]:
    """The unit in which numbers up to `most` can be read, and how many of it are one of `unit`."""
    scale = 1.0
    while most * scale < 0.1 and unit in SMALLER:
        unit, times = SMALLER[unit]
        scale *= times
    return unit, scale


def against_cost(material: Material, key: str, title: str, unit: str, less: bool) -> Picture | None:
    metric, cost = material.metric, costs_of(material, key)
    arms = [arm for arm in material.arms if arm in cost and material.estimate(arm) is not None]
    known = [e for arm in arms if (e := material.estimate(arm)) is not None]
    points = [(cost[arm], e.mean * metric.scale) for arm, e in zip(arms, known, strict=True)]
    bounds = [(low * metric.scale, high * metric.scale) for low, high in map(metric.interval, known)]
    if len(points) < 2 or len({c for c, _ in points}) < 2:  # of one cost there is no price to be seen
        return None
    unit, scale = in_unit(unit, max(c for c, _ in points))
    points = [(c * scale, y) for c, y in points]
    axis = f"{title} ({unit})" if unit else title
    front = pareto(points, less_cost=less, higher=metric.higher_is_better)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([points[i][0] for i in front], [points[i][1] for i in front], color=TEXT, linewidth=0.8, alpha=0.6, linestyle=(0, (4, 2)))
        handles = []
        for i, ((x, y), (low, high)) in enumerate(zip(points, bounds, strict=True)):
            axes.plot([x, x], [low, high], color=mark_of(i)["color"], linewidth=0.8, alpha=0.7)
            handles += axes.plot([x], [y], markersize=5.5, gid=series(i), **mark_of(i))
        costs = [c for c, _ in points]
        if min(costs) > 0 and max(costs) > 20 * min(costs):
            log_scale(axes, x=True)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.set(xlabel=f"{axis}; better is {'left' if less else 'right'}")
        axes.set_ylabel(f"{metric.title}{' (%)' if metric.scale == 100 else ''}")
        axes.margins(x=0.12)
        legend_below(figure, handles, arms)

    rows = []
    for i, arm in enumerate(arms):
        rows.append((arm, *(round(x, 6) for x in (*points[i], *bounds[i])), "yes" if i in front else "no"))
    heads = ("arm", axis, metric.title, "from", "to", "on the Pareto front")
    on_front = ", ".join(cut(arms[i], 60) for i in front)
    about = f"Bars are 95 % intervals; the broken line joins the Pareto front, the arms that none beats in both: {on_front}."
    name = f"{metric.title[0].upper()}{metric.title[1:]} against {title}"
    height = 2.4 + legend_height(arms)
    said = tuple(f"{arm}: {y:.4g} at {x:.4g} {unit}".rstrip() for arm, (x, y) in zip(arms, points, strict=True))
    anchor = f"cost-{key.replace('_', '-')}"
    return Picture(name=anchor, title=name, about=about, table=Table(heads, rows), draw=draw, height=height, series=said)


def bars(material: Material, key: str, title: str, unit: str, less: bool) -> Picture | None:
    """A cost of each arm by itself, with what is known of its spread."""
    cost = costs_of(material, key)
    arms = [arm for arm in material.arms if arm in cost]
    if not arms:
        return None
    spread = {arm: _spread(material, arm, key) for arm in arms}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, arm in enumerate(reversed(arms)):
            axes.barh([i], [cost[arm]], height=0.3, color=COLORS[0], alpha=0.75, gid=series(len(arms) - 1 - i))
            axes.plot(spread[arm], [i] * 2, color=TEXT, linewidth=1)
        axes.set_xlabel(f"{title} ({unit})")
        axes.set_xlim(left=0)
        listed(axes, arms)

    rows = [(arm, round(cost[arm], 3), *(round(x, 3) for x in spread[arm])) for arm in arms]
    of = "quartiles of the measurement" if key == "images_per_second" else "least to most over seeds"
    about = f"Median over seeds; the thin line spans {of}. {'Less' if less else 'More'} is better; measured on the machine of the runs."
    heads = ("arm", f"{title} ({unit})", "from", "to")
    name, heading = f"only-{key.replace('_', '-')}", f"{title[0].upper()}{title[1:]}"
    height = 0.65 + ROW * len(arms)
    return Picture(name=name, title=heading, about=about, table=Table(heads, rows), draw=draw, height=height, series=tuple(arms))


def _spread(material: Material, arm: str, key: str) -> tuple[float, float]:
    runs = [cell.run.about for cell in material.of(arm)]
    if key == "images_per_second" and (quartiles := [q for r in runs if (q := r.get("images_per_second_quartiles"))]):
        return min(q[0] for q in quartiles), max(q[1] for q in quartiles)
    values = [r[key] for r in runs if r.get(key) is not None]
    return min(values), max(values)
