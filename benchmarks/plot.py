"""Time against the number of tokens, and the ratio to dense attention, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.layers import MAIN
from benchmarks.targets import BOTH
from benchmarks.timing import Line

SHOWN_RIVALS = ("dense top-K mask (KVT)", "expand + gather (ConvNN depthwise)", "natten 1-D", "local-attention 16")
COLORS = ("#000000", "#0077bb", "#d55e00", "#8d47fc", "#b2337f", "#338855", "#8a894d")
RIVAL_COLORS = ("#888888", "#77aadd", "#eeaa77", "#bb99ee")


def of_layers(lines: Sequence[Line]) -> list[Line]:
    """What is drawn: forward and backward in float32, eager."""
    wanted = {"dtype": "float32", "mode": "eager"}
    return [x for x in lines if x.part == "layers" and x.phase == BOTH and wanted.items() <= x.facts.items()]


def draw(lines: Sequence[Line], path: Path, title: str) -> bool:
    """Whether there was something to draw: a line needs two numbers of tokens."""
    from matplotlib.figure import Figure

    drawn = of_layers(lines)
    tokens = sorted({line.facts["tokens"] for line in drawn})
    if len(tokens) < 2:
        return False
    base = drawn[0].base
    ours = [name for name in dict.fromkeys(x.name for x in drawn) if name in MAIN]
    rivals = [name for name in dict.fromkeys(x.name for x in drawn) if name in SHOWN_RIVALS]
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    time, ratio = figure.subplots(1, 2)
    for name, style in styles(ours, rivals).items():
        of_name = sorted((x for x in drawn if x.name == name), key=lambda x: x.facts["tokens"])
        at = [x.facts["tokens"] for x in of_name]
        time.plot(at, [1e3 * x.seconds.median / x.facts["images"] for x in of_name], label=name, **style)
        ratio.plot(at, [x.ratio.median for x in of_name], **style)
        if name != base:
            ratio.fill_between(at, [x.ratio.low for x in of_name], [x.ratio.high for x in of_name], color=style["color"], alpha=0.12, lw=0)
    time.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms an image, forward + backward", title="time")
    ratio.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time over that of dense attention", title="ratio, with quartiles")
    for axes in (time, ratio):
        axes.set_xticks(tokens, [str(n) for n in tokens], rotation=45, fontsize=8)
        axes.minorticks_off()
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        marked(axes)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9, color="0.3")
    figure.savefig(path, dpi=150)
    return True


def marked(axes: Any) -> None:
    """Numbers on a logarithmic axis: powers of ten alone would leave most of ours without one."""
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low > 30 else (1, 1.5, 2, 3, 5, 7)
    marks = [step * 10.0**power for power in range(-4, 6) for step in steps]
    seen = [mark for mark in marks if low <= mark <= high]
    axes.set_yticks(seen, [f"{mark:g}" for mark in seen])


def styles(ours: Sequence[str], rivals: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for names, colors, form in ((ours, COLORS, {"marker": "o"}), (rivals, RIVAL_COLORS, {"marker": "x", "linestyle": "--"})):
        for n, name in enumerate(names):
            found[name] = {"color": colors[n % len(colors)], "markersize": 4, "linewidth": 1.4, **form}
    return found
