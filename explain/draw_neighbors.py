"""The picture of `explain --what neighbors`. Without pyplot: no display, no global state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from explain.cases import Case, Neighbor

# Is a neighbor of the query's true class?
FRAMES: dict[bool | None, tuple[str, Any]] = {True: ("#1a9850", "-"), False: ("#d73027", "--"), None: ("0.45", "-")}
MEANING = {True: "of the query's true class", False: "of another", None: "true class not known"}
NEIGHBORS, UNIFORM, LINEAR, PREDICTION = "#f28e2b", "#b0b0b0", "#9467bd", "#2b5c9e"
LEFT, SIDE, QUERY_SIDE, CAPTION, HEADING, SPACE, CHART = 0.15, 1.0, 1.2, 0.44, 0.28, 0.15, 2.1  # inches


def draw_neighbors(
    path: Path, header: Mapping[str, Any], cases: Sequence[Case], images: Sequence[Sequence[np.ndarray]], classes: Sequence[str]
) -> None:
    """A row a query: its image, its heaviest neighbors, its votes. `images`: of each the query's pixels, then the neighbors'."""
    tall = min(2.0, max(0.5, images[0][0].shape[0] / images[0][0].shape[1]))
    shown = max(len(row) for row in images) - 1
    across = shown if shown <= 10 else max(10, math.ceil(math.sqrt(2.5 * shown)))
    body = max(-(-shown // across) * (SIDE * tall + CAPTION), QUERY_SIDE * tall, QUERY_SIDE + SPACE)
    top, row = 0.36 + 0.17 * len(header["notes"]) + SPACE, HEADING + body + SPACE
    names = 0.3 + 0.075 * max(len(_cut(classes[c])) for case in cases for c in case.bars)
    first = LEFT + QUERY_SIDE + SPACE
    last = first + across * SIDE + SPACE + names
    second = HEADING if len(cases) > 1 else 0.0  # a heading above the mistakes
    figure = Figure(figsize=(max(last + CHART + LEFT, 9.3), top + len(cases) * row + second + 0.62))
    wide, high = figure.get_size_inches()

    def axes(left: float, down: float, width: float, height: float) -> Any:
        return figure.add_axes((left / wide, 1 - (down + height) / high, width / wide, height / high))

    def text(down: float, words: str, **style: Any) -> None:
        figure.text(LEFT / wide, 1 - down / high, words, **{"fontsize": 8, "va": "center", **style})

    text(0.2, header["title"], fontsize=10, weight="bold")
    for i, note in enumerate(header["notes"]):
        text(0.45 + 0.17 * i, note, color="0.3", fontsize=7.5)
    colors = {name: {"uniform": UNIFORM, "linear": LINEAR, "prediction": PREDICTION}.get(name, NEIGHBORS) for name in cases[0].votes}
    heaviest = max(neighbor.weight for case in cases for neighbor in case.neighbors)
    for i, (case, pixels) in enumerate(zip(cases, images, strict=True)):
        down = top + i * row + (second if i else 0)
        if i == 1:
            text(down - 0.1, f"The most confident of {header['test']['wrong']['rows']:,} mistakes on the test split", weight="bold")
        known = f"true class {_cut(case.true, 40)}, " if case.true is not None else ""
        said = f"{_cut(case.image, 40)}: {known}predicted {_cut(case.predicted, 40)} ({case.probability:.1%})"
        text(down + 0.13, said, fontsize=8.5)
        down += HEADING
        _framed(axes(LEFT, down, QUERY_SIDE, QUERY_SIDE * tall), pixels[0], "black", "-")
        for j, (neighbor, image) in enumerate(zip(case.neighbors, pixels[1:], strict=False)):
            left, below = first + j % across * SIDE, down + j // across * (SIDE * tall + CAPTION)
            _neighbor(axes(left + 0.05, below, SIDE - 0.1, SIDE * tall - 0.1), image, neighbor)
            bar = axes(left + 0.05, below + SIDE * tall - 0.07, SIDE - 0.1, 0.05)
            bar.barh(0, neighbor.weight, color=colors[header["weights"]])
            bar.set(xlim=(0, heaviest), ylim=(-0.4, 0.4))
            bar.axis("off")
        _chart(axes(last, down, CHART, QUERY_SIDE + SPACE), case, classes, colors)
    _key(figure, cases, colors)
    count = f"{shown} of {header['k']}" if shown < header["k"] else f"all {shown}"
    caption = "neighbors by weight (the bar below): class, weight, squared distance d\u00b2; green: the true class"
    text(high - 0.18, f"{count} {caption}", fontsize=7.5)
    figure.savefig(path, dpi=130)


def _cut(words: str, most: int = 16) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}\u2026"


def _framed(axes: Any, pixels: np.ndarray, color: str, line: Any) -> None:
    axes.imshow(pixels, interpolation="nearest" if len(pixels) < 64 else None, aspect="auto")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(linewidth=2, color=color, linestyle=line)


def _neighbor(axes: Any, pixels: np.ndarray, neighbor: Neighbor) -> None:
    color, line = FRAMES[neighbor.true]
    _framed(axes, pixels, color, line)
    style = {"transform": axes.transAxes, "ha": "center", "va": "top"}
    inch = 1 / (SIDE * axes.get_position().height * axes.figure.get_size_inches()[1])
    axes.text(0.5, -0.11 * inch, _cut(neighbor.label), fontsize=7, weight="bold", color=color, **style)
    axes.text(0.5, -0.24 * inch, f"{neighbor.weight:.1%}  d\u00b2 {neighbor.squared_distance:.2g}", fontsize=6.5, color="0.2", **style)


def _chart(axes: Any, case: Case, classes: Sequence[str], colors: Mapping[str, str]) -> None:
    """Horizontal bars: for each class one of every vote."""
    thick = 0.84 / len(case.votes)
    for i, (name, vote) in enumerate(case.votes.items()):
        places = np.arange(len(case.bars)) + (i - (len(case.votes) - 1) / 2) * thick
        axes.barh(places, [vote[c] for c in case.bars], thick, color=colors[name])
        for y, c in zip(places, case.bars, strict=True):
            if vote[c] >= 0.005:
                axes.text(vote[c] + 0.015, y, f"{vote[c]:.0%}", fontsize=5.5, va="center_baseline", color="0.3")
    axes.set_yticks(range(len(case.bars)), [_cut(classes[c]) for c in case.bars], fontsize=7.5)
    for c, label in zip(case.bars, axes.get_yticklabels(), strict=True):
        if classes[c] == case.true:
            label.set(color=FRAMES[True][0], weight="bold")
    axes.set(xlim=(0, 1.12), ylim=(len(case.bars) - 0.5, -0.5), xticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("0.6")
    axes.tick_params(axis="y", length=0)


def _key(figure: Figure, cases: Sequence[Case], colors: Mapping[str, str]) -> None:
    wide, high = figure.get_size_inches()
    framed = {neighbor.true for case in cases for neighbor in case.neighbors}
    handles = [Patch(facecolor="white", edgecolor=FRAMES[k][0], linestyle=FRAMES[k][1], label=MEANING[k]) for k in FRAMES if k in framed]
    words = {"uniform": "uniform vote", "linear": "linear head", "prediction": "prediction"}
    handles += [Patch(color=color, label=words.get(name, f"vote by {name}")) for name, color in colors.items()]
    at = ((LEFT - 0.05) / wide, 0.25 / high)
    figure.legend(handles=handles, loc="lower left", ncols=len(handles), fontsize=7.5, frameon=False, bbox_to_anchor=at, borderpad=0)
