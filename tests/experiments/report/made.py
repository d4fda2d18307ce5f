"""Runs and comparisons on disk as a report reads them, made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.cells import place_of
from experiments.grid import Arm
from experiments.plan import FILE, Plan
from inputs.indexed import FORMAT, digest_of
from inputs.store import write_json
from tests.experiments.made import CLASSES, finished, labels, log_probs

ROWS, EPOCHS = 60, 5
NAMES = ("cat", "dog", "eel")
HOSTILE = (
    "<script>window.broken=1</script>",
    '"><img src=x onerror="window.broken=1">',
    "</script><!-- <script>",
    "$\\frac{a$ & 100 % _x_ =1+1",
    "=HYPERLINK(\"http://evil.example\",'x') \u202e\x1b[31m url(http://evil.example/) " + "long" * 40,
)


def run_at(folder: Path, flags: Mapping[str, Any], seed: int, *, share: float = 0.8, names: Sequence[str] = NAMES, **more: Any) -> Path:
    """A finished run that is right on a share of the rows, surer on some than on others."""
    label = labels(ROWS)
    draw = np.random.default_rng([seed, round(1000 * share)])
    right, sure = draw.random(ROWS) < share, torch.tensor(draw.random((ROWS, 1)) * 2)
    config = {"head": "linear", "lr": 0.1, "seed": seed, "split_seed": 0, **flags}
    counts = {"train": 90, "val": 30, "test": ROWS, "class_counts": [60, 20, 10], "sha256": "a" * 16, "test_sha256": "b" * 16}
    speed = 1000.0 + 7 * seed + 1000 * share
    told = {"config": config, "epoch": 4, "seconds": 10.0 + seed + 30 * share, "images_per_second": speed, "data": counts} | more
    finished(folder, {"linear": log_probs(right, label) * sure}, label, **told)
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (folder / "args.txt").write_text(f"python main.py --seed {seed}\n")
    epochs = [epoch_line(e, share + 0.01 * seed) for e in range(1, EPOCHS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs))
    best = {"format": FORMAT, "files": {}, "facts": {"classes": list(names)}}
    write_json(folder / "checkpoints" / "best" / "checkpoint.json", {**best, "sha256": digest_of(best)})
    return folder


def epoch_line(epoch: int, share: float) -> dict[str, Any]:
    val = {"accuracy": share * (1 - math.exp(-epoch)), "nll": 1 / epoch}
    spread = {"effective_rank": 1 + epoch, "cosine_between_classes": 1 / (1 + epoch)}
    return {
        "epoch": epoch,
        "lr": 0.1,
        "train": {"cross_entropy": 2 / epoch, "other": 0.1},
        "val": val,
        "embeddings": spread,
        "seconds": 0.5 * epoch,
    }


def comparison_at(
    folder: Path,
    arms: Mapping[str, Mapping[str, Any]],
    seeds: int,
    *,
    failed: Sequence[tuple[str, int]] = (),
    pending: Sequence[tuple[str, int]] = (),
    error: str = "",
    **more: Any,
) -> Path:
    """A comparison with a plan; each arm a little better than the one before."""
    plan = Plan(arms=tuple(Arm(name, flags) for name, flags in arms.items()), seeds=tuple(range(seeds)), baseline=next(iter(arms)))
    write_json(folder / FILE, plan.body())
    for number, (name, flags) in enumerate(arms.items()):
        for seed in range(seeds):
            place = place_of(folder, name, seed)
            if (name, seed) in pending:
                continue
            note: dict[str, Any] = {"made_with": {"code": "c"}}
            if (name, seed) in failed:
                note["failed"] = {"line": error or "error: --K must be at most 16, got 25", "code": 2}
            write_json(place.note, note)
            if (name, seed) not in failed:
                run_at(place.run, flags, seed, share=0.6 + 0.3 * number / len(arms), **more)
    return folder


def hostile_comparison(folder: Path) -> Path:
    """Five arms of three seeds, one cell failed, and every name an attack."""
    arms = {name: {"layer": f"Layer(K={k})", "lr": 0.1, "note": name} for k, name in enumerate(HOSTILE, 1)}
    return comparison_at(folder, arms, 3, failed=[(HOSTILE[1], 2)], error=HOSTILE[2], names=HOSTILE[:CLASSES], warnings=[HOSTILE[1]])
