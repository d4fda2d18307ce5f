"""Metrics from log-probabilities and labels: counts over counts, never means of batch means."""

from __future__ import annotations

import torch
from torch import Tensor


def metrics(log_probs: Tensor, target: Tensor) -> dict[str, float]:
    """(N, C) log-probabilities and (N,) labels to accuracy, top-5, macro F1, NLL, ECE and Brier score."""
    log_probs = log_probs.double()
    probs = log_probs.exp()
    predicted = probs.argmax(1)
    right = predicted == target
    return {
        "accuracy": right.double().mean().item(),
        "top5": topk_accuracy(log_probs, target, 5),
        "f1_macro": f1_macro(predicted, target, probs.shape[1]),
        "nll": -log_probs.gather(1, target[:, None]).mean().item(),
        "ece": expected_calibration_error(probs.amax(1), right),
        "brier": brier(probs, target),
    }


def topk_accuracy(scores: Tensor, target: Tensor, k: int) -> float:
    """Share of rows whose label is among the k highest scores (all of them, with fewer than k classes)."""
    best = scores.topk(min(k, scores.shape[1]), 1).indices  # (N, k)
    return (best == target[:, None]).any(1).double().mean().item()


def f1_macro(predicted: Tensor, target: Tensor, num_classes: int) -> float:
    """Mean F1 over the classes that occur among labels or predictions (as scikit-learn has it)."""
    true = torch.bincount(target[predicted == target], minlength=num_classes).double()
    both = torch.bincount(target, minlength=num_classes) + torch.bincount(predicted, minlength=num_classes)
    return (2 * true / both)[both > 0].mean().item()


def expected_calibration_error(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """Sum over equal-width bins of |accuracy - confidence|, weighted by rows. Bins are (low, high]."""
    # NOTE: confidence 1.0, or 1.0000001 after rounding, belongs to the last bin; it drops out of common implementations.
    number = (torch.ceil(confidence * bins) - 1).clamp(0, bins - 1).long()
    gap = torch.zeros(bins, dtype=torch.float64, device=confidence.device).index_add_(0, number, right.double() - confidence.double())
    return (gap.abs().sum() / len(confidence)).item()


def brier(probs: Tensor, target: Tensor) -> float:
    """Mean squared distance between the probabilities and the one-hot label, summed over classes (0 to 2)."""
    # |p - y|^2 = |p|^2 - 2 p_y + 1, without an (N, C) one-hot
    return (probs.square().sum(1) - 2 * probs.gather(1, target[:, None])[:, 0] + 1).mean().item()
