"""The pure functions that the layers are made of. Tensors are (B, H, N, D); an index of neighbors is (B, H, N, K)."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from layers import kernels
from utils import say

MAGNITUDES = ("matmul", "cosine", "euclidean")
# Squared distances below this count as this. The root has no slope at 0, and a raw weight 1 / distance no bound.
CLOSEST = 1e-8


def full_precision(x: Tensor) -> Tensor:
    """float32 at least: which neighbor is the K-th best must not hang on bfloat16's eight bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@lru_cache(maxsize=256)
def say_once(message: str) -> None:
    """A model has a layer a block; what holds for all of them is said for the first."""
    say(message)


# ---------------------------------------------------------------- selection and sums over neighbors


def nearest(q: Tensor, k: Tensor, K: int, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The K keys (B, H, M, D) with the largest q . k for each query, best first: scores and index, both (B, H, N, K)."""
    return kernels.nearest(q, k, K, own)


def pair_dot(q: Tensor, k: Tensor, index: Tensor) -> Tensor:
    """q . k of each query with the keys of its own list: (B, H, N, K)."""
    return kernels.pair_dot(q, k, index)


def weighted_sum(v: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """sum_r weight[n, r] v[index[n, r]]: (B, H, N, D)."""
    return kernels.bag(v, index, weight)


def rank_conv(v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    """A Conv1d of kernel K and stride K over the weighted neighbors in rank order, without laying them out.

    kernel (K, D): one factor a rank and channel (depthwise). kernel (K, E, D): a matrix a rank (standard), to (B, H, N, E).
    """
    return kernels.rank_conv(v, index, weight, kernel)


# ---------------------------------------------------------------- similarity


def comparable(q: Tensor, k: Tensor, magnitude: str) -> tuple[Tensor, Tensor]:
    """Queries and keys whose dot product orders the keys by the similarity (largest is nearest)."""
    if magnitude == "matmul":
        return q, k
    if magnitude == "cosine":
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    # |q - k|^2 = |q|^2 - 2 (q . k - |k|^2 / 2): one more channel makes a dot product of it.
    # Distances do not change when both are moved; around the origin they lose fewest digits.
    center = k.detach().mean(dim=2, keepdim=True)  # (B, H, 1, D)
    q, k = q - center, k - center
    return torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, -0.5 * k.square().sum(-1, keepdim=True)], -1)


def similarity(dot: Tensor, q: Tensor, magnitude: str, scale: float) -> Tensor:
    """The similarity from the dot product of what `comparable` gave; minus the distance for euclidean."""
    if magnitude == "matmul":
        return dot * scale
    if magnitude == "cosine":
        return dot
    squared = q[..., :-1].square().sum(-1, keepdim=True) - 2 * dot
    return -squared.clamp(min=CLOSEST).sqrt()


def rank_weights(score: Tensor, magnitude: str, softmax: bool, missing: Tensor | None = None) -> Tensor:
    """Weights of the K neighbors from their similarity: a softmax, or raw (euclidean: one over the distance).

    `missing` marks ranks for which a token has no candidate: they weigh nothing.
    """
    if softmax:
        if missing is not None:
            score = score.masked_fill(missing, -torch.inf)
        return score.softmax(-1)
    weight = 1 / (1e-8 - score) if magnitude == "euclidean" else score
    return weight if missing is None else weight.masked_fill(missing, 0)


def constant_self_score(magnitude: str) -> float:
    """The published score of a token with itself among sampled candidates: similarity 1, or distance 1."""
    return -1.0 if magnitude == "euclidean" else 1.0


# ---------------------------------------------------------------- candidates


def spaced_tokens(tokens: int, samples: int, padding: int = 0) -> Tensor:
    """`samples` tokens evenly spaced over the sequence, `padding` kept free at both ends."""
    return torch.linspace(padding, tokens - 1 - padding, samples).long()


def grid_samples(grid: tuple[int, int], samples: int, padding: int) -> tuple[int, int]:
    """Rows and columns of samples: the most that fit the number asked for, no more than twice as dense one way as the other."""
    h, w = grid[0] - 2 * padding, grid[1] - 2 * padding

    def fit(rows: int) -> tuple[bool, int, float]:
        columns = min(w, samples // rows)
        stretch = max(h * columns, w * rows) / max(1, min(h * columns, w * rows))
        return stretch <= 2, rows * columns if stretch <= 2 else 0, -stretch

    rows = max(range(1, min(h, samples) + 1), key=fit)
    return rows, min(w, samples // rows)


def grid_tokens(grid: tuple[int, int], samples: int, padding: int, num_prefix_tokens: int) -> Tensor:
    """Tokens at rows and columns evenly spaced over the patch grid, each in the middle of its part of the grid."""
    rows, columns = grid_samples(grid, samples, padding)
    y = ((torch.arange(rows) + 0.5) * (grid[0] - 2 * padding) / rows).long() + padding  # (rows,)
    x = ((torch.arange(columns) + 0.5) * (grid[1] - 2 * padding) / columns).long() + padding
    return (num_prefix_tokens + y[:, None] * grid[1] + x).flatten()


def scrambled(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1 to 32-bit numbers that look random and never change: a draw for eval, without a generator."""
    x = torch.arange(1, count + 1, device=device) * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 15)


def drawn_tokens(tokens: int, samples: int, fixed: bool, device: torch.device) -> Tensor:
    """`samples` tokens in ascending order: drawn anew from the global generator, or always the same."""
    order = scrambled(tokens, device).argsort() if fixed else torch.randperm(tokens, device=device)
    return order[:samples].sort().values


# ---------------------------------------------------------------- coordinates


def line_coordinates(tokens: int, device: torch.device) -> Tensor:
    """The place in the sequence, from -1 to 1: (N, 1), as published."""
    return torch.linspace(-1, 1, tokens, device=device)[:, None]


def plane_coordinates(grid: tuple[int, int], num_prefix_tokens: int, device: torch.device) -> Tensor:
    """Row and column on the patch grid, from -1 to 1: (N, 2). Class and register tokens sit in the middle."""
    y, x = (torch.linspace(-1, 1, side, device=device) if side > 1 else torch.zeros(1, device=device) for side in grid)
    patches = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).flatten(0, 1)  # (h * w, 2)
    return F.pad(patches, (0, 0, num_prefix_tokens, 0))


def append_coordinates(x: Tensor, coordinates: Tensor) -> Tensor:
    """(B, H, N, D) and (N, c) to (B, H, N, D + c)."""
    return torch.cat([x, coordinates.to(x.dtype).expand(*x.shape[:3], -1)], -1)


# ---------------------------------------------------------------- masks: True where a row may read a column, (N, N)


def local_mask(tokens: int, window: int, device: torch.device) -> Tensor:
    """|i - j| <= window // 2."""
    place = torch.arange(tokens, device=device)
    return (place[:, None] - place).abs() <= window // 2


def strided_mask(tokens: int, stride: int, device: torch.device) -> Tensor:
    """|i - j| is a multiple of the stride."""
    place = torch.arange(tokens, device=device)
    return (place[:, None] - place) % stride == 0


def neighborhood_mask(tokens: int, K: int, dilation: int, device: torch.device) -> Tensor:
    """The K nearest tokens in steps of `dilation`; at the borders the window moves inside instead of shrinking (NATTEN)."""
    place = torch.arange(tokens, device=device)
    lane, step = place % dilation, place // dilation  # a token reads its own lane only
    length = (tokens - lane + dilation - 1) // dilation  # of the lane
    start = torch.minimum((step - K // 2).clamp(min=0), length - K)[:, None]  # (N, 1)
    return (lane[:, None] == lane) & (step >= start) & (step < start + K)


def open_to_prefix(mask: Tensor, num_prefix_tokens: int) -> Tensor:
    """Class and register tokens in front, which read everything and are read by everything."""
    return F.pad(mask, (num_prefix_tokens, 0, num_prefix_tokens, 0), value=True)
