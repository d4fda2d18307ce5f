"""Two ways of mixing side by side: some of the channels through ConvNN, the rest through something else."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from layers.base import count_tokens, head_width
from layers.convnn import ConvNNAttention
from layers.dropout import attention
from layers.functional import say_once
from utils import BadOption, whole_number


class Branch(ConvNNAttention):
    """The fraction `branch_ratio` of each head's channels through ConvNN, the others through `mix_rest`; `proj` joins them.

    Queries, keys and values come from the base's one projection, so 1 is ConvNNAttention and 0 the other layer,
    weight for weight.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, branch_ratio: float = 0.5, head_dim: int | None = None, **convnn: Any) -> None:
        width = head_width(dim, num_heads, head_dim)
        super().__init__(dim, num_heads, channels_for_convnn(branch_ratio, width, num_heads), head_dim=head_dim, **convnn)
        self.rest_dim = width - self.near_dim

    def mix_rest(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the channels do that ConvNN does not get: (B, H, N, rest_dim) to the same."""
        raise NotImplementedError

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = self.near_dim
        parts = []
        if near:
            parts.append(super().mix(q[..., :near], k[..., :near], v[..., :near]))
        if self.rest_dim:
            parts.append(self.mix_rest(q[..., near:], k[..., near:], v[..., near:]))
        return torch.cat(parts, -1)  # (B, H, N, D)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.near_dim} of {self.head_dim} channels a head through ConvNN"


class BranchAttention(Branch):
    """The fraction `branch_ratio` of the channels through ConvNNAttention, the rest through Attention, one linear map after both."""

    def mix_rest(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout=self.attention_dropout)


class BranchConv(Branch):
    """The fraction `branch_ratio` of the channels through ConvNNAttention, the rest through a Conv1d, one linear map after both."""

    def __init__(self, dim: int, num_heads: int = 8, *, kernel_size: int = 9, **branch: Any) -> None:
        super().__init__(dim, num_heads, **branch)
        whole_number("kernel_size", kernel_size, 1)
        if kernel_size % 2 == 0:
            raise BadOption("kernel_size", "must be odd, so that a token sits in the middle", kernel_size)
        self.kernel_size = kernel_size
        self._check_kernel(count_tokens(self.grid, self.num_prefix_tokens))
        # One convolution for all heads, over values; queries and keys have no part in it.
        self.conv1d = nn.Conv1d(self.rest_dim, self.rest_dim, kernel_size, padding="same") if self.rest_dim else None

    def _check_kernel(self, tokens: int | None) -> None:
        if tokens is not None and self.kernel_size > tokens:
            raise BadOption("kernel_size", f"must be at most the number of tokens ({tokens})", self.kernel_size)

    def mix_rest(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._check_kernel(v.shape[2])
        assert self.conv1d is not None
        out = self.conv1d(rearrange(v, "b h n d -> (b h) d n"))
        return rearrange(out, "(b h) d n -> b h n d", h=self.num_heads)


def channels_for_convnn(branch_ratio: float, width: int, num_heads: int) -> int:
    """Channels a head for a fraction of all channels, rounded, and a word where that is not exact."""
    if not isinstance(branch_ratio, (int, float)) or not 0 <= branch_ratio <= 1:
        raise BadOption("branch_ratio", "must be between 0 and 1", branch_ratio)
    exact = branch_ratio * width
    channels = round(exact)
    if abs(exact - channels) > 1e-9:
        say_once(
            f"branch_ratio: {branch_ratio} of {width * num_heads} channels does not divide among {num_heads} heads; "
            f"{channels * num_heads} channels go through ConvNN ({channels / width:.4g})"
        )
    return channels
