"""k-NN attention of vision transformers, KVT (arXiv 2106.00515)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layers.base import TokenMixer, check_neighbors, count_tokens


class KvtAttention(TokenMixer):
    """The K largest logits of a token survive; softmax over them."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        K: int = 9,
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        **base: Any,
    ) -> None:
        super().__init__(dim, num_heads, **base)
        check_neighbors(K, count_tokens(grid, num_prefix_tokens))
        self.K = K

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_neighbors(self.K, q.shape[2])
        return self.attend(q, k, v, self.K, self.scale).out.to(v.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, K={self.K}"
