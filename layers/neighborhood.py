"""Neighborhood attention: a window of K tokens, over the sequence or over the patch grid (arXiv 2204.07143)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from layers import functional as L
from layers.base import count_tokens
from layers.sparse import MaskedAttention
from utils import BadOption, one_of, whole_number


class NeighborhoodAttention(MaskedAttention):
    """A window of K tokens (1-D), or K x K patches (2-D), that moves inside at the borders; NATTEN's semantics.

    Class and register tokens read everything and are read by everything (`prefix="global"`), or are tokens of the
    sequence like any other, as published (`prefix="sequence"`, 1-D only). On CUDA NATTEN computes it, where it is
    installed and takes the shape; elsewhere an exact mask does, with gradients.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        K: int = 9,
        window_dims: int = 1,
        dilation: int = 1,
        prefix: str = "global",
        backend: str = "auto",
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        **base: Any,
    ) -> None:
        super().__init__(dim, num_heads, **base)
        whole_number("K", K, 1)
        whole_number("dilation", dilation, 1)
        one_of("prefix", prefix, ("global", "sequence"))
        one_of("backend", backend, ("auto", "natten", "mask"))
        if backend == "natten" and not _natten_installed():
            raise BadOption("backend", "natten needs an optional package: pip install natten", backend)
        if window_dims not in (1, 2):
            raise BadOption("window_dims", "must be 1 or 2", window_dims)
        if window_dims == 2 and grid is None:
            raise BadOption("window_dims", "needs the token grid, which this model does not give", window_dims)
        if window_dims == 2 and prefix == "sequence" and num_prefix_tokens:
            raise BadOption("prefix", "must be global with window_dims 2: class and register tokens have no place on the grid", prefix)
        self.K, self.window_dims, self.dilation, self.backend, self.grid = K, window_dims, dilation, backend, grid
        self._check_dropout(self.attn_drop.p)
        self.prefix, self.num_prefix_tokens = prefix, num_prefix_tokens if prefix == "global" else 0
        count = count_tokens(grid, num_prefix_tokens)
        if count is not None:
            self.window_shape(count)

    def window_shape(self, tokens: int) -> tuple[int, ...]:
        """The sides of what the window moves over: (patches,) or (rows, columns). Raises if the window does not fit."""
        windowed = tokens - self.num_prefix_tokens
        sides: tuple[int, ...] = (windowed,)
        if self.window_dims == 2 and self.grid is not None:
            sides = self.grid
            if windowed != sides[0] * sides[1]:
                raise BadOption("grid", f"must fit the {tokens} tokens ({self.num_prefix_tokens} of them class and register tokens)", sides)
        side = min(sides)
        what = "number of tokens" if self.window_dims == 1 else "shorter side of the token grid"
        if side < self.K:
            raise BadOption("K", f"must be at most the {what} ({side})", self.K)
        if side < self.K * self.dilation:
            raise BadOption("dilation", f"times K ({self.K}) must be at most the {what} ({side})", self.dilation)
        return sides

    def pattern(self, tokens: int, device: torch.device) -> Tensor:
        sides = self.window_shape(tokens)
        windows = [L.neighborhood_mask(side, self.K, self.dilation, device) for side in sides]
        mask = windows[0]
        if self.window_dims == 2:  # rows and columns within reach: (h, h) and (w, w) to (h * w, h * w)
            mask = (windows[0][:, None, :, None] & windows[1][None, :, None, :]).reshape(sides[0] * sides[1], -1)
        return L.open_to_prefix(mask, self.num_prefix_tokens)

    def _check_dropout(self, p: float) -> None:
        if self.backend == "natten" and p > 0:
            raise BadOption("backend", f"must be auto or mask with attention dropout ({p}): NATTEN drops no weights", self.backend)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.backend == "natten" or (self.backend == "auto" and q.is_cuda and self.natten_takes_it()):
            return self.mix_natten(q, k, v)
        return super().mix(q, k, v)

    def natten_takes_it(self) -> bool:
        """NATTEN has no dropout on weights, wants K of 2 or more and heads of a power of two."""
        power_of_two = self.head_dim >= 8 and self.head_dim & (self.head_dim - 1) == 0
        return self.attention_dropout == 0 and self.K > 1 and power_of_two and _natten_installed()

    def mix_natten(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        import natten

        self._check_dropout(self.attention_dropout)  # a swap brings the model's
        sides, p = self.window_shape(q.shape[2]), self.num_prefix_tokens
        heads_last = [rearrange(t, "b h n d -> b n h d") for t in (q, k, v)]
        patches = [t[:, p:].unflatten(1, sides) for t in heads_last]  # (B, h, w, H, D) or (B, N, H, D)
        attend = natten.na1d if self.window_dims == 1 else natten.na2d
        read_by_all = {"additional_keys": heads_last[1][:, :p], "additional_values": heads_last[2][:, :p]} if p else {}
        out = attend(*patches, kernel_size=self.K, dilation=self.dilation, **read_by_all)
        out = rearrange(out, "b ... h d -> b h (...) d")  # (B, H, patches, D)
        return torch.cat([F.scaled_dot_product_attention(q[:, :, :p], k, v), out], 2) if p else out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, K={self.K}, window_dims={self.window_dims}, dilation={self.dilation}"


def _natten_installed() -> bool:
    try:
        import natten  # noqa: F401
    except ImportError:
        return False
    return True
