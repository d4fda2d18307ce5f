"""The picture of `explain --what neighbors`. Without pyplot: no display, no global state."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch

from explain.cases import Case, Neighbor

# Is a neighbor of the query's true class?
FRAMES: dict[bool | None, tuple[str, Any]] = {True: ("#1a9850", "-"), False: ("#d73027", "--"), None: ("0.45", "-")}
MEANING = {True: "of the query's true class", False: "of another", None: "true class not known"}
NEIGHBORS, UNIFORM, LINEAR, PREDICTION = "#f28e2b", "#b0b0b0", "#9467bd", "#2b5c9e"
LEFT, SIDE, QUERY_SIDE, CAPTION, HEADING, SPACE, CHART = 0.12, 0.82, 1.15, 0.34, 0.3, 0.14, 1.5  # inches
ACROSS = 4  # neighbors in a line: the picture stays as narrow as a column of text, and its letters as large
LETTER = 0.62 / 72  # inches of width, a letter of one point


def draw_neighbors(
    path: Path, header: Mapping[str, Any], cases: Sequence[Case], images: Sequence[Sequence[np.ndarray]], classes: Sequence[str]
) -> None:
    """A row a query: its image, its heaviest neighbors, its votes. `images`: of each the query's pixels, then the neighbors'."""
    with rc_context({"text.parse_math": False}):  # a class may be named $5
        _draw(header, cases, images, classes).savefig(path, dpi=170)


def _draw(header: Mapping[str, Any], cases: Sequence[Case], images: Sequence[Sequence[np.ndarray]], classes: Sequence[str]) -> Figure:
    tall = min(2.0, max(0.5, images[0][0].shape[0] / images[0][0].shape[1]))
    shown = max(len(row) for row in images) - 1
    across = min(shown, ACROSS) if shown <= 3 * ACROSS else max(2 * ACROSS, math.ceil(math.sqrt(2 * shown)))
    bars = max(len(case.bars) * len(case.votes) for case in cases)
    chart = max(QUERY_SIDE, min(0.12 * bars + 0.1 * max(len(case.bars) for case in cases), 3.0))
    body = max(-(-shown // across) * (SIDE * tall + CAPTION), QUERY_SIDE * tall + CAPTION, chart)
    names = 0.2 + 8 * LETTER * max(len(_cut(classes[c])) for case in cases for c in case.bars)
    first = LEFT + QUERY_SIDE + SPACE
    last = first + across * SIDE + SPACE + names
    wide = max(last + CHART + LEFT, 6.5)
    notes = [line for note in header["notes"] for line in _wrapped(note, 8, wide)]
    top, row = 0.42 + 0.17 * len(notes) + SPACE, HEADING + body + SPACE
    second = HEADING if len(cases) > 1 else 0.0  # a heading above the mistakes
    key = _key(cases, _colors(header, cases), wide)
    below = 0.2 * len(key) + 0.4
    figure = Figure(figsize=(wide, top + len(cases) * row + second + below))
    high = figure.get_size_inches()[1]

    def axes(left: float, down: float, width: float, height: float) -> Any:
        return figure.add_axes((left / wide, 1 - (down + height) / high, width / wide, height / high))

    def text(down: float, words: str, **style: Any) -> None:
        figure.text(LEFT / wide, 1 - down / high, words, **{"fontsize": 9, "va": "center", **style})

    text(0.2, header["title"], fontsize=11, weight="bold")
    for i, note in enumerate(notes):
        text(0.47 + 0.17 * i, note, color="0.3", fontsize=8)
    colors = _colors(header, cases)
    heaviest = max(neighbor.weight for case in cases for neighbor in case.neighbors)
    for i, (case, pixels) in enumerate(zip(cases, images, strict=True)):
        down = top + i * row + (second if i else 0)
        if i == 1:
            text(down - 0.1, f"The most confident of {header['test']['wrong']['rows']:,} mistakes on the test split", weight="bold")
        known = f"true class {_cut(case.true, 40)}, " if case.true is not None else ""
        text(down + 0.14, f"{_cut(case.image, 40)}: {known}predicted {_cut(case.predicted, 40)} ({case.probability:.1%})")
        down += HEADING
        _framed(axes(LEFT, down, QUERY_SIDE, QUERY_SIDE * tall), pixels[0], "black", "-")
        for j, (neighbor, image) in enumerate(zip(case.neighbors, pixels[1:], strict=False)):
            left, at = first + j % across * SIDE, down + j // across * (SIDE * tall + CAPTION)
            _neighbor(axes(left + 0.04, at, SIDE - 0.08, SIDE * tall - 0.08), image, neighbor)
            bar = axes(left + 0.04, at + SIDE * tall - 0.055, SIDE - 0.08, 0.05)
            bar.barh(0, neighbor.weight, color=colors[header["weights"]])
            bar.set(xlim=(0, heaviest), ylim=(-0.4, 0.4))
            bar.axis("off")
        _chart(axes(last, down, CHART, chart), case, classes, colors)
    for i, handles in enumerate(key):
        at_line = (LEFT - 0.05) / wide, (below - 0.28 - 0.2 * i) / high
        style: dict[str, Any] = {"fontsize": 8, "frameon": False, "borderpad": 0, "columnspacing": 1.4, "handlelength": 1.6}
        style |= {"loc": "lower left", "ncols": len(handles), "bbox_to_anchor": at_line, "bbox_transform": figure.transFigure}
        figure.add_artist(Legend(figure, handles, [str(h.get_label()) for h in handles], **style))
    count = f"{shown} of {header['k']}" if shown < header["k"] else f"all {shown}"
    text(high - 0.16, f"{count} neighbors by weight (the bar below): class, weight in the vote", fontsize=8)
    return figure


def _colors(header: Mapping[str, Any], cases: Sequence[Case]) -> dict[str, str]:
    return {name: {"uniform": UNIFORM, "linear": LINEAR, "prediction": PREDICTION}.get(name, NEIGHBORS) for name in cases[0].votes}


def _wrapped(words: str, points: float, wide: float) -> list[str]:
    return textwrap.wrap(words, int((wide - 2 * LEFT) / (0.92 * points * LETTER)))


def _cut(words: str, most: int = 13) -> str:
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
    inch = 1 / (axes.get_position().height * axes.figure.get_size_inches()[1])  # in heights of the image
    name = _cut(neighbor.label)
    percent = f"{neighbor.weight:.1%}" if neighbor.weight < 0.0995 else f"{neighbor.weight:.0%}"
    axes.text(0.5, -0.09 * inch, name, fontsize=min(8, SIDE / LETTER / len(name)), weight="bold", color=color, **style)
    axes.text(0.5, -0.21 * inch, percent, fontsize=7.5, color="0.2", **style)


def _chart(axes: Any, case: Case, classes: Sequence[str], colors: Mapping[str, str]) -> None:
    """Horizontal bars: for each class one of every vote."""
    thick = 0.84 / len(case.votes)
    for i, (name, vote) in enumerate(case.votes.items()):
        places = np.arange(len(case.bars)) + (i - (len(case.votes) - 1) / 2) * thick
        axes.barh(places, [vote[c] for c in case.bars], thick, color=colors[name])
        for y, c in zip(places, case.bars, strict=True):
            if vote[c] >= 0.005:
                axes.text(vote[c] + 0.015, y, f"{vote[c]:.0%}", fontsize=6.5, va="center_baseline", color="0.3")
    axes.set_yticks(range(len(case.bars)), [_cut(classes[c]) for c in case.bars], fontsize=8)
    for c, label in zip(case.bars, axes.get_yticklabels(), strict=True):
        if classes[c] == case.true:
            label.set(color=FRAMES[True][0], weight="bold")
    axes.set(xlim=(0, 1.25), ylim=(len(case.bars) - 0.5, -0.5), xticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("0.6")
    axes.tick_params(axis="y", length=0)


def _key(cases: Sequence[Case], colors: Mapping[str, str], wide: float) -> list[list[Patch]]:
    """What frames and bars mean, in as many lines as fit."""
    framed = {neighbor.true for case in cases for neighbor in case.neighbors}
    frames = [Patch(facecolor="white", edgecolor=FRAMES[k][0], linestyle=FRAMES[k][1], label=MEANING[k]) for k in FRAMES if k in framed]
    words = {"uniform": "uniform vote", "linear": "linear head", "prediction": "prediction"}
    bars = [Patch(color=color, label=words.get(name, f"vote by {name}")) for name, color in colors.items()]
    letters = sum(len(str(patch.get_label())) + 6 for patch in (*frames, *bars))
    return [frames + bars] if letters * 8 * LETTER < wide else [frames, bars]
