"""The picture of `explain --what tokens`. Without pyplot: no display, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, patheffects
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from explain.selection import Depth, Grid

QUERY, COLORS = "#00a5ff", LinearSegmentedColormap.from_list("weights", colormaps["plasma"](np.linspace(0.35, 1, 256)))
LEFT, TOP, BOTTOM, GAP, LABEL = 0.15, 1.15, 0.8, 0.14, 0.18  # inches
WIDE = 10.0  # inches, of a slide: small pictures are as large as fit, within SMALLEST and LARGEST
SMALLEST, LARGEST = 0.95, 1.4
DPI = 150


def draw_tokens(
    path: Path,
    *,
    pixels: np.ndarray,
    title: Sequence[str],
    grid: Grid,
    depths: Sequence[Depth],
    columns: Sequence[int],
    queries: Sequence[tuple[int, int]],
    heads: Mapping[int, str],
) -> None:
    """A row a query patch, a column a depth; in each cell a small picture a head, under its name. `pixels`: (H, W, 3) in 0..1."""
    across = _across(len(heads), len(columns), len(queries))
    down = -(-len(heads) // across)
    small = min(LARGEST, max(SMALLEST, ((WIDE - 2 * LEFT) / (len(columns) + 1) - GAP) / across))  # inches, the side of a small picture
    tall = small * min(2.0, max(0.5, grid.height / grid.width))
    cell = across * small + GAP, down * (tall + LABEL) + GAP
    first = max(small, min(1.6, cell[1] - GAP - LABEL)) + 2 * GAP
    size = LEFT + first + len(columns) * cell[0] + LEFT, TOP + len(queries) * cell[1] + BOTTOM
    figure = Figure(figsize=(max(size[0], 7.5), size[1]))
    wide, high = figure.get_size_inches()

    def axes(left: float, top: float, width: float, height: float) -> Any:
        return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))

    for i, line in enumerate(title):
        points = min((11, 9)[min(i, 1)], 120 * (wide - 2 * LEFT) / max(1, len(line)))  # a letter is 0.6 as wide as it is high
        style: dict[str, Any] = {"weight": "normal" if i else "bold", "color": "0.3" if i else "black", "va": "center", "parse_math": False}
        figure.text(LEFT / wide, 1 - (0.22 + 0.22 * i) / high, line, fontsize=points, **style)
    drawn = np.concatenate([_shown(depths[c], tuple(heads), q, grid) for c in columns for q in queries])
    norm = PowerNorm(0.5, 0, max(float(drawn.max(initial=0)), 1e-6))  # by the root: small weights are seen, too
    for i, column in enumerate(columns):
        d, middle = depths[column], LEFT + first + i * cell[0] + (cell[0] - GAP) / 2
        words = [f"depth {column + 1} of {len(depths)}", d.name, f"{'largest' if d.cut else 'reads'} {d.K} of {grid.patches}"]
        words[-1] += f" ({d.channels[0]} of {d.channels[1]} channels)" if d.note else ""
        fitting = min(8.5, 120 * cell[0] / max(map(len, words)))
        figure.text(middle / wide, 1 - 0.85 / high, "\n".join(words), fontsize=fitting, ha="center", va="center")
    for row, query in enumerate(queries):
        top = TOP + row * cell[1]
        whole = axes(LEFT, top, first - 2 * GAP, (first - 2 * GAP) * tall / small)
        _image(whole, pixels, grid, query)
        whole.set_xlabel(f"patch {query[0]},{query[1]}", fontsize=8, labelpad=2)
        for i, column in enumerate(columns):
            for j, (head, name) in enumerate(heads.items()):
                left = LEFT + first + i * cell[0] + j % across * small
                at = axes(left + 0.03, top + j // across * (tall + LABEL), small - 0.06, tall - 0.06)
                _small(at, pixels, depths[column], head, query, grid, norm)
                at.set_xlabel(name + at.get_xlabel(), fontsize=7.5, labelpad=2)
    _legend(figure, axes, norm, high, depths, columns, grid)
    figure.savefig(path, dpi=DPI if max(wide, high) * DPI < 30_000 else 30_000 / max(wide, high))


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
    """The image in units of patches, the query framed."""
    axes.imshow(pixels, extent=(0, grid.width, grid.height, 0), interpolation="nearest" if len(pixels) < 64 else None, aspect="auto")
    thick = 2.2 if grid.width < 12 else 1.5
    halo = [patheffects.Stroke(linewidth=thick + 1.4, foreground="white"), patheffects.Normal()]
    axes.add_patch(Rectangle((query[1], query[0]), 1, 1, fill=False, edgecolor=QUERY, linewidth=thick, zorder=3, path_effects=halo))
    axes.set(xticks=[], yticks=[], xlim=(0, grid.width), ylim=(grid.height, 0))


def _small(axes: Any, pixels: np.ndarray, d: Depth, head: int, query: tuple[int, int], grid: Grid, norm: PowerNorm) -> None:
    """One head: the selected patches framed in the color of their weight, with the percent where there is room for it. The image
    shows through; the dark line around a frame keeps it apart from an image of any color."""
    row = query[0] * grid.width + query[1]
    picked = d.index[head, row][d.kept[head, row]].numpy()
    weight = d.weight[head, row].numpy()[picked]
    _image(axes, pixels, grid, query)
    thick = 2.0 if grid.width <= 4 else 1.5 if grid.width < 12 else 1.0
    halo = [patheffects.Stroke(linewidth=thick + 1.2, foreground="black"), patheffects.Normal()]
    inset = 0.06 if grid.width <= 4 else 0.12  # so that the frames of two patches side by side are two
    for patch, one, color in zip(picked, weight, ScalarMappable(norm, COLORS).to_rgba(weight), strict=True):
        y, x = divmod(int(patch), grid.width)
        frame = Rectangle((x + inset, y + inset), 1 - 2 * inset, 1 - 2 * inset, fill=False, edgecolor=color, linewidth=thick, zorder=2)
        frame.set_path_effects(halo)
        axes.add_patch(frame)
        if grid.width <= 4:
            style = {"fontsize": 7.5, "ha": "center", "va": "center", "color": "white", "weight": "bold", "zorder": 4}
            number = axes.text(x + 0.5, y + 0.5, f"{100 * one:.0f}", **style)
            number.set_path_effects([patheffects.Stroke(linewidth=2, foreground="black"), patheffects.Normal()])
    axes.set_xlabel(f"{weight.sum():.0%}")
    for spine in axes.spines.values():
        spine.set(linewidth=0.4, color="0.5")


def _legend(figure: Figure, axes: Any, norm: PowerNorm, high: float, depths: Sequence[Depth], columns: Sequence[int], grid: Grid) -> None:
    left = LEFT + 0.1
    bar = figure.colorbar(ScalarMappable(norm, COLORS), cax=axes(left, high - 0.6, 2.0, 0.13), orientation="horizontal")
    bar.set_ticks(MaxNLocator(3).tick_values(0, float(norm.vmax or 1))[:-1])
    bar.ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=None if float(norm.vmax or 1) < 0.05 else 0))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=7.5)
    bar.set_label("attention weight of a patch", fontsize=7.5)
    rest = [] if not grid.prefix else ["the class token"] if grid.prefix == 1 else [f"the {grid.prefix} class and register tokens"]
    rest += ["patches not shown"] if any(depths[c].cut for c in columns) else []
    lines = ["blue frame: the patch that reads", "other frames: the patches that it reads, colored by attention weight"]
    lines += ["percent: on the framed patches together" + (f"; the rest is on {' and '.join(rest)}" if rest else "")]
    figure.text((left + 2.4) / figure.get_size_inches()[0], 0.44 / high, "\n".join(lines), fontsize=7.5, va="center")
