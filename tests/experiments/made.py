"""Finished runs as a comparison reads them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluation.evaluator import scores
from evaluation.predictions import keep
from evaluation.results import grouped
from experiments.arms import Cell

CLASSES = 3


def log_probs(right: Sequence[bool] | np.ndarray, label: np.ndarray, confidence: float = 0.8) -> torch.Tensor:
    """A predictor that is right on the given rows, always as sure."""
    predicted = np.where(np.asarray(right, bool), label, (label + 1) % CLASSES)
    probs = np.full((len(label), CLASSES), (1 - confidence) / (CLASSES - 1))
    probs[np.arange(len(label)), predicted] = confidence
    return torch.tensor(probs).log()


def finished(folder: Path, raw: Mapping[str, torch.Tensor], label: np.ndarray, **more: Any) -> Path:
    """A run whose head is `linear`, with the predictors `raw`; calibrated, they are half as sure of themselves."""
    folder.mkdir(parents=True)
    target = torch.tensor(label)
    both = {"raw": dict(raw), "calibrated": {n: (p / 2).log_softmax(1) for n, p in raw.items()}}
    keep(folder, both, target, own="linear", test_rows=more.pop("test_rows", "rows"))
    of_own = {v: scores(of["linear"], target) for v, of in both.items()}
    content: dict[str, Any] = {
        "test": of_own["raw"],
        "test_calibrated": of_own["calibrated"],
        "test_variants": of_own,
        "params": 1000,
        "gflops": 0.5,
        "images_per_second": 2000.0,
        "images_per_second_quartiles": [1900.0, 2100.0],
        "peak_memory_mb": 300.0,
        "seconds": 10.0,
        "load": 0.1,
        "threads": 1,
        "config": {"head": "linear", "lr": 0.1},
        "ignored": {},
        "warnings": [],
        "git": {"commit": "c", "changed": False},
    }
    if len(raw) > 1:
        content["predictors"] = {"scores": {n: {v: scores(both[v][n], target) for v in both} for n in raw}}
    (folder / "results.json").write_text(json.dumps(grouped(content | more)))
    return folder


def arm_of(folder: Path, arm: str, right: np.ndarray, label: np.ndarray, **more: Any) -> list[Cell]:
    """An arm's cells from (S, N) rows that are right; seeds 0, 1, ..."""
    place = folder / str(abs(hash(arm)))
    return [Cell(arm, s, "done", finished(place / str(s), {"linear": log_probs(r, label)}, label, **more)) for s, r in enumerate(right)]


def labels(rows: int) -> np.ndarray:
    return np.arange(rows) % CLASSES
