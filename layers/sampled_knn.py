"""kNN attention with a sampled remainder (arXiv 2411.04013)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layers import functional as L
from layers.base import TokenMixer, check_neighbors, count_tokens
from layers.lists import Attended
from utils import whole_number


class SampledKnnAttention(TokenMixer):
    """The top K exactly, and a uniform sample of the other tokens that stands for all of them.

    A sampled token weighs (N - K) / num_samples times its exponential in the softmax's numerator and denominator, so the
    estimate is consistent where leaving the others out is biased. With num_samples >= N - K it is plain attention.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        K: int = 9,
        num_samples: int = 8,
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        **base: Any,
    ) -> None:
        super().__init__(dim, num_heads, **base)
        check_neighbors(K, count_tokens(grid, num_prefix_tokens))
        whole_number("num_samples", num_samples, 1)
        self.K, self.num_samples = K, num_samples

    def draw(self, tokens: int, device: torch.device) -> Tensor:
        """Which of the N - K others, by their place among them: (H, N, samples), no place twice in a row.

        One permutation for all rows, turned by an amount of its own in each: cheap, and every set of places is as likely.
        """
        others, heads = tokens - self.K, self.num_heads
        samples = min(self.num_samples, others)
        if self.training:
            places = torch.randperm(others, device=device)[:samples]
            turns = torch.randint(others, (heads, tokens, 1), device=device)
            return (places + turns) % others
        places = L.scrambled(others, device).argsort()[:samples]
        turns = L.scrambled(heads * tokens, device).view(heads, tokens, 1)
        return (places + turns) % others

    def sample(self, q: Tensor) -> tuple[Tensor | None, Tensor]:
        """The draw, None where there are no others; and the logarithm of how many tokens each of a row's list stands for."""
        tokens, device = q.shape[2], q.device
        samples = min(self.num_samples, tokens - self.K)

        def log_count() -> Tensor:
            counts = L.full_precision(q.new_zeros(self.K + samples))
            counts[self.K :] = math.log((tokens - self.K) / samples) if samples else 0.0
            return counts

        counts = self.cached(("counts", tokens, q.dtype, device), log_count)
        if not samples:
            return None, counts
        return self.draw(tokens, device) if self.training else self.cached((tokens, device), lambda: self.draw(tokens, device)), counts

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Over lists of the K nearest, then the sample."""
        places, log_count = self.sample(q)
        return self.attend(q, k, v, len(log_count), self.scale, bias=log_count, places=places)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_neighbors(self.K, q.shape[2])
        return self.attended(q, k, v).out.to(v.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, K={self.K}, num_samples={self.num_samples}"
