"""Our layers as the class that timm's `attn_layer=` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from layers.base import TokenMixer
from utils import BadOption, Call


def timm_class(call: Call, layer: type[TokenMixer]) -> type[nn.Module]:
    """A class with the constructor of timm's Attention that makes the layer with the options of the call.

    timm says neither the grid nor the number of class tokens: a layer that needs them is given `grid=` and
    `num_prefix_tokens=` as options.
    """

    def __init__(
        self: Any,
        dim: int,
        num_heads: int = 8,
        *,
        attn_head_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[[int], nn.Module] | None = None,
        device: Any = None,
        dtype: Any = None,
        **others: Any,
    ) -> None:
        refused = [name for name, value in {"scale_norm": scale_norm, **others}.items() if value]
        if refused:
            raise BadOption("layer", f"{call.name} does not implement timm's {refused[0]}")
        timm: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_bias": proj_bias, "attention_dropout": attn_drop, "dropout": proj_drop}
        if attn_head_dim is not None:
            timm["head_dim"] = attn_head_dim
        layer.__init__(self, dim, num_heads, qk_norm=norm_layer if qk_norm else None, **{**timm, **call.options})
        self.to(device=device, dtype=dtype)

    body = {"__init__": __init__, "__doc__": layer.__doc__, "__module__": layer.__module__}
    return type(f"Timm{call.name}", (layer,), body)
