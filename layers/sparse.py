"""Sparse attention: dense attention under a fixed pattern."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layers import functional as L
from layers.base import TokenMixer
from layers.dropout import attention
from utils import BadOption, one_of, whole_number


class MaskedAttention(TokenMixer):
    """Softmax attention under a mask that depends on the number of tokens only. Subclasses write `pattern`."""

    def pattern(self, tokens: int, device: torch.device) -> Tensor:
        """True where a row may read a column: (N, N)."""
        raise NotImplementedError

    def mask(self, tokens: int, device: torch.device) -> Tensor:
        """The pattern, made once for each number of tokens."""
        return self.cached((tokens, device), lambda: self.pattern(tokens, device))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.mask(q.shape[2], q.device)  # (N, N)
        return attention(q, k, v, mask=mask, dropout=self.attention_dropout)


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
