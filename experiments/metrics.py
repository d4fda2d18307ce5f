"""What arms are compared by, from what one predictor says of the test rows; the definitions are those of classifiers/metrics.py.

In NumPy, because verdicts are given without torch, and with weights a row, because the bootstrap asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experiments.statistics import Estimate

BINS = 15


@dataclass(frozen=True)
class Answers:
    """What one predictor says of the test rows: of each row (N,) its label, the class that was predicted, the confidence in it, the
    log-probability of the label, the sum of squared probabilities, and the label's place among the highest five (0 to 1)."""

    label: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    log_prob: np.ndarray
    squares: np.ndarray
    top5: np.ndarray
    classes: int

    @property
    def right(self) -> np.ndarray:
        return self.predicted == self.label


# Answers to a function: weights (B, N), how often each row counts in each of B samples, to the metric of each sample (B,)
OfSamples = Callable[[Answers], Callable[[np.ndarray], np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """`name` as in results.json. Numbers are kept as there; `scale` makes the `unit` of them that people read.

    `margin` of indifference where none was given: absolute, or with `relative` a share of the baseline's value.
    `rows` gives each row's part where the metric is a mean over rows; otherwise `samples` computes it from weighted rows.
    """

    name: str
    title: str
    higher_is_better: bool
    unit: str = ""
    scale: float = 1.0
    margin: float = 0.02
    relative: bool = False
    most: float = math.inf  # that it can be; none is negative
    rows: Callable[[Answers], np.ndarray] | None = None
    samples: OfSamples | None = None

    def margin_beside(self, baseline: float, given: float | None = None) -> float:
        """The margin in the numbers of results.json, beside a baseline of that value."""
        if given is not None:
            return given / self.scale
        return self.margin * abs(baseline) if self.relative else self.margin

    def margin_in_words(self, given: float | None = None) -> str:
        if given is None and self.relative:
            return f"{self.margin:.0%} of the baseline's {self.title}".replace("%", " %")
        return f"{self.margin * self.scale if given is None else given:g} {self.unit}".rstrip() + f" of {self.title}"

    def interval(self, mean: Estimate) -> tuple[float, float]:
        """Of an arm's mean, without what no mean can be: two seeds that differ leave a wide one."""
        low, high = mean.interval()
        return max(low, 0.0), min(high, self.most)

    def of(self, answers: Answers) -> float:
        if self.rows is not None:
            return float(self.rows(answers).mean())
        assert self.samples is not None
        return float(self.samples(answers)(np.ones((1, len(answers.label))))[0])


# ---------------------------------------------------------------- metrics that are no means over rows


def calibration_error(answers: Answers) -> Callable[[np.ndarray], np.ndarray]:
    # NOTE: bins are (low, high], and what is within 1e-5 of an edge lies on it, as in classifiers/metrics.py
    number = (np.ceil(answers.confidence * BINS - 1e-5 * BINS) - 1).clip(0, BINS - 1).astype(int)
    gap = np.zeros((len(number), BINS))
    gap[np.arange(len(number)), number] = answers.right - answers.confidence
    return lambda weights: np.abs(weights @ gap).sum(1) / weights.sum(1)


def f1_macro(answers: Answers) -> Callable[[np.ndarray], np.ndarray]:
    def of(weights: np.ndarray) -> np.ndarray:
        true = _by_class(answers.label, answers.classes, weights * answers.right)
        both = _by_class(answers.label, answers.classes, weights) + _by_class(answers.predicted, answers.classes, weights)
        return _mean_where(2 * true, both)

    return of


def balanced_accuracy(answers: Answers) -> Callable[[np.ndarray], np.ndarray]:
    def of(weights: np.ndarray) -> np.ndarray:
        true = _by_class(answers.label, answers.classes, weights * answers.right)
        return _mean_where(true, _by_class(answers.label, answers.classes, weights))

    return of


def aurc(answers: Answers) -> Callable[[np.ndarray], np.ndarray]:
    """The mean over n of the error rate of the n most confident rows; rows of equal confidence share their error rate."""
    order = np.argsort(-answers.confidence, kind="stable")
    wrong = ~answers.right[order]
    starts = np.flatnonzero(np.diff(answers.confidence[order], prepend=np.inf))

    def of(weights: np.ndarray) -> np.ndarray:
        each = weights[:, order]
        every = len(starts) == len(order)  # all confidences differ: nothing to add up
        rows = each if every else np.add.reduceat(each, starts, axis=1)  # (B, G), of each confidence
        errors = each * wrong if every else np.add.reduceat(each * wrong, starts, axis=1)
        after = np.rint(rows.cumsum(1)).astype(np.int32)
        before = after - np.rint(rows).astype(np.int32)
        share = np.divide(errors, rows, out=np.zeros_like(errors), where=rows > 0)
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, after[:, -1].max() + 1))])
        # the sum over n of (e before + share (n - n before)) / n, from n before + 1 to n
        parts = errors + (errors.cumsum(1) - errors - share * before) * (harmonic[after] - harmonic[before])
        return np.asarray(parts.sum(1) / after[:, -1])

    return of


def _by_class(classes: np.ndarray, num_classes: int, weights: np.ndarray) -> np.ndarray:
    """(B, N) weights summed over the rows of each class, (B, C)."""
    order = np.argsort(classes, kind="stable")
    present, starts = np.unique(classes[order], return_index=True)
    found = np.zeros((len(weights), num_classes))
    found[:, present] = np.add.reduceat(weights[:, order], starts, axis=1)
    return found


def _mean_where(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """Mean over the classes that occur in a sample."""
    ratio = np.divide(over, under, out=np.zeros_like(over), where=under > 0)
    return np.asarray(ratio.sum(1) / (under > 0).sum(1))


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            name="accuracy",
            title="accuracy",
            higher_is_better=True,
            unit="points",
            scale=100,
            most=1.0,
            margin=0.003,
            rows=lambda a: a.right.astype(float),
        ),
        Metric(name="top5", title="top-5", higher_is_better=True, unit="points", scale=100, most=1.0, margin=0.003, rows=lambda a: a.top5),
        Metric(name="nll", title="NLL", higher_is_better=False, unit="nats", relative=True, rows=lambda a: -a.log_prob),
        Metric(
            name="brier",
            title="Brier",
            higher_is_better=False,
            most=2.0,
            relative=True,
            rows=lambda a: a.squares - 2 * np.exp(a.log_prob) + 1,
        ),
        Metric(name="ece", title="ECE", higher_is_better=False, most=1.0, margin=0.005, samples=calibration_error),
        Metric(
            name="f1_macro", title="F1-macro", higher_is_better=True, unit="points", scale=100, most=1.0, margin=0.003, samples=f1_macro
        ),
        Metric(
            name="balanced_accuracy",
            title="balanced accuracy",
            higher_is_better=True,
            unit="points",
            scale=100,
            most=1.0,
            margin=0.003,
            samples=balanced_accuracy,
        ),
        Metric(name="aurc", title="AURC", higher_is_better=False, most=1.0, relative=True, samples=aurc),
    )
}
