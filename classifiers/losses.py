"""Losses of embeddings, attention and votes. A target is class numbers (B,) or, for mixed rows, soft (B, C)."""

from __future__ import annotations

import torch
from torch import Tensor

from layers.functional import full_precision
from utils import BadOption


def nll(log_probs: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean negative log-likelihood. Smoothing gives that share of the target to all classes alike."""
    if not 0 <= label_smoothing <= 1:
        raise BadOption("label_smoothing", "must be from 0 to 1", label_smoothing)
    log_probs = full_precision(log_probs)
    # a class that is not in a soft target costs nothing even where its log-probability is -inf
    rows = -log_probs.gather(1, target[:, None]) if target.ndim == 1 else -(target * log_probs).masked_fill(target == 0, 0).sum(1)
    return (1 - label_smoothing) * rows.mean() - label_smoothing * log_probs.mean() if label_smoothing else rows.mean()


# ---------------------------------------------------------------- pairs within the batch


def _pairs(z: Tensor, target: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine of each two rows, and how much the two are a positive and a negative pair, each (B, B); a row with itself is neither.

    index: row numbers (B,), or (B, 2) of mixed rows. NOTE: two mixtures of the same rows differ in little but their labels, and
    would be the hardest negatives of the batch; a row is not its own negative, nor its own positive.
    """
    z = full_precision(z)
    with torch.autocast(z.device.type, enabled=False):
        cosine = z @ z.T
        soft = target.to(z.dtype)
        # clamped: targets that sum to 1.0000001 would make a negative pair of weight below 0, whose logarithm is NaN
        same = (target[:, None] == target).to(z.dtype) if target.ndim == 1 else (soft @ soft.T).clamp(0, 1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    if index is not None:
        index = index.to(z.device).reshape(len(z), -1)
        itself = itself | (index[:, None, :, None] == index[None, :, None]).any(3).any(2)
    other = (~itself).to(z.dtype)
    return cosine, same * other, (1 - same) * other


@torch.no_grad()
def _weigh_hard(cosine: Tensor, negative: Tensor, beta: float) -> Tensor:
    """Negative pairs (B, B), those of a high cosine weighed up by exp(beta cosine) at the expense of the row's others.

    NOTE: no gradient. These are the odds of drawing a negative; through them an easy negative would be pulled nearer, because
    that takes weight from the hard ones.
    """
    if beta < 0:
        raise BadOption("hard_negatives", "must be 0 or more", beta)
    if beta == 0:
        return negative
    logits = (beta * cosine + negative.log()).masked_fill(negative == 0, torch.finfo(cosine.dtype).min)
    return logits.softmax(1) * negative.sum(1, keepdim=True)


def supervised_contrastive(
    z: Tensor, target: Tensor, index: Tensor | None = None, *, temperature: float = 0.1, hard_negatives: float = 0.0
) -> Tensor:
    """SupCon of unit vectors z (B, D) within the batch, mean over the positives outside of the logarithm (arXiv 2004.11362).

    Two rows of soft targets are a positive pair by the dot product of these and a negative one by the rest; rows that share a
    number of `index` are no pair. hard_negatives is the concentration beta on negatives that are near (arXiv 2010.04592). Mean
    over the rows that have a positive; 0 if none has.
    """
    if not temperature > 0:
        raise BadOption("temperature", "must be above 0", temperature)
    cosine, positive, negative = _pairs(z, target, index)
    weight = positive + _weigh_hard(cosine, negative, hard_negatives)
    logits = cosine / temperature
    # NOTE: not -inf: a batch of one is a row of nothing else, and NaN on the way back.
    among = (logits + weight.log()).masked_fill(weight == 0, torch.finfo(cosine.dtype).min).logsumexp(1)
    count = positive.sum(1)
    has = count > 0
    rows = among - (positive * logits).sum(1) / count.masked_fill(~has, 1)
    return torch.where(has, rows, 0).sum() / has.sum().clamp_min(1)


def contrastive_margin(
    z: Tensor, target: Tensor, index: Tensor | None = None, *, margin: float = 0.5, hard_negatives: float = 0.0
) -> Tensor:
    """Mean of 1 - cosine over the positive pairs plus mean of relu(cosine - margin) over the negative ones (CosineEmbeddingLoss).

    Two means: with many classes nearly all pairs are negative, and one mean would be theirs alone. Soft targets and
    hard_negatives as in `supervised_contrastive`.
    """
    if not -1 <= margin <= 1:
        raise BadOption("margin", "is a cosine, from -1 to 1", margin)
    cosine, positive, negative = _pairs(z, target, index)
    weight = _weigh_hard(cosine, negative, hard_negatives)
    least = torch.finfo(cosine.dtype).tiny
    pull = (positive * (1 - cosine)).sum() / positive.sum().clamp_min(least)
    push = (weight * (cosine - margin).relu()).sum() / negative.sum().clamp_min(least)
    return pull + push


# ---------------------------------------------------------------- attention


def collapse(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """How far attention (B, K) is from uniform: log(neighbors) - entropy, mean over the rows that have a neighbor.

    0 if all have the same say, log(neighbors) if one has it all.
    """
    weights = full_precision(weights)
    mask = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask
    weights = weights.masked_fill(~mask, 0)
    # NOTE: entr's gradient at 0 is infinite.
    entropy = -(weights * weights.clamp_min(torch.finfo(weights.dtype).tiny).log()).sum(1)
    count = mask.sum(1)
    rows = count.clamp_min(1).to(weights.dtype).log() - entropy  # 0 without neighbors
    return rows.sum() / (count > 0).sum().clamp_min(1)
