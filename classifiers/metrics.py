"""Metrics from log-probabilities and labels: counts over counts, never means of batch means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 1 << 20  # that are in double precision at one time: all of them would take ten times the memory of those that are handed in


class Judged(NamedTuple):
    """What most metrics need of each row, (N,)."""

    predicted: Tensor
    confidence: Tensor
    nll: Tensor
    top5: Tensor  # share of a place among the five highest
    brier: Tensor


def judged(log_probs: Tensor, target: Tensor) -> Judged:
    parts = [_judged(rows, labels) for rows, labels in _blocks(log_probs, target)]
    return Judged(*(torch.cat(of_rows) for of_rows in zip(*parts, strict=True)))


def _judged(log_probs: Tensor, target: Tensor) -> Judged:
    log_probs = log_probs.double()
    probs = log_probs.exp()
    own = log_probs.gather(1, target[:, None])[:, 0]
    return Judged(probs.argmax(1), probs.amax(1), -own, topk_shares(log_probs, target, 5), squared_errors(probs, target))


def _blocks(numbers: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows at a time, with their labels."""
    size = max(1, NUMBERS // numbers.shape[1])
    return zip(numbers.split(size), target.split(size), strict=True)


def standard_metrics(log_probs: Tensor, target: Tensor, of: Judged | None = None) -> dict[str, float]:
    """(N, C) log-probabilities and (N,) labels to accuracy, top-5, macro F1, NLL, ECE and Brier score. `of` them, where it is known."""
    of = of or judged(log_probs, target)
    right = of.predicted == target
    return {
        "accuracy": right.double().mean().item(),
        "top5": of.top5.mean().item(),
        "f1_macro": f1_macro(of.predicted, target, log_probs.shape[1]),
        "nll": of.nll.mean().item(),
        "ece": expected_calibration_error(of.confidence, right),
        "brier": of.brier.mean().item(),
    }


def topk_accuracy(scores: Tensor, target: Tensor, k: int) -> float:
    """Share of rows whose label is among the k highest scores (all of them, with fewer than k classes)."""
    return topk_shares(scores, target, k).mean().item()


def topk_shares(scores: Tensor, target: Tensor, k: int) -> Tensor:
    """Of each row, (N,), whether its label is among the k highest scores.

    NOTE: a vote of k neighbors gives many classes the same score. Of t that tie for the last h places each has h / t of a place:
    how classes are numbered must not matter.
    """
    own = scores.gather(1, target[:, None])
    above, tied = (scores > own).sum(1), (scores == own).sum(1)
    return ((min(k, scores.shape[1]) - above) / tied.double()).clamp(0, 1)


def f1_macro(predicted: Tensor, target: Tensor, num_classes: int) -> float:
    """Mean F1 over the classes that occur among labels or predictions (as scikit-learn has it)."""
    true = torch.bincount(target[predicted == target], minlength=num_classes).double()
    both = torch.bincount(target, minlength=num_classes) + torch.bincount(predicted, minlength=num_classes)
    return (2 * true / both)[both > 0].mean().item()


def expected_calibration_error(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """Sum over equal-width bins of |accuracy - confidence|, weighted by rows. Bins are (low, high]."""
    # NOTE: confidence 1.0, or 1.0000001 after rounding, belongs to the last bin; it drops out of common implementations.
    number = bin_of(confidence, bins)
    gap = torch.zeros(bins, dtype=torch.float64, device=confidence.device).index_add_(0, number, right.double() - confidence.double())
    return (gap.abs().sum() / len(confidence)).item()


def bin_of(probability: Tensor, bins: int) -> Tensor:
    """The number of the bin (low, high] of each probability.

    NOTE: k of 15 votes lie on the edge of a bin, and rounding moves them to either side. What is within 1e-5 of an edge lies on it.
    """
    return (torch.ceil(probability.double() * bins - 1e-5 * bins) - 1).clamp(0, bins - 1).long()


def brier(probs: Tensor, target: Tensor) -> float:
    """Mean squared distance between the probabilities and the one-hot label, summed over classes (0 to 2)."""
    return squared_errors(probs, target).mean().item()


def squared_errors(probs: Tensor, target: Tensor) -> Tensor:
    """That of each row, (N,)."""
    # |p - y|^2 = |p|^2 - 2 p_y + 1, without an (N, C) one-hot
    return probs.square().sum(1) - 2 * probs.gather(1, target[:, None])[:, 0] + 1


# ---------------------------------------------------------------- beyond the six of every evaluation


def detailed_metrics(log_probs: Tensor, target: Tensor, of: Judged | None = None) -> dict[str, float]:
    """(N, C) log-probabilities and (N,) labels to calibration by equal mass and by class, abstention, and balanced accuracy."""
    of = of or judged(log_probs, target)
    confidence, right = of.confidence, of.predicted == target
    return {
        "ece_equal_mass": equal_mass_calibration_error(confidence, right),
        "ece_classwise": classwise_calibration_error(log_probs, target, logarithms=True),
        "aurc": aurc(confidence, right),
        **{f"accuracy_at_{percent}": accuracy_at_coverage(confidence, right, percent / 100) for percent in (80, 90, 95)},
        "balanced_accuracy": balanced_accuracy(of.predicted, target, log_probs.shape[1]),
    }


def equal_mass_calibration_error(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """Sum over bins of as many rows each (numpy's array_split of the rows by confidence) of |accuracy - confidence|, weighted by rows."""
    confidence, accuracy = _by_confidence(confidence, right)
    n = len(confidence)
    small, extra = divmod(n, bins)  # the first `extra` bins have a row more
    sizes = torch.full((bins,), small, device=confidence.device) + (torch.arange(bins, device=confidence.device) < extra)
    number = torch.arange(bins, device=confidence.device).repeat_interleave(sizes)
    gap = confidence.new_zeros(bins).index_add_(0, number, (accuracy - confidence).flip(0))
    return (gap.abs().sum() / n).item()


def classwise_calibration_error(probs: Tensor, target: Tensor, bins: int = 15, *, logarithms: bool = False) -> float:
    """Mean over classes of the ECE of "it is this class", with all its probabilities and not the highest only (arXiv 1910.12656).
    `logarithms`: of probabilities that are given as such."""
    n, classes = probs.shape
    gap = probs.new_zeros(classes * bins, dtype=torch.float64)
    for rows, labels in _blocks(probs, target):
        rows = rows.double().exp() if logarithms else rows.double()
        number = bin_of(rows, bins) + bins * torch.arange(classes, device=probs.device)  # (N, C)
        difference = (-rows).scatter_add_(1, labels[:, None], torch.ones_like(rows[:, :1]))
        gap.index_add_(0, number.flatten(), difference.flatten())
    return (gap.abs().sum() / (n * classes)).item()


def confusion_matrix(predicted: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """(C, C) counts: rows are labels, columns predictions."""
    return torch.bincount(num_classes * target + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)


def balanced_accuracy(predicted: Tensor, target: Tensor, num_classes: int) -> float:
    """Mean over the classes that occur of the share of their rows that is right."""
    rows = torch.bincount(target, minlength=num_classes)
    right = torch.bincount(target[predicted == target], minlength=num_classes).double()
    return (right / rows)[rows > 0].mean().item()


def aurc(confidence: Tensor, right: Tensor) -> float:
    """Area under the risk-coverage curve: the mean over n of the error rate of the n most confident rows. 0 is best."""
    _, accuracy = _by_confidence(confidence, right)
    return ((1 - accuracy).cumsum(0) / torch.arange(1, len(accuracy) + 1, device=accuracy.device)).mean().item()


def accuracy_at_coverage(confidence: Tensor, right: Tensor, coverage: float) -> float:
    """Accuracy of the most confident rows, `coverage` of all (rounded up)."""
    _, accuracy = _by_confidence(confidence, right)
    return accuracy[: math.ceil(coverage * len(accuracy) - 1e-9)].mean().item()


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that a row from outside the distribution has the higher score (distance to neighbors, say); equal scores count half."""
    ordered = inside.double().sort().values
    scores = outside.double().contiguous()
    below = torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True)
    return (below.double().mean() / (2 * len(ordered))).item()


def embedding_spread(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Whether unit rows (N, D) have become one point: their effective rank and the mean cosine of two rows of different classes.

    The effective rank is exp(entropy) of the eigenvalues of the second moment: 1 for one point, D for rows that point everywhere.
    """
    rows, n = embeddings.double(), len(embeddings)
    of_class = rows.new_zeros(int(labels.max()) + 1, rows.shape[1]).index_add_(0, labels, rows)
    counts = labels.bincount().double()
    # of all pairs less those within a class, each with itself among both
    pairs = n**2 - counts.square().sum()
    between = (of_class.sum(0).square().sum() - of_class.square().sum()) / pairs.clamp_min(1)
    moment = rows.T @ rows if n >= rows.shape[1] else rows @ rows.T  # these have the same eigenvalues, but for zeros
    eigenvalues = torch.linalg.eigvalsh(moment / n).clamp_min(0)
    share = eigenvalues / eigenvalues.sum().clamp_min(1e-30)
    return {"effective_rank": torch.special.entr(share).sum().exp().item(), "cosine_between_classes": between.item()}


def _by_confidence(confidence: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence, highest first, and the share that is right among the rows of that same confidence, in float64.

    NOTE: votes of k neighbors have few values, and rounding moves equal ones apart: what is equal to six digits is equal. Among equal
    ones the order of the rows must not matter, hence the mean over them.
    """
    rows = confidence.double()
    _, group, count = rows.round(decimals=6).unique(return_inverse=True, return_counts=True)
    values, share = (torch.zeros_like(rows[: len(count)]).index_add_(0, group, x) / count for x in (rows, right.double()))
    return values.repeat_interleave(count).flip(0), share.repeat_interleave(count).flip(0)
