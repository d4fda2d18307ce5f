"""The picture of `explain --what tokens`. Without pyplot: no display, no global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from explain.selection import Depth, Grid

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
    norm = PowerNorm(0.5, 0, max(float(drawn.max(initial=0)), 1e-6))  # by the root: small weights are seen, too
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
    return np.concatenate([d.weight[h, row, d.index[h, row][d.kept[h, row]]].numpy() for h in heads])


def _image(axes: Any, pixels: np.ndarray, grid: Grid, query: tuple[int, int]) -> None:
    """The image in units of patches, the query outlined."""
    axes.imshow(pixels, extent=(0, grid.width, grid.height, 0), interpolation="nearest" if len(pixels) < 64 else None, aspect="auto")
    axes.add_patch(Rectangle((query[1], query[0]), 1, 1, fill=False, edgecolor=QUERY, linewidth=2 if grid.width < 12 else 1.3, zorder=2))
    axes.set(xticks=[], yticks=[], xlim=(0, grid.width), ylim=(grid.height, 0))


def _small(axes: Any, gray: np.ndarray, d: Depth, head: int, query: tuple[int, int], grid: Grid, norm: PowerNorm) -> None:
    """One head: the selected patches colored by their weight, with the percent where there is room for it."""
    row = query[0] * grid.width + query[1]
    picked = d.index[head, row][d.kept[head, row]].numpy()
    weight = d.weight[head, row].numpy()[picked]
    _image(axes, gray, grid, query)
    for patch, one, color in zip(picked, weight, ScalarMappable(norm, COLORS).to_rgba(weight, alpha=0.8), strict=True):
        y, x = divmod(int(patch), grid.width)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5, zorder=1))
        if grid.width <= 4:
            axes.text(x + 0.5, y + 0.5, f"{100 * one:.0f}", fontsize=6, ha="center", va="center")
    axes.set_xlabel(f"head {head}: {weight.sum():.0%}", fontsize=6.5, labelpad=1.5)
    for spine in axes.spines.values():
        spine.set(linewidth=0.4, color="0.5")


def _legend(figure: Figure, axes: Any, norm: PowerNorm, high: float, depths: Sequence[Depth], columns: Sequence[int], grid: Grid) -> None:
    left = LEFT + 0.1
    bar = figure.colorbar(ScalarMappable(norm, COLORS), cax=axes(left, high - 0.58, 2.0, 0.13), orientation="horizontal")
    bar.set_ticks(MaxNLocator(4).tick_values(0, float(norm.vmax or 1))[:-1])
    bar.ax.xaxis.set_major_formatter(PercentFormatter(1))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=7)
    bar.set_label("attention weight", fontsize=7)
    rest = [] if not grid.prefix else ["the class token"] if grid.prefix == 1 else [f"the {grid.prefix} class and register tokens"]
    rest += ["patches not shown"] if any(depths[c].cut for c in columns) else []
    lines = ["blue frame: the patch that reads", "colored: the patches that it reads, by attention weight"]
    lines += ["percent: on the colored patches together", *([f"(the rest is on {' and '.join(rest)})"] if rest else [])]
    figure.text((left + 2.4) / figure.get_size_inches()[0], 0.4 / high, "\n".join(lines), fontsize=7.5, va="center")
