"""What kernels.py and lists.py compute, in torch's ordinary operators: for graphs that leave the toolkit (`export`).

The same numbers but for rounding, and but for equal scores, whose order `topk` does not promise. More memory: (B, H, N, K, D) at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layers import kernels, lists


def nearest(q: Tensor, k: Tensor, K: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2)  # (B, H, N, M)
    if own is not None:
        scores = scores.masked_fill(torch.arange(q.shape[-2], device=q.device)[:, None] == own[None], -torch.inf)
    score, index = scores.topk(K, dim=-1)
    return score, index


def _neighbors(v: Tensor, index: Tensor) -> Tensor:
    """(B, H, N, K, D)"""
    batch, heads, rows, K = index.shape
    wanted = index.reshape(batch, heads, rows * K, 1).expand(-1, -1, -1, v.shape[3])
    return v.gather(2, wanted).reshape(batch, heads, rows, K, v.shape[3])


def bag(v: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return (_neighbors(v, index) * weight[..., None]).sum(-2)


def spread(x: Tensor, index: Tensor, weight: Tensor, columns: int) -> Tensor:
    dense = weight.new_zeros(*index.shape[:-1], columns).scatter_add(-1, index, weight)  # (B, H, N, M)
    return dense.transpose(-1, -2) @ x


def pair_dot(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    return (x @ y.transpose(-1, -2)).gather(-1, index)


def rank_conv(v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    laid_out = _neighbors(v, index) * weight[..., None]  # (B, H, N, K, D)
    if kernel.dim() == 2:
        return (laid_out * kernel).sum(-2)
    return laid_out.flatten(-2) @ kernel.transpose(1, 2).flatten(0, 1)  # (K * D, E)


def _attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor | None, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, chosen, weight = lists.composed(q, k, v, index, *how)
    return out, chosen, weight


def up_to(ordered: Tensor, values: Tensor) -> Tensor:
    return (ordered[..., None, :] <= values[..., None]).sum(-1)


def pad_to_multiple(tensor: Tensor, multiple: int, dim: int = -1, value: float = 0) -> tuple[bool, Tensor]:
    """As the package local-attention has it, for a tracer, which would follow the number of tokens: it is fixed."""
    missing = -int(tensor.shape[dim]) % int(multiple)
    return missing > 0, F.pad(tensor, (*(0, 0) * (-1 - dim), 0, missing), value=value)


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Layers that are called within use these instead of the operators."""
    from local_attention import local_attention

    places: list[tuple[Any, Any]] = [(kernels, function) for function in (nearest, bag, spread, pair_dot, rank_conv, up_to)]
    places += [(lists, _attend), (local_attention, pad_to_multiple)]
    before = [getattr(module, function.__name__) for module, function in places]
    try:
        for module, function in places:
            setattr(module, function.__name__, function)
        yield
    finally:
        for (module, function), original in zip(places, before, strict=True):
            setattr(module, function.__name__, original)
