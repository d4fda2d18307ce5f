"""Embedder: features of the backbone to the embedding, whose dot product is the cosine; it is what the bank stores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from utils import BadOption

LEAST = 1e-12  # a vector that is shorter points nowhere


def unit(x: Tensor) -> Tensor:
    """Rows of length 1, in float32 or better. A zero row stays zero and gets no gradient."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    # NOTE: not a clamp, which divides by LEAST: one zero row would have a gradient of 1e12 and, under clipping, silence the batch.
    return x / length.masked_fill(length < LEAST, math.inf)


class Embedder(nn.Module):
    """Two layers to `embed_dim` numbers of length 1; embed_dim 0 is the features themselves at length 1, with nothing to learn."""

    def __init__(self, num_features: int, embed_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if embed_dim < 0:
            raise BadOption("embed_dim", "must be 0 (the features themselves) or more", embed_dim)
        self.dim = embed_dim or num_features
        self.project: nn.Module = nn.Identity()
        if embed_dim:
            hidden = 2 * embed_dim  # wider than what comes out, and as costly for a wide backbone as for a narrow one
            first, last = nn.Linear(num_features, hidden), nn.Linear(hidden, embed_dim)
            self.project = nn.Sequential(first, nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(dropout), last)

    def forward(self, features: Tensor) -> Tensor:
        return unit(self.project(features))  # (B, D)
