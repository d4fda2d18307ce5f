"""The attention map of any layer, found out from its `mix`: no layer has to say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Note = tuple[nn.Module, tuple[Any, ...], Any]
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def noted(module: nn.Module, method: str, notes: list[Note]) -> Iterator[None]:
    """Within it, each call of a method of this one module is noted: the module, its arguments, what it gave back."""
    own, original = method in vars(module), getattr(module, method)

    def call(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        notes.append((module, (*arguments, *named.values()), result))
        return result

    setattr(module, method, call)
    try:
        yield
    finally:
        if own:
            setattr(module, method, original)
        else:
            delattr(module, method)


@torch.no_grad()
def attention_map(layer: Any, q: Tensor, k: Tensor) -> Tensor:
    """How much each token (row) reads of each other (column): (B, H, N, N). Zero means: not at all.

    A layer whose `mix` calls `attend`, or its own `neighbors(q, k) -> index, weight`, is taken at its word: those weights, before a
    convolution over the ranks. For any other layer the weights follow from what it makes of values that are a one at a single token.
    """
    for method in ("attend", "neighbors"):
        notes: list[Note] = []
        if hasattr(layer, method):
            with noted(layer, method, notes):
                layer.mix(q, k, torch.zeros_like(k))
        said = [result[-2:] for _, _, result in notes]
        if said and all(index.shape[2] == q.shape[2] for index, _ in said):  # lists of some rows alone are not the whole map
            return torch.stack([_dense(index, weight, q.shape[2]) for index, weight in said]).sum(0)
    return from_one_hot_values(layer.mix, q, k)


def _dense(index: Tensor, weight: Tensor, tokens: int) -> Tensor:
    """Lists of neighbors and their weights, both (B, H, N, K), as a matrix (B, H, N, N)."""
    return weight.new_zeros(*index.shape[:3], tokens).scatter_add(-1, index.long(), weight)


def from_one_hot_values(mix: Mix, q: Tensor, k: Tensor) -> Tensor:
    """The weights of a `mix` that is linear in its values, from what it makes of one-hot ones: (B, H, N, N).

    Where channels are mixed differently, or with each other, the mean size of the response over the channels.
    """
    n, width = k.shape[2:]
    nothing = mix(q, k, torch.zeros_like(k))

    def response(values: Tensor) -> Tensor:
        return mix(q, k, values.expand_as(k).contiguous()) - nothing

    one_hot = torch.eye(n, dtype=k.dtype, device=k.device)
    # One token a channel: exact, and N / width calls, if each channel is mixed alike and alone. Other values tell whether it is.
    parts = [response(F.pad(columns, (0, width - columns.shape[1])))[..., : columns.shape[1]] for columns in one_hot.split(width, 1)]
    weight = torch.cat(parts, -1)
    control = torch.linspace(1, 2, n, dtype=k.dtype, device=k.device)[:, None]  # (N, 1)
    if torch.allclose((weight @ control).expand_as(k), response(control), rtol=1e-3, atol=1e-4):
        return weight
    return torch.cat([response(column).abs().mean(-1, keepdim=True) for column in one_hot.split(1, 1)], -1)
