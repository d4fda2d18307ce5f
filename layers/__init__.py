"""Token mixers by name: `layers.build("Attention", dim=192, num_heads=3)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from layers.attention import Attention
from layers.base import TokenMixer
from layers.branch import BranchAttention, BranchConv
from layers.convnn import ConvNNAttention
from layers.kvt import KvtAttention
from layers.local import LocalAttention
from layers.neighborhood import NeighborhoodAttention
from layers.sampled_knn import SampledKnnAttention
from layers.sparse import SparseAttention
from layers.timm_layer import timm_class
from utils import BadOption, Call, Registry, check_options, options_of, parse_call

LAYERS: Registry[type[TokenMixer]] = Registry("layer", "layer")
for _layer in (
    Attention,
    ConvNNAttention,
    KvtAttention,
    LocalAttention,
    NeighborhoodAttention,
    SparseAttention,
    SampledKnnAttention,
    BranchConv,
    BranchAttention,
):
    LAYERS.register()(_layer)

CONTEXT = ("grid", "num_prefix_tokens")  # what the model knows and a layer may ask for


def build(
    spec: str | Call,
    *,
    dim: int,
    num_heads: int,
    grid: tuple[int, int] | None = None,
    num_prefix_tokens: int = 0,
    **options: Any,
) -> TokenMixer:
    """A layer from its name or call. Options in the call win over `options`; one the layer does not have is an error.

    `grid` and `num_prefix_tokens` reach only the layers that declare them.
    """
    call = parse_call(spec, "layer") if isinstance(spec, str) else spec
    layer = LAYERS[call.name]
    merged = {**options, **call.options}
    check_options(call.name, layer, merged)
    context = {"grid": grid, "num_prefix_tokens": num_prefix_tokens}
    wanted = {k: v for k, v in context.items() if k in options_of(layer)}
    return layer(dim, num_heads, **{**wanted, **merged})


def check_token_dropout(calls: Iterable[Call], p: float) -> None:
    """What is built for the grid of an image's tokens can't do without some of them."""
    bound = dict.fromkeys(call.name for call in calls if "grid" in options_of(LAYERS[call.name]))
    if p and bound:
        raise BadOption("token_dropout", f"must be 0 with layers that are built for all tokens of the image ({', '.join(bound)})", p)


def pick_options(layer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that the layer has: flags are shared by many layers, each takes its own."""
    known = options_of(LAYERS[layer])
    return {k: v for k, v in options.items() if k in known}


def unused_options(calls: Iterable[Call], names: Iterable[str]) -> list[str]:
    """Those of `names` that none of the layers takes from its surroundings: it has no such option, or its call sets it."""
    used = {name for call in calls for name in options_of(LAYERS[call.name]) if name not in call.options}
    return [name for name in names if name not in used]


def timm_layer(spec: str | Call, **options: Any) -> type[nn.Module]:
    """A class for timm: `timm.create_model("vit_tiny_patch16_224", attn_layer=timm_layer("KvtAttention", K=9))`."""
    call = parse_call(spec, "layer") if isinstance(spec, str) else spec
    merged = {**options, **call.options}
    layer = LAYERS[call.name]
    check_options(call.name, layer, merged)
    return timm_class(Call(call.name, merged), layer)


__all__ = [
    "CONTEXT",
    "LAYERS",
    "Attention",
    "BranchAttention",
    "BranchConv",
    "ConvNNAttention",
    "KvtAttention",
    "LocalAttention",
    "NeighborhoodAttention",
    "SampledKnnAttention",
    "SparseAttention",
    "TokenMixer",
    "build",
    "pick_options",
    "timm_layer",
    "unused_options",
]
