"""Weights: how much each neighbor of a query counts; and the count itself, from weights to class probabilities.

A function of `WEIGHTS` is called like `NeighborAttention`: (query, neighbors, sq_distance, labels, mask) to weights (B, K).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from classifiers.neighbor_attention import masked_softmax
from layers.functional import full_precision
from utils import BadOption, Registry

Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
WEIGHTS: Registry[Weigh] = Registry("vote", "vote")
LEAST = 1e-20  # weight of a neighbor that exists: it decides only where all weights round to 0
DINO_TEMPERATURE = 0.07


# ---------------------------------------------------------------- weights


@WEIGHTS.register("uniform")
def uniform(query: Tensor, neighbors: Tensor, sq_distance: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Every neighbor counts the same."""
    return masked_softmax(torch.zeros_like(sq_distance), mask)


@WEIGHTS.register("distance")
def inverse_distance(query: Tensor, neighbors: Tensor, sq_distance: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """One over the distance; where neighbors lie at distance 0, they alone count (scikit-learn's weights="distance")."""
    squared = full_precision(sq_distance).clamp_min(0)
    there = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    zero = squared == 0
    safe = squared.masked_fill(zero | ~there, 1)
    nearest = squared.masked_fill(~there, math.inf).amin(1, keepdim=True)  # (B, 1)
    # NOTE: relative to the nearest, nothing overflows; clamped before the root, whose gradient at 0 is infinite.
    relative = (nearest.masked_fill(nearest.isinf(), 1) / safe).masked_fill(zero, 1).clamp_min(1e-14).sqrt() * there
    return relative / relative.sum(1, keepdim=True).clamp_min(LEAST)


@WEIGHTS.register("softmax-cosine")
def softmax_cosine(
    query: Tensor,
    neighbors: Tensor,
    sq_distance: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = DINO_TEMPERATURE,
) -> Tensor:
    """Softmax of the cosine over a temperature (DINO: 0.07, with k = 20)."""
    if not isinstance(temperature, Tensor):
        check_temperature(temperature)
    neighbors = neighbors if mask is None else neighbors.masked_fill(~mask[..., None], 0)
    cosine = nn.functional.cosine_similarity(full_precision(query)[:, None], full_precision(neighbors), dim=2)
    return masked_softmax(cosine / temperature, mask)


def check_temperature(value: float | Tensor) -> None:
    """Below 0 the farthest neighbor would count most; near 0 or infinity nothing is left of the cosine."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-4 <= value <= 1e4:
        raise BadOption("vote", "takes a number from 0.0001 to 10,000 as the temperature of softmax-cosine", value)


# ---------------------------------------------------------------- probabilities


def class_probabilities(weights: Tensor, labels: Tensor, num_classes: int, ks: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """(B, K) weights and labels to (len(ks), B, C) probabilities that sum to 1: of the first k neighbors for each k, in one pass.

    A query without neighbors gets 1/C for each class.
    """
    width = weights.shape[1]
    for k in ks:
        if not 1 <= k <= width:
            raise BadOption("k", f"must be from 1 to the number of neighbors ({width})", k)
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    labels = labels.masked_fill(~mask, 0)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise BadOption("labels", f"of neighbors must be from 0 to {num_classes - 1}", int(labels.max()))
    weights = (full_precision(weights).masked_fill(~mask, 0) + LEAST) * mask
    votes = weights.new_zeros(len(weights), num_classes)
    done, found = 0, {}
    for k in sorted(set(ks)):
        votes = votes.scatter_add(1, labels[:, done:k], weights[:, done:k])  # (B, C)
        # NOTE: renormalized. Weights over all neighbors cut at k do not sum to 1.
        total = votes.sum(1, keepdim=True)
        found[k] = torch.where(total > 0, votes / total.clamp_min(LEAST / 2), 1 / num_classes)
        done = k
    return torch.stack([found[k] for k in ks])


def heaviest(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weights (B, K) of the exp(entropy) heaviest neighbors of each query (rounded up), renormalized; 0 for the others.

    Weights that rest on one neighbor leave one; weights that are the same for all leave all.
    """
    weights = full_precision(weights) if mask is None else full_precision(weights).masked_fill(~mask, 0)
    total = weights.sum(1, keepdim=True)
    weights = weights / total.clamp_min(LEAST)
    # a little below the next whole number: exp(log K) may round to above K
    count = (torch.special.entr(weights.detach()).sum(1, keepdim=True).exp() - 1e-4).ceil().clamp(1, weights.shape[1])
    order = weights.detach().argsort(dim=1, descending=True, stable=True)  # stable: of equal weights the nearer stays
    place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    weights = weights * (place < count)
    return weights / weights.sum(1, keepdim=True).clamp_min(LEAST)


def log_probabilities(probs: Tensor) -> Tensor:
    """Logarithm that is finite at 0 (a vote without a prior has zeros), with finite gradients.

    A probability below 1.2e-7, the rounding of float32, counts as 1.2e-7, as in scikit-learn's log_loss: a wrong vote that was
    certain costs 15.9 nats. A smaller number would only make the votes that have no prior look worse.
    """
    return probs.clamp_min(torch.finfo(torch.float32).eps).log()


def check_weights(name: str, weights: Tensor, mask: Tensor) -> None:
    """Of a function that a user may have written."""
    if weights.shape != mask.shape:
        raise BadOption("vote", f"{name} must return weights (queries, neighbors), here {tuple(mask.shape)}", tuple(weights.shape))
    if not (weights.masked_fill(~mask, 0) >= 0).all() or weights.isinf().any():
        raise BadOption("vote", f"{name} must return weights that are numbers of at least 0")
