"""The cells of a comparison as numbers that can be subtracted: a row each, or a sample of the rows each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import Cell, Comparison
from experiments.bootstrap import estimated, row_samples
from experiments.metrics import METRICS, Answers, Metric
from experiments.read import answers, kept, results
from experiments.statistics import Estimate, crossed
from utils import BadOption


@dataclass(frozen=True)
class Scored:
    """`numbers` of each finished cell by arm and seed: the metric of every row (N,); for a metric that is no mean over rows, its value
    and that of every sample (1 + B,). The difference of two such arrays is that of the arms. `results`: its results.json. `own`: the name
    of its head's own predictor."""

    metric: Metric
    rows: int
    numbers: dict[tuple[str, int], np.ndarray]
    results: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    own: dict[tuple[str, int], str] = field(default_factory=dict)

    def seeds(self, arm: str) -> tuple[int, ...]:
        return tuple(sorted(seed for name, seed in self.numbers if name == arm))

    def without(self, seeds: Collection[int]) -> Scored:
        return replace(self, numbers={key: of for key, of in self.numbers.items() if key[1] not in seeds})

    def mean(self, arm: str, seeds: Sequence[int] | None = None) -> Estimate:
        return self._estimate(np.stack([self.numbers[arm, seed] for seed in seeds or self.seeds(arm)]))

    def differences(self, arm: str, baseline: str, seeds: Sequence[int]) -> np.ndarray:
        """Arm minus baseline, (S, N) or (S, 1 + B)."""
        return np.stack([self.numbers[arm, seed] - self.numbers[baseline, seed] for seed in seeds])

    def difference(self, arm: str, baseline: str, seeds: Sequence[int]) -> Estimate:
        return self._estimate(self.differences(arm, baseline, seeds))

    def of_seeds(self, differences: np.ndarray) -> np.ndarray:
        return differences.mean(1) if self.metric.rows else differences[:, 0]

    def _estimate(self, numbers: np.ndarray) -> Estimate:
        return crossed(numbers) if self.metric.rows else estimated(numbers[:, 0], numbers[:, 1:].T, self.rows)


def score(comparison: Comparison) -> Scored:
    """Reads predictions and results of the cells that are done."""
    metric, done = METRICS[comparison.metric], [c for c in comparison.cells if c.state == "done" and c.run is not None]
    if not done:
        return Scored(metric, 0, {})
    said, own = _read(comparison, done)
    label = next(iter(said.values())).label
    keys = [(cell.arm, cell.seed) for cell in done]
    if metric.rows is not None:
        numbers = {key: metric.rows(said[key]) for key in keys}
    else:
        assert metric.samples is not None
        functions = [metric.samples(said[key]) for key in keys]
        values = np.stack([f(np.ones((1, len(label)))) for f in functions], axis=1)
        both = np.concatenate([values, row_samples(functions, len(label))])
        numbers = {key: both[:, i] for i, key in enumerate(keys)}
    return Scored(metric, len(label), numbers, _results(done), own)


def _read(comparison: Comparison, done: Sequence[Cell]) -> tuple[dict[tuple[str, int], Answers], dict[tuple[str, int], str]]:
    first, said, own = None, {}, {}
    for cell in done:
        assert cell.run is not None
        found = kept(cell.run)
        first = first or found
        if found.test_rows != first.test_rows:
            raise BadOption("compare", "needs runs with the same test rows, and these differ", f"{first.run} and {cell.run}")
        own[cell.arm, cell.seed] = found.own
        said[cell.arm, cell.seed] = answers(cell.run, found.source(cell.source, calibrated=comparison.calibrated))
    labels = [of.label for of in said.values()]
    if any(not np.array_equal(label, labels[0]) for label in labels):
        raise BadOption("compare", "needs runs with the same labels of the test rows, and these differ", str(first.run if first else ""))
    return said, own


def _results(done: Sequence[Cell]) -> dict[tuple[str, int], dict[str, Any]]:
    of_run: dict[Path, dict[str, Any]] = {}
    for cell in done:
        assert cell.run is not None
        if cell.run not in of_run:
            of_run[cell.run] = results(cell.run)
    return {(cell.arm, cell.seed): of_run[cell.run] for cell in done if cell.run is not None}
