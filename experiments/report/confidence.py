"""Figures of how far probabilities can be trusted: reliability, risk against coverage, and which classes are taken for which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evaluation.results import MOST_CONFUSED
from experiments.metrics import BINS, METRICS, Answers
from experiments.report.ink import COLORS, TEXT, Picture, Table, cut, legend_below, legend_height, look_of, series
from experiments.report.material import Material

MOST_NAMED = 12  # classes whose names and counts stand in a matrix
MOST_PAIRS = 400
DASHED = (0, (4, 1.5))
VARIANTS = {"raw": "as trained", "calibrated": "calibrated"}


def pictures(material: Material, most: int) -> Iterator[Picture]:
    """`most`: arms that have figures of their own."""
    if curve := risk_coverage(material):
        yield curve
    shown = [arm for arm in material.arms if any(cell.said for cell in material.of(arm))][:most]
    for number, arm in enumerate(shown, 1):
        yield reliability(material, arm, number)
    for number, arm in enumerate(shown, 1):
        if matrix := confusion(material, arm, number):
            yield matrix


# ---------------------------------------------------------------- risk against coverage


def risks(answers: Answers, at: np.ndarray) -> np.ndarray:
    """Error rate of the most confident share of rows; rows of equal confidence share theirs."""
    order = np.argsort(-answers.confidence, kind="stable")
    confidence, wrong = answers.confidence[order], (~answers.right[order]).astype(float)
    starts = np.flatnonzero(np.diff(confidence, prepend=np.inf))
    sizes = np.diff(np.append(starts, len(wrong)))
    wrong = np.repeat(np.add.reduceat(wrong, starts) / sizes, sizes)
    counts = np.clip(np.rint(at * len(wrong)).astype(int), 1, len(wrong))
    return np.asarray(wrong.cumsum()[counts - 1] / counts)


def risk_coverage(material: Material) -> Picture | None:
    at = np.linspace(0.02, 1, 50)
    lines: dict[str, np.ndarray] = {}
    for arm in material.arms:
        of_seeds = [said.get("calibrated") or said.get("raw") for cell in material.of(arm) if (said := cell.said)]
        if curves := [risks(a, at) for a in of_seeds if a is not None]:
            lines[arm] = 100 * np.mean(curves, axis=0)
    if not lines:
        return None
    arms = list(material.arms)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        handles = [axes.plot(100 * at, y, gid=series(i), **look_of(arms.index(arm)))[0] for i, (arm, y) in enumerate(lines.items())]
        axes.set(xlabel="answered, the most confident first (%)", ylabel="errors among them (%)", xlim=(0, 101))
        axes.set_ylim(bottom=0)
        legend_below(figure, handles, list(lines))

    rows = [(arm, round(100 * x), round(y, 4)) for arm, ys in lines.items() for x, y in zip(at, ys.tolist(), strict=True)]
    about = "Errors among the answers if the least confident are left out; calibrated where that was done, mean over seeds."
    heads = ("arm", "answered (%)", "errors (%)")
    height = 2.3 + legend_height(list(lines))
    title, table = "Risk against coverage", Table(heads, rows)
    return Picture(name="risk-coverage", title=title, about=about, table=table, draw=draw, height=height, series=tuple(lines))


# ---------------------------------------------------------------- reliability


def binned(answers: Sequence[Answers]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all rows of all seeds, in bins (low, high] of confidence: rows, mean confidence, accuracy; as calibration_error has them."""
    confidence, right = np.concatenate([a.confidence for a in answers]), np.concatenate([a.right for a in answers])
    number = (np.ceil(confidence * BINS - 1e-5 * BINS) - 1).clip(0, BINS - 1).astype(int)
    rows = np.bincount(number, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return rows, np.bincount(number, confidence, BINS) / rows, np.bincount(number, right.astype(float), BINS) / rows


def reliability(material: Material, arm: str, number: int) -> Picture:
    said = [cell.said for cell in material.of(arm) if cell.said]
    variants = {name: binned(found) for name in VARIANTS if (found := [s[name] for s in said if name in s])}
    error = {name: np.mean([METRICS["ece"].of(s[name]) for s in said if name in s]) for name in variants}
    styles = {"raw": (COLORS[1], "s", DASHED), "calibrated": (COLORS[0], "o", "-")}

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        upper.plot([0, 100], [0, 100], color=TEXT, linewidth=0.8, alpha=0.6)
        edges = np.linspace(0, 100, BINS + 1)
        handles = []
        for i, (name, (rows, confidence, accuracy)) in enumerate(variants.items()):
            color, mark, line = styles[name]
            some = rows > 0
            handles += upper.plot(100 * confidence[some], 100 * accuracy[some], color=color, marker=mark, linestyle=line, gid=series(i))
            lower.stairs(100 * rows / rows.sum(), edges, color=color, linestyle=line, linewidth=1.2)
        upper.set(ylabel="right (%)", ylim=(-2, 102))
        lower.set(xlabel="confidence (%)", ylabel="rows (%)", xlim=(-1, 101))
        legend_below(figure, handles, [f"{VARIANTS[name]}: ECE {error[name]:.3f}" for name in variants])

    middle = [round(100 * (i + 0.5) / BINS, 1) for i in range(BINS)]
    rows = [
        (VARIANTS[name], middle[i], int(count[i]), round(100 * confidence[i], 3), round(100 * accuracy[i], 3))
        for name, (count, confidence, accuracy) in variants.items()
        for i in range(BINS)
        if count[i]
    ]
    about = (
        f"{cut(arm, 200)}: how often an answer of that confidence is right, and below how many rows have it "
        f"({len(said)} {'seed' if len(said) == 1 else 'seeds'}). On the diagonal, confidence means what it says."
    )
    heads = ("probabilities", "middle of the bin (%)", "rows", "mean confidence (%)", "right (%)")
    names = tuple(VARIANTS[name] for name in variants)
    title = f"Reliability: {cut(arm, 80)}"
    return Picture(name=f"reliability-{number}", title=title, about=about, table=Table(heads, rows), draw=draw, height=3.0, series=names)


# ---------------------------------------------------------------- confusion


def counts_of(material: Material, arm: str) -> np.ndarray | None:
    """Rows of each true class by prediction, over all seeds."""
    said = [cell.said.get("raw") or cell.said.get("calibrated") for cell in material.of(arm)]
    found = [a for a in said if a is not None]
    if not found or len({len(a.label) for a in found}) > 1:
        return None
    size = max(max(a.classes, int(a.label.max()) + 1, int(a.predicted.max()) + 1) for a in found)
    if size > MOST_CONFUSED:
        return None
    total = np.zeros((size, size), np.int64)
    for a in found:
        np.add.at(total, (a.label, a.predicted), 1)
    return total


def names_of(material: Material, arm: str, size: int) -> list[str]:
    run = material.run_of_arm(arm)
    classes = run.classes if run is not None else ()
    return list(classes) if len(classes) == size else [str(i) for i in range(size)]


def confusion(material: Material, arm: str, number: int) -> Picture | None:
    counts = counts_of(material, arm)
    if counts is None:
        return None
    size = len(counts)
    names = names_of(material, arm, size)
    share = counts / counts.sum(1, keepdims=True).clip(1)
    few = size <= MOST_NAMED

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.grid(False)
        axes.set(xlabel="predicted", ylabel="true class")
        if few:
            short = [cut(name, 12) for name in names]
            upright = max(map(len, short)) <= 2
            axes.set_xticks(range(size), short, rotation=0 if upright else 90)
            axes.set_yticks(range(size), short)
            for i, j in zip(*counts.nonzero(), strict=True):
                dark = share[i, j] > 0.5
                axes.text(j, i, f"{counts[i, j]}", ha="center", va="center", fontsize=6, color="white" if dark else "black")

    pairs = [(int(counts[i, j]), int(i), int(j)) for i, j in zip(*counts.nonzero(), strict=True)]
    pairs.sort(key=lambda p: (p[1] == p[2], -p[0], p[1], p[2]))  # what was taken for another first
    rows: list[tuple[Any, ...]] = [(names[i], names[j], n, round(100 * share[i, j], 3)) for n, i, j in pairs[:MOST_PAIRS]]
    told = "" if len(pairs) <= MOST_PAIRS else f" The table has the {MOST_PAIRS} most frequent of {len(pairs)} pairs."
    about = f"{cut(arm, 200)}: test rows of each true class by prediction, as trained, all seeds together; darker is a larger share.{told}"
    heads = ("true class", "predicted", "rows", "of the class (%)")
    title = f"Confusion of classes: {cut(arm, 80)}"
    return Picture(name=f"confusion-{number}", title=title, about=about, table=Table(heads, rows), draw=draw, height=3.2 if few else 3.0)
