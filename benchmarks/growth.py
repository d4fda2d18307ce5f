"""How cost grows with rows, dimensions, classes, neighbors, images and tokens: measured points, and lines through them.

    python -m benchmarks.growth                                       a table (some four minutes of CPU time)
    python -m benchmarks.growth --output_dir benchmarks/results       and growth.json, growth.md, growth.png

Seconds are CPU time of one thread, medians of rounds in which the points take turns, so that what else the machine does slows all of
them. Two lines go through the points of a series: cost = c x^exponent, by least squares of the logarithms, and cost = fixed + each x,
by least squares of what is off in relation to the point.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.bench import prepare
from benchmarks.growth_series import Series, Sizes, all_series
from benchmarks.plot import COLORS, marked
from benchmarks.tables import duration, markdown, rounded
from benchmarks.timing import CPU, MEGABYTE, Ask, Spread, in_turn, peak_memory_mb
from evaluation.cost import load
from inputs.memory import in_bytes


class Power(NamedTuple):
    """c x^exponent, with the standard error of the exponent, and by how much the worst point is off."""

    c: float
    exponent: float
    error: float
    off: float


class Straight(NamedTuple):
    """fixed + each x, and by how much the worst point is off."""

    fixed: float
    each: float
    off: float


@dataclass(frozen=True)
class Grown:
    """What was found of a series: seconds of a unit at each point, lines through them, and memory if it was looked at."""

    series: Series
    seconds: tuple[Spread, ...]
    peaks: tuple[float, ...] | None  # MB of a call

    @property
    def medians(self) -> list[float]:
        return [spread.median for spread in self.seconds]

    @property
    def power(self) -> Power:
        return power_law(self.series.points, self.medians)

    @property
    def straight(self) -> Straight:
        return straight_line(self.series.points, self.medians)

    @property
    def at_the_end(self) -> float:
        """The exponent between the two largest points, where what stays weighs least."""
        return power_law(self.series.points[-2:], self.medians[-2:]).exponent

    @property
    def bytes_each(self) -> float | None:
        """Of memory, what one more of what grows takes; of the two largest points, for small ones take what is there anyway."""
        if self.peaks is None:
            return None
        (near, far), (low, high) = self.series.points[-2:], self.peaks[-2:]
        return (high - low) * MEGABYTE / (far - near)


# ---------------------------------------------------------------- lines


def power_law(x: Sequence[float], y: Sequence[float]) -> Power:
    a, b = np.log(np.array(x, float)), np.log(np.array(y, float))
    exponent, offset = np.polyfit(a, b, 1)
    left = b - (exponent * a + offset)
    free = max(1, len(a) - 2)
    error = math.sqrt(float(left @ left) / free / float(((a - a.mean()) ** 2).sum()))
    return Power(math.exp(offset), float(exponent), error, float(np.expm1(np.abs(left)).max()))


def straight_line(x: Sequence[float], y: Sequence[float]) -> Straight:
    """Through points from 10 to 10,000 a line that is off by as much everywhere would be the line through the last two."""
    a, b = np.array(x, float), np.array(y, float)
    each, fixed = np.polyfit(a, b, 1, w=1 / b)
    return Straight(float(fixed), float(each), float(np.abs(1 - (fixed + each * a) / b).max()))


# ---------------------------------------------------------------- measuring


def measured(series: Series) -> Grown:
    taken = in_turn(series.group, "cpu")
    seconds = tuple(Spread.of([of_round[0] / series.per for of_round in taken[str(point)]]) for point in series.points)
    peaks = [peak_memory_mb(series.group, "cpu", series.group.sides[str(point)]) for point in series.points] if series.group.memory else []
    return Grown(series, seconds, tuple(p or 0.0 for p in peaks) if peaks and None not in peaks else None)


# ---------------------------------------------------------------- what people read


def headings() -> list[str]:
    return ["", "grows", "from", "to", "exponent", "at the end", "fixed + each", "off by at most", "peak memory", "each"]


def row_of(grown: Grown) -> list[str]:
    series, power, straight = grown.series, grown.power, grown.straight
    first, last = ((f"{series.points[n]:,}: {short(grown.medians[n])}") for n in (0, -1))
    line = f"{short(straight.fixed)} + {short(straight.each)}"
    off = f"{power.off:.0%} / {straight.off:.0%}"
    memory = ["", ""] if grown.peaks is None else [in_bytes(grown.peaks[-1] * MEGABYTE), in_bytes(max(0.0, grown.bytes_each or 0.0))]
    exponents = [f"{power.exponent:.2f} ± {power.error:.2f}", f"{grown.at_the_end:.2f}"]
    return [f"{series.name}, a {series.unit}", series.axis, first, last, *exponents, line, off, *memory]


def short(seconds: float) -> str:
    """Seconds, down to nanoseconds; what a line needs to be below 0 is said too."""
    size = abs(seconds)
    unit, factor = next(((u, f) for u, f in (("ms", 1e3), ("µs", 1e6), ("ns", 1e9)) if size * f >= 1), ("ns", 1e9))
    return duration(seconds) if size >= 1 else f"{factor * seconds:.3g} {unit}"


def points_of(grown: Grown) -> str:
    series = grown.series
    each = (f"{point:,}: {short(spread.median)}" for point, spread in zip(series.points, grown.seconds, strict=True))
    return f"- {series.name} ({series.group.setting}), a {series.unit}, by {series.axis}: {'; '.join(each)}"


def page(found: Sequence[Grown], facts: dict[str, Any]) -> str:
    about = machine.sentence(facts).replace("\n", "  \n")
    how = (
        "CPU time, medians of rounds in turn. The exponent of cost = c x^exponent with its standard error, and that between the last two "
        "points; the line cost = fixed + each x; by how much the worst point is off the first and the second. Memory: of a call at the "
        "last point, and what one more takes."
    )
    points = "\n".join(points_of(grown) for grown in found)
    return f"{about}\n\n{how}\n\n{markdown(headings(), [row_of(grown) for grown in found])}\n\nAll points:\n\n{points}\n"


def as_json(grown: Grown) -> dict[str, Any]:
    series = grown.series
    return {
        "name": series.name,
        "setting": series.group.setting,
        "axis": series.axis,
        "unit": series.unit,
        "points": series.points,
        "seconds": [rounded(spread) for spread in grown.seconds],
        "peak_mb": None if grown.peaks is None else [round(peak, 1) for peak in grown.peaks],
        "power": {name: float(f"{value:.5g}") for name, value in grown.power._asdict().items()},
        "straight": {name: float(f"{value:.5g}") for name, value in grown.straight._asdict().items()},
    }


def draw(found: Sequence[Grown], path: Path, title: str) -> None:
    """A small picture a series: points, the power law (black) and the straight line."""
    from matplotlib.figure import Figure

    across = 5
    down = -(-len(found) // across)
    figure = Figure(figsize=(2.5 * across, 2.2 * down + 0.3), layout="constrained")
    for grown, axes in zip(found, figure.subplots(down, across, squeeze=False).flat, strict=False):
        series, (c, exponent, error, _), line = grown.series, grown.power, grown.straight
        x = np.geomspace(series.points[0], series.points[-1], 50)
        axes.plot(x, 1e3 * c * x**exponent, color="black", linewidth=1)
        straight = 1e3 * (line.fixed + line.each * x)
        axes.plot(x[straight > 0], straight[straight > 0], color=COLORS[2], linewidth=1, linestyle="--")
        axes.plot(series.points, [1e3 * median for median in grown.medians], "o", color=COLORS[1], markersize=4)
        axes.set(xscale="log", yscale="log", xlabel=series.axis, ylabel=f"ms a {series.unit}")
        marked(axes)
        axes.set_xticks(ends := [series.points[0], series.points[-1]], [f"{end:,}" for end in ends])
        axes.minorticks_off()
        axes.set_title(f"{series.name}\n{exponent:.2f} ± {error:.2f}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in figure.axes[len(found) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=9, color="0.3")
    figure.savefig(path, dpi=110)


def write(folder: Path, found: Sequence[Grown], facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.md").write_text(page(found, facts))
    entries = ",\n".join(json.dumps(as_json(grown), allow_nan=False) for grown in found)
    (folder / "growth.json").write_text(f'{{"about": {json.dumps(facts)},\n"series": [\n{entries}\n]}}\n')
    draw(found, folder / "growth.png", f"{facts['processor']}, {machine.threads_of(facts)}, CPU time, torch {facts['versions']['torch']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--output_dir", type=Path)
    typed = parser.parse_args()
    ask = Ask(threads=1, clock="cpu", device=CPU)
    prepare(ask)
    facts, started, found = machine.about(ask), time.process_time(), []
    for series in all_series(Sizes(rounds=typed.rounds)):
        found.append(measured(series))
        print(points_of(found[-1]), flush=True)
    facts["load_after"] = load()
    print(f"\n{page(found, facts)}\n{time.process_time() - started:.0f} s of CPU in all")
    if typed.output_dir:
        write(typed.output_dir, found, facts)


if __name__ == "__main__":
    main()
