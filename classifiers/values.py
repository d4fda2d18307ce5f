"""Values: what a neighbor says beyond its label."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class TabrValues(nn.Module):
    """TabR (arXiv 2307.14338): neighbor j says E[y_j] + T(k_i - k_j), its label corrected by how the query differs from it.

    The weighted sum of what they say is added to the query and read out as classes.
    """

    def __init__(self, dim: int, num_classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.label_embedding = nn.Embedding(num_classes, dim)
        # as long as the query, which has length 1: longer labels drown it in the sum
        nn.init.normal_(self.label_embedding.weight, std=1 / math.sqrt(dim))
        self.difference = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Dropout(dropout))
        self.difference_out = nn.Linear(2 * dim, dim, bias=False)
        self.readout = nn.Sequential(nn.LayerNorm(dim), nn.ReLU(), nn.Linear(dim, num_classes))

    def forward(
        self,
        weights: Tensor,
        query: Tensor,
        key_of_query: Tensor,
        keys: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """weights, labels and mask (B, K), query and key_of_query (B, D), keys (B, K, D) to probabilities (B, C).

        A query without neighbors is read out alone.
        """
        # NOTE: subtracted before the first layer, not after it: near keys would cancel to rounding in bfloat16.
        apart = key_of_query[:, None] - keys  # (B, K, D)
        if mask is not None:  # whatever stands in for a missing neighbor, it must not reach a gradient
            apart = apart.masked_fill(~mask[..., None], 0)
            weights, labels = weights.masked_fill(~mask, 0), labels.masked_fill(~mask, 0)
        votes = weights.new_zeros(len(weights), self.num_classes).scatter_add(1, labels, weights)  # (B, C)
        hidden = self.difference(apart)  # (B, K, 2D)
        # the last layer of T has no bias, so it is applied to the sum instead of to each neighbor
        said = self.difference_out((weights[:, None].to(hidden.dtype) @ hidden).squeeze(1))  # (B, D)
        context = votes.to(self.label_embedding.weight.dtype) @ self.label_embedding.weight + said
        logits = self.readout(query + context)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(1)
