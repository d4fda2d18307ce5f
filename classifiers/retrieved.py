"""Retrieved: queries with the neighbors that were found for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from classifiers.bank import Bank, Neighbors
from layers.functional import full_precision

BLOCK = 1024  # queries whose neighbors' embeddings are held at once
NO_NEIGHBORS = Neighbors(*(torch.empty(0, 0) for _ in range(5)))


@dataclass(frozen=True)
class Context:
    """What may set the confidence of a predictor, beside its scores. What is made of it is made once: a fit asks hundreds of times."""

    distance: Tensor  # (B, K) squared
    mask: Tensor | None = None  # (B, K): which neighbors are there; by default all
    class_cosines: Tensor | None = None  # (B, C) of the query with the mean embedding of each class

    def __getitem__(self, rows: Any) -> Context:
        mask, cosines = (part if part is None else part[rows] for part in (self.mask, self.class_cosines))
        return Context(self.distance[rows], mask, cosines)

    @cached_property
    def has_neighbors(self) -> Tensor:
        """(B, 1)"""
        return self._present.any(1, keepdim=True)

    @cached_property
    def nearness(self) -> tuple[Tensor, Tensor]:
        """log(1 + distance) to the nearest neighbor and in the mean, (B,) each; 0 without neighbors."""
        root = full_precision(self.distance.detach()).masked_fill(~self._present, 0).clamp_min(0).sqrt()  # (B, K)
        nearest = root.masked_fill(~self._present, math.inf).amin(1)
        mean = root.sum(1) / self._present.sum(1).clamp_min(1)
        return nearest.masked_fill(nearest.isinf(), 0).log1p(), mean.log1p()

    @cached_property
    def _present(self) -> Tensor:
        return torch.ones_like(self.distance, dtype=torch.bool) if self.mask is None else self.mask


@dataclass(frozen=True)
class Block:
    """Some queries, with the embeddings of their neighbors."""

    features: Tensor  # (B, F) of the backbone
    embedding: Tensor  # (B, D)
    neighbors: Neighbors
    class_cosines: Tensor  # (B, C)

    @property
    def context(self) -> Context:
        return Context(self.neighbors.distance, self.neighbors.mask, self.class_cosines)


@dataclass(frozen=True)
class Retrieved:
    """Many queries. Which neighbors they have is known; the neighbors' embeddings are taken from the bank a block at a time."""

    features: Tensor  # (N, F)
    embedding: Tensor  # (N, D)
    distance: Tensor  # (N, K) squared
    index: Tensor  # (N, K) ids
    class_cosines: Tensor  # (N, C)
    bank: Bank | None  # None: a head that looks at features alone

    @classmethod
    def without_neighbors(cls, features: Tensor) -> Retrieved:
        empty = features[:, :0]
        return cls(features, empty, empty, empty.long(), empty, None)

    def __len__(self) -> int:
        return len(self.features)

    def block(self, rows: Any) -> Block:
        """Some rows, by a slice or by their numbers."""
        if self.bank is None:
            return Block(self.features[rows], self.embedding[rows], NO_NEIGHBORS, self.class_cosines[rows])
        embedding, label, mask = self.bank.take(self.index[rows])
        near = Neighbors(self.distance[rows], self.index[rows], label, embedding, mask)
        return Block(self.features[rows], self.embedding[rows], near, self.class_cosines[rows])

    def blocks(self) -> Iterator[Block]:
        return (self.block(slice(start, start + BLOCK)) for start in range(0, len(self), BLOCK))

    def nearest(self, k: int) -> Retrieved:
        """With the k nearest neighbors only."""
        return replace(self, distance=self.distance[:, :k], index=self.index[:, :k])

    def subset(self, rows: Tensor) -> Retrieved:
        names = ("features", "embedding", "distance", "index", "class_cosines")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def mask(self) -> Tensor:
        return self.index >= 0

    @property
    def context(self) -> Context:
        return Context(self.distance, self.mask, self.class_cosines)

    @property
    def mean_distance(self) -> Tensor:
        """To the neighbors of each query, (N,)."""
        return (self.distance.clamp_min(0).sqrt() * self.mask).nan_to_num(0).sum(1) / self.mask.sum(1).clamp_min(1)
