"""Figures of an option that varies: neighbors, noise, wrong labels, a long tail. Only where there are such runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import config as flags
from experiments.report.comparing import seed_values
from experiments.report.confidence import counts_of, names_of
from experiments.report.ink import LEGEND, Picture, Table, cut, legend_below, legend_height, log_scale, look_of, series
from experiments.report.material import Material

# Option, title, what its axis says
OPTIONS = (
    ("K", "Neighbors of a token", "K"),
    ("k_train", "Neighbors of a query", "k"),
    ("noise", "Noise on images", "standard deviation of the noise"),
    ("label_noise", "Wrong labels in training", "rate of changed labels"),
    ("imbalance", "Long tail", "rows of the last class / rows of the first"),
)
TAIL = 0.5  # least class over largest, from which on there is a tail
LEARNED = ("interpolation", "attention")  # of an arm's predictors, those that a reader asks for first
IN_LAYER = re.compile(r"\bK\s*=\s*(\d+)")


def pictures(material: Material) -> Iterator[Picture]:
    if picture := by_k(material):
        yield picture
    for option in OPTIONS:
        if picture := sweep(material, *option):
            yield picture
    if picture := long_tail(material):
        yield picture


# ---------------------------------------------------------------- an option over arms


def value_of(config: dict[str, Any], option: str) -> float | None:
    """The option as a number; K stands in the layer's call as well."""
    found = config.get(option)
    if option == "K" and (inside := IN_LAYER.findall(str(config.get("layer", "")))):
        return float(inside[0]) if len(set(inside)) == 1 else None
    if found is None:
        return 0.0 if option == "label_noise" else None
    rate = str(found).partition(":")[0]
    try:
        return float(rate)
    except ValueError:
        return None


def rest_of(config: dict[str, Any], option: str) -> str:
    """All else that decides a run: arms that are alike in it make one line."""
    left = {name: value for name, value in config.items() if name not in {*flags.PLACE, "seed", option}}
    if option == "K":
        left["layer"] = IN_LAYER.sub("K", str(left.get("layer", "")))
    if option == "label_noise":
        left["label_noise"] = str(config.get(option) or "").partition(":")[2] or "symmetric"
    return json.dumps(left, sort_keys=True, default=str)


def sweep(material: Material, option: str, title: str, label: str) -> Picture | None:
    metric = material.metric
    groups: dict[str, dict[float, str]] = {}
    for arm in material.arms:
        run = material.run_of_arm(arm)
        if run is not None and material.estimate(arm) and (value := value_of(run.config, option)) is not None:
            groups.setdefault(rest_of(run.config, option), {}).setdefault(value, arm)
    lines = [dict(sorted(arms.items())) for arms in groups.values() if len(arms) > 1]
    if not lines:
        return None
    names = [cut(IN_LAYER.sub("K", next(iter(arms.values()))), 60) for arms in lines]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        handles = []
        for i, arms in enumerate(lines):
            found = [(x, e) for x, arm in arms.items() if (e := material.estimate(arm))]
            points = [(x, *(v * metric.scale for v in (e.mean, *metric.interval(e)))) for x, e in found]
            x, y, low, high = (np.array(part) for part in zip(*points, strict=True))
            handles += axes.plot(x, y, marker="o", gid=series(i), **look_of(i))
            axes.vlines(x, low, high, color=look_of(i)["color"], linewidth=0.8, alpha=0.7)
            for at, arm in arms.items():
                seeds = list(seed_values(material, arm).values())
                axes.plot([at] * len(seeds), seeds, marker="_", linestyle="none", color=look_of(i)["color"], alpha=0.5)
        axes.set(xlabel=label, ylabel=f"{metric.title}{' (%)' if metric.scale == 100 else ''}")
        legend_below(figure, handles, names)

    rows = []
    for arms in lines:
        for x, arm in arms.items():
            if e := material.estimate(arm):
                rows.append((arm, x, *(round(v * metric.scale, 6) for v in (e.mean, *metric.interval(e)))))
    about = f"Arms that differ in --{option} alone, with 95 % intervals; small marks are seeds."
    heads = ("arm", label, metric.title, "from", "to")
    name, height = f"sweep-{option.lower().replace('_', '-')}", 2.3 + legend_height(names)
    return Picture(name=name, title=title, about=about, table=Table(heads, rows), draw=draw, height=height, series=tuple(names))


# ---------------------------------------------------------------- k inside runs


def by_k(material: Material) -> Picture | None:
    """Several k in one evaluation (--k_eval 1,5,25)."""
    metric = material.metric
    lines: dict[str, dict[int, float]] = {}
    own: set[str] = set()  # a line of each arm
    variant = "calibrated" if material.calibrated else "raw"
    for arm in material.arms:
        found: dict[str, dict[int, list[float]]] = {}
        for cell in material.of(arm):
            of_variants = (cell.run.results.get("predictors") or {}).get("by_k") or {}
            for predictor, of_k in (of_variants.get(variant) or of_variants.get("raw") or {}).items():
                for k, scores in of_k.items():
                    if scores.get(metric.name) is not None:
                        found.setdefault(predictor, {}).setdefault(int(k), []).append(scores[metric.name] * metric.scale)
        found.pop("linear", None)  # which looks at no neighbors
        named = {predictor: f"{arm}: {predictor}" if len(material.arms) > 1 else predictor for predictor in found}
        lines |= {named[predictor]: {k: float(np.mean(v)) for k, v in sorted(of_ks.items())} for predictor, of_ks in found.items()}
        own |= {named[predictor] for predictor in [p for p in (*LEARNED, *found) if p in found][:1]}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    shown = lines if len(lines) <= LEGEND else {name: points for name, points in lines.items() if name in own}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        handles = [axes.plot(list(p), list(p.values()), marker="o", gid=series(i), **look_of(i))[0] for i, p in enumerate(shown.values())]
        ks = sorted({k for points in shown.values() for k in points})
        axes.set_xscale("log")
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
        axes.set(xlabel="neighbors that vote, k", ylabel=f"{metric.title}{' (%)' if metric.scale == 100 else ''}")
        legend_below(figure, handles, list(shown))

    rows = [(name, k, round(y, 6)) for name, points in lines.items() for k, y in points.items()]
    about = "One bank asked for several k in one pass (--k_eval), as trained; mean over seeds."
    about += "" if shown is lines else " Drawn is one predictor of each arm; the data have all."
    height = 2.3 + legend_height(list(shown))
    title, heads = "Votes by number of neighbors", ("vote", "k", metric.title)
    return Picture(name="by-k", title=title, about=about, table=Table(heads, rows), draw=draw, height=height, series=tuple(shown))


# ---------------------------------------------------------------- a long tail


def long_tail(material: Material) -> Picture | None:
    """Recall of each class by the number of its training rows, where some classes have many more than others."""
    points: dict[str, list[tuple[int, float, str]]] = {}
    for arm in material.arms:
        run, counts = material.run_of_arm(arm), counts_of(material, arm)
        rows = (run.about.get("data") or {}).get("class_counts") if run is not None else None
        if counts is None or not rows or len(rows) != len(counts) or min(rows) >= TAIL * max(rows):
            continue
        names = names_of(material, arm, len(counts))
        recall = 100 * counts.diagonal() / counts.sum(1).clip(1)
        points[arm] = sorted(zip(map(int, rows), recall.tolist(), names, strict=True))
    if not points:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        of_arm = enumerate(points.values())
        handles = [axes.plot([p[0] for p in ps], [p[1] for p in ps], marker="o", gid=series(i), **look_of(i))[0] for i, ps in of_arm]
        log_scale(axes, x=True)
        axes.set(xlabel="training rows of the class", ylabel="right among its test rows (%)", ylim=(-2, 102))
        legend_below(figure, handles, list(points))

    rows = [(arm, name, count, round(recall, 4)) for arm, found in points.items() for count, recall, name in found]
    about = "Each class by how many training rows it has, rare ones left, as trained; all seeds together."
    heads = ("arm", "class", "training rows", "right (%)")
    height = 2.3 + legend_height(list(points))
    title = "Long tail: rare and frequent classes"
    return Picture(name="long-tail", title=title, about=about, table=Table(heads, rows), draw=draw, height=height, series=tuple(points))
