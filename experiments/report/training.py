"""Figures of epochs: validation scores and losses of all runs, and whether embeddings stay apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure

from experiments.report.ink import TEXT, Picture, Table, legend_below, legend_height, log_scale, look_of, series, whole_epochs
from experiments.report.material import Material, Run

Value = Callable[[dict[str, Any]], Any]


def pictures(material: Material) -> Iterator[Picture]:
    of_val = lambda name: lambda e: (e.get("val") or {}).get(name)  # noqa: E731
    of_bank = lambda name: lambda e: (e.get("embeddings") or {}).get(name)  # noqa: E731
    dot = "The dot is the epoch that was chosen on the validation rows and tested."
    yield from curve(material, "val-accuracy", "Validation accuracy over epochs", "accuracy (%)", of_val("accuracy"), dot, scale=100)
    yield from curve(material, "val-nll", "Validation NLL over epochs", "NLL (nats)", of_val("nll"), dot, log=True)
    terms = "The sum of the terms that a run trains on, so that runs with other terms are not alike in it."
    yield from curve(material, "train-loss", "Training loss over epochs", "loss", _loss, terms, log=True)
    rank = "How many directions the embeddings of the bank use; near 1 they have collapsed."
    yield from curve(material, "effective-rank", "Embedding health: effective rank", "effective rank", of_bank("effective_rank"), rank)
    cosine = "Mean cosine of embeddings of different classes; near 1 they can hardly be told apart."
    title = "Embedding health: cosine between classes"
    yield from curve(material, "cosine", title, "cosine", of_bank("cosine_between_classes"), cosine)


def _loss(epoch: dict[str, Any]) -> float | None:
    terms = epoch.get("train") or {}
    return sum(terms.values()) if terms and all(isinstance(v, int | float) for v in terms.values()) else None


def points_of(run: Run, value: Value, scale: float) -> list[tuple[int, float]]:
    found = [(e["epoch"], value(e)) for e in run.epochs]
    return [(epoch, float(v) * scale) for epoch, v in found if isinstance(v, int | float) and math.isfinite(v)]


def curve(
    material: Material, name: str, title: str, unit: str, value: Value, about: str, *, scale: float = 1, log: bool = False
) -> Iterator[Picture]:
    """A line for each run, in the color of its arm; nothing where no run tells it."""
    lines = {run: points for run in material.runs if (points := points_of(run, value, scale))}
    if not lines:
        return
    arms = list(dict.fromkeys(run.arm for run in material.runs))
    told = [arm for arm in arms if any(run.arm == arm for run in lines)]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        handles: dict[str, Any] = {}
        for i, (run, points) in enumerate(lines.items()):
            look = look_of(arms.index(run.arm))
            (line,) = axes.plot(*zip(*points, strict=True), alpha=0.85, gid=series(i), **look, marker="o" if len(points) == 1 else None)
            handles.setdefault(run.arm, line)
            if best := [p for p in points if p[0] == run.about.get("epoch")]:
                axes.plot(*best[0], marker="o", markersize=3.5, color=look["color"], markeredgecolor=TEXT, markeredgewidth=0.4)
        if log and min(y for points in lines.values() for _, y in points) > 0:
            log_scale(axes)
        axes.set(xlabel="epoch", ylabel=unit)
        whole_epochs(axes)
        legend_below(figure, list(handles.values()), told)

    rows = [(run.arm, run.seed, epoch, float(f"{y:.5g}")) for run, points in lines.items() for epoch, y in points]
    how = "A line for each run; point at one, or use the arrow keys, for its name."
    yield Picture(
        name=name,
        title=title,
        about=f"{how} {about}",
        table=Table(("arm", "seed", "epoch", unit), rows),
        draw=draw,
        height=2.4 + legend_height(told),
        series=tuple(run.name for run in lines),
    )
