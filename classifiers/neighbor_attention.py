"""Neighbor attention: how much each of a query's neighbors may say, learned."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.functional import full_precision
from utils import BadOption

START = 0.1  # temperature of the cosine that the attention starts from
HIDDEN = 64  # of the network from a squared distance to a bias


def masked_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension of what `mask` lets stand; the rest weighs exactly 0, and where nothing stands all is 0."""
    logits = full_precision(logits)
    if mask is None:
        return logits.softmax(-1)
    # NOTE: not -inf: a row of them gives NaN, in the gradient too.
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1) * mask


def agreement(labels: Tensor, mask: Tensor) -> Tensor:
    """Share of a neighbor's fellow neighbors that have its label, (B, K); 0 for one without fellows."""
    same = (labels[:, :, None] == labels[:, None]) & mask[:, None] & mask[..., None]  # (B, K, K)
    return (same.sum(2) - 1).clamp_min(0) / (mask.sum(1, keepdim=True) - 1).clamp_min(1)


class Bounded(torch.autograd.Function):
    """Clamp whose gradient is stopped only where it pushes further out: a plain clamp never lets a value back in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high), gradient = ctx.saved_tensors, ctx.bounds, gradients[0]
        outward = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))
        return gradient.masked_fill(outward, 0), None, None


class NeighborSelfAttention(nn.Module):
    """Neighbors read one another: LayerNorm(n + SelfAttention(n))."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, neighbors: Tensor, mask: Tensor | None) -> Tensor:
        b, k, dim = neighbors.shape
        split = self.qkv(neighbors).reshape(b, k, 3, self.num_heads, dim // self.num_heads)
        q, keys, v = split.permute(2, 0, 3, 1, 4)  # (B, H, K, D/H) each
        logits = q @ keys.transpose(2, 3) / math.sqrt(dim // self.num_heads)  # (B, H, K, K)
        weights = masked_softmax(logits, None if mask is None else mask[:, None, None])
        mixed = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(b, k, dim)
        return self.norm(neighbors + self.out_proj(mixed))


class LabelBias(nn.Module):
    """What a neighbor's label adds to its logit: the query's own leaning to that class, and how many fellow neighbors have it.

    NOTE: both differ between neighbors of one query. A bias that depends on the query alone cancels in the softmax.
    """

    def __init__(self, dim: int, num_classes: int, num_heads: int) -> None:
        super().__init__()
        self.leaning = nn.Linear(dim, num_classes)
        nn.init.normal_(self.leaning.weight, std=0.02)
        nn.init.zeros_(self.leaning.bias)
        self.agreement = nn.Parameter(torch.zeros(num_heads))

    def forward(self, query: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        of_class = self.leaning(query).gather(1, labels)  # (B, K)
        return of_class[:, None] + self.agreement[:, None] * agreement(labels, mask)[:, None]  # (B, H, K)


class NeighborAttention(nn.Module):
    """Multi-head attention from a query to its neighbors; gives weights, their mean over heads, not values.

    Logits of a head: q.k / sqrt(D/H) / tau + a learned function of the squared distance [+ cosine of the neighbor with the
    prototype of its label] [+ label bias]. tau is learned for each head, within `temperature_bounds`.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_classes: int,
        self_attention: bool = False,
        prototypes: bool = False,
        label_bias: bool = False,
        distance_bias: bool = True,
        temperature_bounds: tuple[float, float] = (0.05, 2.0),
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise BadOption("embed_dim", f"must be a multiple of the number of attention heads ({num_heads})", dim)
        low, high = temperature_bounds
        if not 0 < low <= high < math.inf:
            raise BadOption("temperature_bounds", "must be two numbers, 0 < low <= high", (low, high))
        self.num_heads, self.num_classes = num_heads, num_classes
        self.log_bounds = math.log(low), math.log(high)
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self._start_as_cosine(dim)
        self.log_tau = nn.Parameter(torch.zeros(num_heads).clamp(*self.log_bounds))
        self.dist_bias: nn.Sequential | None = None
        if distance_bias:
            widths = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, num_heads)
            self.dist_bias = nn.Sequential(widths[0], nn.GELU(), widths[1], nn.GELU(), widths[2])
            nn.init.normal_(widths[2].weight, std=0.02)  # it starts near the uniform vote, and near is not cut off from gradients
        self.self_attn = NeighborSelfAttention(dim, num_heads) if self_attention else None
        self.prototypes = nn.Parameter(torch.randn(num_classes, dim) / math.sqrt(dim)) if prototypes else None
        self.proto_scale = nn.Parameter(torch.full((1,), 0.1)) if prototypes else None
        self.label_bias = LabelBias(dim, num_classes, num_heads) if label_bias else None

    @torch.no_grad()
    def _start_as_cosine(self, dim: int) -> None:
        """Of unit vectors, the logits start as cosine / START, each head seeing its part of it.

        NOTE: with PyTorch's own start they are near 0, the weights uniform, and no gradient of the vote reaches the embedder.
        """
        gain = (self.num_heads * math.sqrt(dim // self.num_heads) / START) ** 0.5
        for projection in (self.q_proj, self.k_proj):
            projection.weight.copy_(gain * torch.eye(dim))
            projection.bias.zero_()

    @property
    def temperature(self) -> Tensor:
        bounded: Tensor = Bounded.apply(full_precision(self.log_tau), *self.log_bounds)
        return bounded.exp()

    def forward(self, query: Tensor, neighbors: Tensor, sq_distance: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """query (B, D), neighbors (B, K, D), sq_distance, labels and mask (B, K) to weights (B, K) that sum to 1."""
        if mask is not None:  # whatever stands in for a missing neighbor, it must not reach a gradient
            neighbors = neighbors.masked_fill(~mask[..., None], 0)
            sq_distance, labels = sq_distance.masked_fill(~mask, 0), labels.masked_fill(~mask, 0)
        if self.self_attn is not None:
            neighbors = self.self_attn(neighbors, mask)
        logits = self._similarity(query, neighbors) / self.temperature[:, None]  # (B, H, K)
        if self.dist_bias is not None:
            logits = logits + full_precision(self.dist_bias(sq_distance.to(query.dtype)[..., None]).transpose(1, 2))
        if self.prototypes is not None and self.proto_scale is not None:
            cosine = F.cosine_similarity(full_precision(neighbors), full_precision(self.prototypes)[labels], dim=2)  # (B, K)
            logits = logits + (self.proto_scale * cosine)[:, None]
        if self.label_bias is not None:
            there = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
            logits = logits + self.label_bias(query, labels, there)
        return masked_softmax(logits, None if mask is None else mask[:, None]).mean(1)

    def _similarity(self, query: Tensor, neighbors: Tensor) -> Tensor:
        """(B, H, K): q.k of each head. The query goes through the keys' projection instead of the neighbors, K times fewer."""
        (b, dim), heads = query.shape, self.num_heads
        q = self.q_proj(query).reshape(b, heads, -1)  # (B, H, D/H)
        weight = self.k_proj.weight.reshape(heads, -1, dim)  # (H, D/H, D)
        through = (q.transpose(0, 1) @ weight.to(q.dtype)).permute(1, 2, 0)  # (B, D, H)
        bias = (q * self.k_proj.bias.reshape(heads, -1)).sum(2)  # the same for all neighbors
        similar = (neighbors.to(through.dtype) @ through).transpose(1, 2) + bias[..., None]
        return full_precision(similar) / math.sqrt(dim // heads)
