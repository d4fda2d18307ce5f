"""What the layers compute, written as the definition says: loops, float64, no tricks. And what several tests share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import layers
from layers.base import TokenMixer

DIM, HEADS, GRID, PREFIX = 66, 3, (5, 7), 2  # heads 22 wide; 37 tokens, a prime
TOKENS = GRID[0] * GRID[1] + PREFIX

# Every layer, and every way through it that differs.
SPECS = (
    "Attention",
    "ConvNNAttention(K=5)",
    "ConvNNAttention(K=5, convolution_type='standard', coordinate_encoding=True)",
    "ConvNNAttention(K=5, convolution_type='depthwise-separable', coordinate_encoding='2d')",
    "ConvNNAttention(K=5, magnitude_type='euclidean', coordinate_encoding='2d')",
    "ConvNNAttention(K=5, magnitude_type='cosine', softmax_topk_val=False)",
    "ConvNNAttention(K=5, sampling_type='random', num_samples=11, eval_sampling='fixed')",
    "ConvNNAttention(K=9, sampling_type='spatial', num_samples=8)",
    "ConvNNAttention(K=5, sampling_type='grid', num_samples=12, self_score='real')",
    "KvtAttention(K=5)",
    "LocalAttention(window=7)",
    "LocalAttention(preset='published')",
    "NeighborhoodAttention(K=5)",
    "NeighborhoodAttention(K=3, window_dims=2)",
    "SparseAttention(sparse_context_window=5)",
    "SparseAttention(sparse_mode='strided', sparse_context_window=3)",
    "SampledKnnAttention(K=5, num_samples=7)",
    "BranchConv(K=5, kernel_size=3)",
    "BranchAttention(K=5)",
)


def build(spec: str, num_heads: int = HEADS, dim: int = DIM, **options: Any) -> Any:  # a layer, whatever its class
    return layers.build(spec, dim=dim, num_heads=num_heads, grid=GRID, num_prefix_tokens=PREFIX, **options)


def tokens(batch: int = 2, n: int = TOKENS, dim: int = DIM, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, n, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_same(got: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to rounding, or a message that says how far off."""
    assert got.shape == wanted.shape
    off = (got.double() - wanted.double()).abs()
    assert off.max() <= tolerance, f"largest difference {off.max():.3g}, mean {off.mean():.3g}, tolerance {tolerance:.3g}"


def mixed(layer: TokenMixer, x: Tensor, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """The layer's projections around another `mix`, with the heads written out one by one."""
    q, k, v = layer.qkv(x).chunk(3, dim=-1)
    width = layer.head_dim
    heads = [slice(h * width, (h + 1) * width) for h in range(layer.num_heads)]
    out = [torch.cat([mix(q[b][:, h], k[b][:, h], v[b][:, h]) for h in heads], -1) for b in range(len(x))]
    return layer.proj(torch.stack(out))


def similarity(a: Tensor, b: Tensor, magnitude: str) -> Tensor:
    if magnitude == "matmul":
        return a @ b / math.sqrt(len(a))
    if magnitude == "cosine":
        return a @ b / (a.norm() * b.norm())
    return -(a - b).norm()


def convnn_row(
    n: int, q: Tensor, k: Tensor, v: Tensor, kernel: Tensor, K: int, magnitude: str, softmax: bool, candidates: list[int] | None, own: str
) -> Tensor:
    """One token's output: its list of neighbors, their weights, a (K, E, D) kernel over them. Fewer than K: the list is shorter."""
    chosen = sorted((-float(similarity(q[n], k[m], magnitude).detach()), m) for m in (range(len(k)) if candidates is None else candidates))
    if candidates is None:
        order = [m for _, m in chosen[:K]]
        scores = [similarity(q[n], k[m], magnitude) for m in order]
    else:
        order = [n, *[m for _, m in chosen if m != n][: K - 1]]
        scores = [similarity(q[n], k[m], magnitude) for m in order]
        if own == "one":
            scores[0] = torch.tensor(-1.0 if magnitude == "euclidean" else 1.0, dtype=q.dtype)
    score = torch.stack(scores)
    raw = 1 / (-score + 1e-8) if magnitude == "euclidean" else score
    weight = score.softmax(0) if softmax else raw
    return sum((kernel[r] @ (weight[r] * v[m]) for r, m in enumerate(order)), torch.zeros(len(kernel[0]), dtype=q.dtype))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.T / math.sqrt(q.shape[1])
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def largest_allocation(run: Callable[[], object]) -> int:
    """Bytes of the largest single tensor that was allocated while it ran, inside operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    return max(e.nbytes() for e in events if e.name() == "[memory]")


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """The weights that both have; the target keeps what only it has."""
    common = target.state_dict().keys() & source.state_dict().keys()
    target.load_state_dict({name: source.state_dict()[name] for name in common}, strict=False)
