"""The layer contract: projections once, here; a layer is its `mix`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from layers import lists
from layers.attention_map import attention_map
from layers.functional import full_precision
from layers.linear import Linear
from layers.norm import faster
from utils import BadOption, whole_number, wrong_return


class TokenMixer(nn.Module):
    """(B, N, C) to (B, N, C), in the place of self-attention. Subclasses write `mix(q, k, v)`.

    Parameter names are timm's (`qkv.weight`, `proj.weight`, `q_norm.*`), so pretrained weights load into every layer.
    Options are keyword-only; a subclass adds its own before `**base` and the registry reads them from the signature.
    A layer that needs the token grid declares the options `grid` and `num_prefix_tokens`: (h, w) patches that follow
    so many class and register tokens. Who builds the layer fills them in.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        proj_bias: bool = False,
        qk_norm: Callable[[int], nn.Module] | None = None,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for option, p in (("dropout", dropout), ("attention_dropout", attention_dropout)):
            if not 0 <= p < 1:
                raise BadOption(option, "must be at least 0 and below 1", p)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_width(dim, num_heads, head_dim)
        self.scale = self.head_dim**-0.5
        inner = num_heads * self.head_dim
        self.qkv = Linear(dim, 3 * inner, bias=qkv_bias)
        self.q_norm = faster(qk_norm(self.head_dim)) if qk_norm else nn.Identity()
        self.k_norm = faster(qk_norm(self.head_dim)) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attention_dropout)
        self.norm = nn.Identity()  # of the output, before `proj`; a model whose attention was swapped may bring a real one
        self.proj = Linear(inner, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(dropout)
        self._cache: dict[Any, Any] = {}

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries, keys and values, each (B, H, N, D), to outputs (B, H, N, D)."""
        raise NotImplementedError

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(f"{type(self).__name__} chooses its own neighbors and takes no attention mask")
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        out = self.mix(self.q_norm(q), self.k_norm(k), v)  # (B, H, N, D)
        if not isinstance(out, Tensor) or out.shape != v.shape:
            raise wrong_return(self.mix, f"a tensor (B, H, N, D), here {tuple(v.shape)}", out)
        return self.proj_drop(self.proj(self.norm(rearrange(out, "b h n d -> b n (h d)"))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, K: int, scale: float, *, drop: bool = True, **options: Any) -> lists.Attended:
        """Attention over lists of K neighbors (options: see lists.attend), with this layer's dropout of weights if `drop`."""
        keep = None
        if drop and self.attention_dropout:
            keep = self.attn_drop(q.new_ones(*q.shape[:3], K, dtype=torch.float32))
        return lists.attend(full_precision(q), full_precision(k), full_precision(v), K, scale, keep=keep, **options)

    def attention_map(self, q: Tensor, k: Tensor) -> Tensor:
        """How much each token (row) reads of each other (column), in eval(): (B, H, N, N). `mix` tells: no layer has to."""
        return attention_map(self, q, k)

    @property
    def attention_dropout(self) -> float:
        """The dropout that applies now: none in eval()."""
        return self.attn_drop.p if self.training else 0.0

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """A mask or a list of tokens that depends on nothing but `key` (the number of tokens, the device)."""
        found = self._cache.get(key, self)
        if found is self:
            found = make()
            # NOTE what is made in inference mode could not serve a training step later; what is made in a graph stays in it
            if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
                self._cache[key] = found
        return found

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"


def head_width(dim: int, num_heads: int, head_dim: int | None = None) -> int:
    """Channels a head: `dim` divided evenly unless said otherwise."""
    whole_number("num_heads", num_heads, 1)
    if head_dim is not None:
        whole_number("head_dim", head_dim, 1)
        return head_dim
    if dim % num_heads:
        raise BadOption("d_hidden", f"must be divisible by num_heads ({num_heads})", dim)
    return dim // num_heads


def check_neighbors(K: int, tokens: int | None) -> None:
    """K neighbors out of so many tokens; None where the number is not known yet: the first forward checks then."""
    whole_number("K", K, 1)
    if tokens is not None and tokens < K:
        raise BadOption("K", f"must be at most the number of candidate tokens ({tokens})", K)


def count_tokens(grid: tuple[int, int] | None, num_prefix_tokens: int) -> int | None:
    """How many tokens the layer will see, if it was told the grid."""
    whole_number("num_prefix_tokens", num_prefix_tokens, 0)
    sides = grid if isinstance(grid, tuple | list) else ()
    if grid is not None and (len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides)):
        raise BadOption("grid", "must be (rows, columns), whole numbers of at least 1", grid)
    return None if grid is None else grid[0] * grid[1] + num_prefix_tokens
