"""kNN attention with a sampled remainder (arXiv 2411.04013)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layers import functional as L
from layers import kernels
from layers.base import TokenMixer, check_neighbors, count_tokens
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

    def sampled(self, index: Tensor) -> Tensor:
        """Tokens outside each row's top K, (B, H, N, samples), from the draw of places among the others."""
        b, _, n, _ = index.shape
        device = index.device
        places = self.draw(n, device) if self.training else self.cached((n, device), lambda: self.draw(n, device))
        # The u-th of the others comes after as many of the top K as have at most u others before them.
        others_before = index.sort().values - torch.arange(self.K, device=device)  # (B, H, N, K)
        places = places.expand(b, -1, -1, -1).contiguous()
        return places + kernels.up_to(others_before, places)

    def lists(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Top K and sample (B, H, N, K + samples), and the logarithm of how many tokens each rank stands for."""
        n = q.shape[2]
        _, index = L.nearest(q.detach(), k.detach(), self.K)
        if n == self.K:
            return index, q.new_zeros(self.K)
        sample = self.sampled(index)
        log_count = q.new_zeros(self.K + sample.shape[-1])
        log_count[self.K :] = math.log((n - self.K) / sample.shape[-1])
        return torch.cat([index, sample], -1), log_count

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_neighbors(self.K, q.shape[2])
        q, k = L.full_precision(q), L.full_precision(k)
        index, log_count = self.lists(q, k)
        return self.attend(q, k, v, len(log_count), self.scale, index=index, bias=log_count).out.to(v.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, K={self.K}, num_samples={self.num_samples}"
