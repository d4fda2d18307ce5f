"""Embedder: features of the backbone to the embedding, whose dot product is the cosine; it is what the bank stores."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import here
from utils import BadOption

LEAST_HIDDEN = 128
LEAST = 1e-12  # a vector that is shorter points nowhere


def unit(x: Tensor) -> Tensor:
    """Rows of length 1, in float32 or better. A zero row stays zero and gets no gradient."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    # NOTE: not a clamp, which divides by LEAST: one zero row would have a gradient of 1e12 and, under clipping, silence the batch.
    return x / length.masked_fill(length < LEAST, math.inf)


class Standardize(nn.BatchNorm1d):
    """Each feature to mean 0 and variance 1: over the batch in training, over running statistics in evaluation. Nothing to learn.

    NOTE: the class tokens of a fresh ViT point nearly the same way for all rows, which neither length 1 nor LayerNorm undoes. A vote
    over them has a shorter way down than to tell classes apart: to make all rows equal.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and here().total(len(x)) > 1:
            assert self.num_batches_tracked is not None
            self.momentum = max(0.1, 1 / (1 + int(self.num_batches_tracked)))  # a mean of the first ten batches, not of them and (0, 1)
            return super().forward(x)
        return F.batch_norm(x, self.running_mean, self.running_var, eps=self.eps)  # one row has no variance


def projection(num_features: int, hidden: int, embed_dim: int, drop: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_features, hidden), nn.LayerNorm(hidden), nn.GELU(), drop, nn.Linear(hidden, embed_dim))


class Embedder(nn.Module):
    """Standardized features through two layers to `embed_dim` numbers of length 1; with embed_dim 0 the features themselves at length 1.

    No dropout in here: the bank is embedded without, and a query that dropout has moved finds the wrong neighbors. `standardize=False`
    is the form of older checkpoints, which had `dropout` between the layers.
    """

    def __init__(self, num_features: int, embed_dim: int, *, standardize: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        if embed_dim < 0:
            raise BadOption("embed_dim", "must be 0 (the features themselves) or more", embed_dim)
        self.dim = embed_dim or num_features
        self.standardize: nn.Module = Standardize(num_features) if standardize else nn.Identity()
        self.project: nn.Module = nn.Identity()
        if embed_dim:
            drop = nn.Identity() if standardize else nn.Dropout(dropout)
            # Wider than what comes out, and as costly for a wide backbone as for a narrow one. NOTE: 64 between 512 features of a ResNet
            # and 32 numbers lost a point that 128 did not.
            hidden = max(2 * embed_dim, min(num_features, LEAST_HIDDEN))
            self.project = projection(num_features, hidden, embed_dim, drop)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Of an older run the hidden layer may be narrower."""
        saved = state.get(f"{prefix}project.0.weight")
        layers: list[Any] = list(self.project.children())
        if saved is not None and layers and len(saved) != len(layers[0].weight):
            made = projection(layers[0].in_features, len(saved), layers[-1].out_features, layers[3])
            self.project = made.to(layers[0].weight.device)
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, features: Tensor) -> Tensor:
        return unit(self.project(self.standardize(features)))  # (B, D)
