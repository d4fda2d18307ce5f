"""Published numbers beside ours, with their conditions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cells import Place
from experiments.metrics import METRICS
from experiments.plan import Plan
from experiments.read import results
from inputs.files import write_atomically
from run.directory import RESULTS

FILE = "published.md"


def beside_published(plan: Plan, places: Sequence[Place], same_as: Mapping[str, str], folder: Path) -> str:
    """A row an arm, as text and as published.md: our mean over seeds of each number that was published, and what was published."""
    numbers = list(dict.fromkeys(name for arm in plan.arms for name in arm.published))
    headings = ["arm", *(f"{name}, {whose}" for name in numbers for whose in ("here", "published"))]
    rows = [headings]
    for arm in plan.arms:
        own = [p.run for p in places if p.arm == same_as.get(arm.name, arm.name) and (p.run / RESULTS).exists()]
        scores = [tested(results(run), plan.calibrated) for run in own]
        cells = [[ours(name, scores), str(arm.published.get(name, "-"))] for name in numbers]
        rows.append([arm.name + " (exploratory)" * arm.exploratory, *(text for pair in cells for text in pair)])
    kept = [i for i in range(len(headings)) if any(row[i] != "-" for row in rows[1:])]  # a number that we do not have here
    rows = [[row[i] for i in kept] for row in rows]
    conditions = f"published: {plan.conditions}" if plan.conditions else ""
    if any(p.seed in plan.later_seeds and (p.run / RESULTS).exists() for p in places):
        added = ", ".join(map(str, plan.later_seeds))
        conditions = f"here: exploratory, with seeds that were added after the plan was written ({added})\n\n{conditions}".rstrip()
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(kept))
    write_atomically(folder / FILE, "\n".join([*lines, "", conditions, ""]).encode())
    widths = [max(len(row[i]) for row in rows) for i in range(len(kept))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*text, "", conditions] if conditions else text)


def tested(found: Mapping[str, Any], calibrated: bool) -> Mapping[str, float]:
    scores: Mapping[str, float] = found["test_calibrated"] if calibrated and "test_calibrated" in found else found["test"]
    return scores


def ours(name: str, scores: Sequence[Mapping[str, float]]) -> str:
    values = [s[name] for s in scores if name in s]
    if not values:
        return "-"
    scale = METRICS[name].scale if name in METRICS else 1.0
    return f"{statistics.mean(values) * scale:.2f}" if scale != 1 else f"{statistics.mean(values):.4f}"
