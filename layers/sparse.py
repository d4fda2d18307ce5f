"""Sparse attention: dense attention under a fixed pattern."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from layers import functional as L
from layers.base import TokenMixer
from layers.compiled import native
from layers.dropout import attention
from utils import BadOption, one_of, whole_number

FEW = 6  # a row whose list is shorter than a sixth of the tokens is faster to gather than to compute densely under a mask


class Listed(NamedTuple):
    """A pattern as lists of columns, for all rows but the first `dense` ones (class tokens, which read everything)."""

    dense: torch.Tensor  # (dense, N), the mask of these
    lists: Tensor  # (N - dense, K); the row itself fills up short lists
    bias: Tensor  # (N - dense, K): -inf where it does


def listed(mask: Tensor) -> Listed | None:
    """None for a pattern whose rows read too much."""
    few = FEW * mask.sum(1) <= len(mask)
    first = int((~few).sum())
    if not few[first:].any() or few[:first].any():
        return None
    row, column = mask[first:].nonzero(as_tuple=True)
    count = mask[first:].sum(1)  # (N - dense,)
    rank = torch.arange(len(row), device=mask.device) - (count.cumsum(0) - count)[row]
    index = torch.arange(first, len(mask), device=mask.device)[:, None].repeat(1, int(count.max()))
    bias = torch.full(index.shape, -torch.inf, device=mask.device)
    index[row, rank], bias[row, rank] = column, 0.0
    return Listed(mask[:first], index, bias)


class MaskedAttention(TokenMixer):
    """Softmax attention under a mask that depends on the number of tokens only. Subclasses write `pattern`."""

    def pattern(self, tokens: int, device: torch.device) -> Tensor:
        """True where a row may read a column: (N, N)."""
        raise NotImplementedError

    def mask(self, tokens: int, device: torch.device) -> Tensor:
        """The pattern, made once for each number of tokens."""
        return self.cached((tokens, device), lambda: self.pattern(tokens, device))

    def lists(self, tokens: int, device: torch.device) -> Listed | None:
        return self.cached(("lists", tokens, device), lambda: listed(self.pattern(tokens, device)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, p = q.shape[2], self.attention_dropout
        lists = self.lists(n, q.device) if not torch.compiler.is_compiling() and native.takes(q, k, v) else None
        if lists is None:
            return attention(q, k, v, mask=self.mask(n, q.device), dropout=p)
        dense, index, bias = lists
        near = self.attend(q[:, :, len(dense) :], k, v, index.shape[1], self.scale, index=index, bias=bias).out
        if not len(dense):
            return near
        return torch.cat([attention(q[:, :, : len(dense)], k, v, mask=dense, dropout=p), near], 2)


class SparseAttention(MaskedAttention):
    """Attention over all tokens, over a local window, or over every n-th token (strided)."""

    def __init__(self, dim: int, num_heads: int = 8, *, sparse_mode: str = "local", sparse_context_window: int = 49, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        one_of("sparse_mode", sparse_mode, ("all", "local", "strided"))
        whole_number("sparse_context_window", sparse_context_window, 1)
        self.sparse_mode, self.sparse_context_window = sparse_mode, sparse_context_window

    def pattern(self, tokens: int, device: torch.device) -> Tensor:
        if self.sparse_mode == "all":
            return torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        if self.sparse_mode == "strided" and tokens > 1 and self.sparse_context_window >= tokens:
            rule = f"must be below the number of tokens ({tokens}) with --sparse_mode strided: no token would see another one"
            raise BadOption("sparse_context_window", rule, self.sparse_context_window)
        pattern = L.local_mask if self.sparse_mode == "local" else L.strided_mask
        return pattern(tokens, self.sparse_context_window, device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparse_mode={self.sparse_mode}, sparse_context_window={self.sparse_context_window}"
