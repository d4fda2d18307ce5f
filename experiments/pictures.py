"""Drawing, without pyplot: no display, no global state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.selection import Depth, Grid

if TYPE_CHECKING:
    from experiments.gallery import Case, Neighbor

QUERY, COLORS = "#00a5ff", "autumn_r"
LEFT, TOP, BOTTOM, GAP, LABEL = 0.15, 1.0, 0.75, 0.14, 0.16  # inches


def draw_tokens(
    path: Path,
    *,
    pixels: np.ndarray,
    title: str,
    grid: Grid,
    depths: Sequence[Depth],
    columns: Sequence[int],
    queries: Sequence[tuple[int, int]],
    heads: Sequence[int],
) -> None:
    """A row a query patch, a column a depth; in each cell a small picture a head. `pixels`: (H, W, 3) in 0..1."""
    across = _across(len(heads), len(columns), len(queries))
    down = -(-len(heads) // across)
    small = 1.25 if across * len(columns) <= 8 else 0.95  # inches, the side of a small picture
    tall = small * min(2.0, max(0.5, grid.height / grid.width))
    cell = across * small + GAP, down * (tall + LABEL) + GAP
    first = max(small, min(1.6, cell[1] - GAP - LABEL)) + 2 * GAP
    size = LEFT + first + len(columns) * cell[0] + LEFT, TOP + len(queries) * cell[1] + BOTTOM
    figure = Figure(figsize=(max(size[0], 6.5), size[1]))
    wide, high = figure.get_size_inches()

    def axes(left: float, top: float, width: float, height: float) -> Any:
        return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))

    figure.text(LEFT / wide, 1 - 0.22 / high, title, fontsize=10, weight="bold", va="center")
    drawn = np.concatenate([_shown(depths[c], heads, q, grid) for c in columns for q in queries])
    norm = PowerNorm(0.5, 0, max(float(drawn.max(initial=0)), 1e-6))  # by the root: small shares are seen, too
    # Pale, so that a color means the same on black and on white.
    gray = 0.62 + 0.38 * np.repeat(pixels @ np.array([0.299, 0.587, 0.114])[:, None], 3, -1)
    for i, column in enumerate(columns):
        d, middle = depths[column], LEFT + first + i * cell[0] + (cell[0] - GAP) / 2
        words = [f"depth {column + 1} of {len(depths)}", d.name, f"{'largest' if d.cut else 'reads'} {d.K} of {grid.patches}"]
        words[-1] += f" ({d.channels[0]} of {d.channels[1]} channels)" if d.note else ""
        fitting = min(8.0, 120 * cell[0] / max(map(len, words)))  # points: a letter is 0.6 as wide as it is high
        figure.text(middle / wide, 1 - 0.68 / high, "\n".join(words), fontsize=fitting, ha="center", va="center")
    for row, query in enumerate(queries):
        top = TOP + row * cell[1]
        whole = axes(LEFT, top, first - 2 * GAP, (first - 2 * GAP) * tall / small)
        _image(whole, pixels, grid, query)
        whole.set_title(f"patch {query[0]},{query[1]}", fontsize=8, pad=3)
        for i, column in enumerate(columns):
            for j, head in enumerate(heads):
                left = LEFT + first + i * cell[0] + j % across * small
                at = axes(left + 0.03, top + j // across * (tall + LABEL), small - 0.06, tall - 0.06)
                _small(at, gray, depths[column], head, query, grid, norm)
    _legend(figure, axes, norm, high, depths, columns, grid)
    figure.savefig(path, dpi=130)


def _across(heads: int, columns: int, rows: int) -> int:
    """Small pictures side by side in a cell: as few places left empty as can be, and the whole near 4 : 3."""

    def cost(across: int) -> float:
        down = -(-heads // across)
        return abs(np.log(columns * across / (rows * down) / (4 / 3))) + (across * down - heads) / heads

    return min(range(1, heads + 1), key=cost)


def _shown(d: Depth, heads: Sequence[int], query: tuple[int, int], grid: Grid) -> np.ndarray:
    row = query[0] * grid.width + query[1]
    return np.concatenate([d.share[h, row, d.index[h, row][d.kept[h, row]]].numpy() for h in heads])


def _image(axes: Any, pixels: np.ndarray, grid: Grid, query: tuple[int, int]) -> None:
    """The image in units of patches, the query outlined."""
    axes.imshow(pixels, extent=(0, grid.width, grid.height, 0), interpolation="nearest" if len(pixels) < 64 else None, aspect="auto")
    axes.add_patch(Rectangle((query[1], query[0]), 1, 1, fill=False, edgecolor=QUERY, linewidth=2 if grid.width < 12 else 1.3, zorder=2))
    axes.set(xticks=[], yticks=[], xlim=(0, grid.width), ylim=(grid.height, 0))


def _small(axes: Any, gray: np.ndarray, d: Depth, head: int, query: tuple[int, int], grid: Grid, norm: PowerNorm) -> None:
    """One head: the selected patches colored by their share, with the percent where there is room for it."""
    row = query[0] * grid.width + query[1]
    picked = d.index[head, row][d.kept[head, row]].numpy()
    share = d.share[head, row].numpy()[picked]
    _image(axes, gray, grid, query)
    for patch, part, color in zip(picked, share, ScalarMappable(norm, COLORS).to_rgba(share, alpha=0.8), strict=True):
        y, x = divmod(int(patch), grid.width)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5, zorder=1))
        if grid.width <= 4:
            axes.text(x + 0.5, y + 0.5, f"{100 * part:.0f}", fontsize=6, ha="center", va="center")
    axes.set_xlabel(f"head {head}: {share.sum():.0%}", fontsize=6.5, labelpad=1.5)
    for spine in axes.spines.values():
        spine.set(linewidth=0.4, color="0.5")


def _legend(figure: Figure, axes: Any, norm: PowerNorm, high: float, depths: Sequence[Depth], columns: Sequence[int], grid: Grid) -> None:
    left = LEFT + 0.1
    bar = figure.colorbar(ScalarMappable(norm, COLORS), cax=axes(left, high - 0.58, 2.0, 0.13), orientation="horizontal")
    bar.set_ticks(MaxNLocator(4).tick_values(0, float(norm.vmax or 1))[:-1])
    bar.ax.xaxis.set_major_formatter(PercentFormatter(1))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=7)
    bar.set_label("share of the query's weight", fontsize=7)
    rest = [] if not grid.prefix else ["the class token"] if grid.prefix == 1 else [f"the {grid.prefix} class and register tokens"]
    rest += ["patches not shown"] if any(depths[c].cut for c in columns) else []
    lines = ["blue frame: the patch that reads", "colored: the patches that it reads, by their share of its weight"]
    lines += ["percent: on the colored patches together" + (f"; the rest is on {' and '.join(rest)}" if rest else "")]
    figure.text((left + 2.4) / figure.get_size_inches()[0], 0.4 / high, "\n".join(lines), fontsize=7.5, va="center")


# ---------------------------------------------------------------- a gallery of votes

# Is a neighbor of the query's true class?
FRAMES: dict[bool | None, tuple[str, Any]] = {True: ("#1a9850", "-"), False: ("#d73027", "--"), None: ("0.45", "-")}
MEANING = {True: "of the query's true class", False: "of another", None: "true class not known"}
NEIGHBORS, UNIFORM, LINEAR, PREDICTION = "#f28e2b", "#b0b0b0", "#9467bd", "#2b5c9e"
SIDE, QUERY_SIDE, CAPTION, HEADING, SPACE, CHART = 1.0, 1.2, 0.44, 0.28, 0.15, 2.1  # inches


def draw_gallery(
    path: Path, facts: Mapping[str, Any], cases: Sequence[Case], images: Sequence[Sequence[np.ndarray]], classes: Sequence[str]
) -> None:
    """A row a query: its image, its heaviest neighbors, its votes. `images`: of each the query's pixels, then the neighbors'."""
    tall = min(2.0, max(0.5, images[0][0].shape[0] / images[0][0].shape[1]))
    shown = max(len(row) for row in images) - 1
    across = shown if shown <= 10 else max(10, math.ceil(math.sqrt(2.5 * shown)))
    body = max(-(-shown // across) * (SIDE * tall + CAPTION), QUERY_SIDE * tall, QUERY_SIDE + SPACE)
    top, row = 0.36 + 0.17 * len(facts["notes"]) + SPACE, HEADING + body + SPACE
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

    text(0.2, facts["title"], fontsize=10, weight="bold")
    for i, note in enumerate(facts["notes"]):
        text(0.45 + 0.17 * i, note, color="0.3", fontsize=7.5)
    colors = {name: {"uniform": UNIFORM, "linear": LINEAR, "prediction": PREDICTION}.get(name, NEIGHBORS) for name in cases[0].votes}
    heaviest = max(neighbor.weight for case in cases for neighbor in case.neighbors)
    for i, (case, pixels) in enumerate(zip(cases, images, strict=True)):
        down = top + i * row + (second if i else 0)
        if i == 1:
            text(down - 0.1, f"The most confident of {facts['test']['wrong']['rows']:,} mistakes on the test split", weight="bold")
        known = f"true class {_cut(case.true, 40)}, " if case.true is not None else ""
        said = f"{_cut(case.image, 40)}: {known}predicted {_cut(case.predicted, 40)} ({case.probability:.1%})"
        text(down + 0.13, said, fontsize=8.5)
        down += HEADING
        _framed(axes(LEFT, down, QUERY_SIDE, QUERY_SIDE * tall), pixels[0], "black", "-")
        for j, (neighbor, image) in enumerate(zip(case.neighbors, pixels[1:], strict=False)):
            left, below = first + j % across * SIDE, down + j // across * (SIDE * tall + CAPTION)
            _neighbor(axes(left + 0.05, below, SIDE - 0.1, SIDE * tall - 0.1), image, neighbor)
            bar = axes(left + 0.05, below + SIDE * tall - 0.07, SIDE - 0.1, 0.05)
            bar.barh(0, neighbor.weight, color=colors[facts["weights"]])
            bar.set(xlim=(0, heaviest), ylim=(-0.4, 0.4))
            bar.axis("off")
        _chart(axes(last, down, CHART, QUERY_SIDE + SPACE), case, classes, colors)
    _key(figure, cases, colors)
    count = f"{shown} of {facts['k']}" if shown < facts["k"] else f"all {shown}"
    caption = "neighbors by weight (the bar below): class, share of the weight, squared distance d\u00b2; green: the true class"
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
