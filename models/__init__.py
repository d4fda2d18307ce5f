"""Backbones by name: images or table rows to a feature vector (B, num_features)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import layers
from models.mlp import TableMlp
from models.vit import VisionTransformer
from utils import BadOption, Registry, options_of, parse_pattern, say


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a backbone may need to know. `shape` is one input: (channels, height, width), or (features,)."""

    name: str
    shape: tuple[int, ...]
    num_classes: int
    layer: str = "Attention"
    layer_options: Mapping[str, Any] = field(default_factory=dict)  # only those that were asked for
    patch_size: int = 16
    depth: int = 12
    dim: int = 192
    num_heads: int = 3
    d_mlp: int = 768
    dropout: float = 0.0
    attention_dropout: float = 0.0
    pretrained: str | None = None

    @property
    def image_size(self) -> tuple[int, int]:
        if len(self.shape) != 3:
            raise BadOption("model", "must be one for table rows (mlp; identity for ready-made features) with this data set", self.name)
        return self.shape[1], self.shape[2]


MODELS: Registry[Callable[[ModelSpec], nn.Module]] = Registry("model", "model")


def build(spec: ModelSpec) -> nn.Module:
    """The backbone that a spec names: a module with `num_features`, images or rows to features."""
    if spec.name.startswith("timm/"):
        from models.backbones import timm_backbone

        return timm_backbone(spec)
    return MODELS[spec.name](spec)


def check_layers(spec: ModelSpec) -> None:
    """Names the layer options that no chosen layer has, in one line: sweeps change the layer and keep the rest."""
    calls = parse_pattern(spec.layer, spec.depth, "layer")
    known = {option for call in calls for option in options_of(layers.LAYERS[call.name])}
    if unused := [f"--{option}" for option in spec.layer_options if option not in known]:
        say(f"unused by {' and '.join(dict.fromkeys(c.name for c in calls))}: {', '.join(unused)}")


@MODELS.register("vit")
def paper_vit(spec: ModelSpec) -> nn.Module:
    """The ViT of the ConvNN paper: patch convolution + LayerNorm, class token, fixed sinusoidal positions, pre-norm blocks."""
    image_size = spec.image_size
    check_layers(spec)
    calls = parse_pattern(spec.layer, spec.depth, "layer")
    options = {**spec.layer_options, "dropout": spec.dropout, "attention_dropout": spec.attention_dropout}

    def make_layer(block: int, grid: tuple[int, int], num_prefix_tokens: int) -> layers.TokenMixer:
        own = layers.pick_options(calls[block].name, options)
        return layers.build(calls[block], dim=spec.dim, num_heads=spec.num_heads, grid=grid, num_prefix_tokens=num_prefix_tokens, **own)

    model = VisionTransformer(
        make_layer,
        image_size=image_size,
        channels=spec.shape[0],
        patch_size=spec.patch_size,
        depth=spec.depth,
        dim=spec.dim,
        d_mlp=spec.d_mlp,
        dropout=spec.dropout,
    )
    return _with_weights(model, spec.pretrained)


@MODELS.register("mlp")
def table_mlp(spec: ModelSpec) -> nn.Module:
    """Residual MLP for table rows and ready-made features."""
    if len(spec.shape) != 1:
        raise BadOption("model", "must be one for images (vit, timm/NAME) with this data set", spec.name)
    model = TableMlp(spec.shape[0], depth=spec.depth, dim=spec.dim, d_mlp=spec.d_mlp, dropout=spec.dropout)
    return _with_weights(model, spec.pretrained)


@MODELS.register("identity")
def identity(spec: ModelSpec) -> nn.Module:
    """Nothing: the rows of an npz are features already."""
    if len(spec.shape) != 1:
        raise BadOption("model", "must be one for images (vit, timm/NAME) with this data set", spec.name)
    if spec.pretrained:
        raise BadOption("pretrained", "has nowhere to go: the model identity has no weights", spec.pretrained)
    model = nn.Identity()
    model.num_features = spec.shape[0]  # type: ignore[assignment]
    return model


def _with_weights(model: nn.Module, pretrained: str | None) -> nn.Module:
    if pretrained == "hub":
        raise BadOption("pretrained", "hub has weights for timm/NAME models only; give FILE.safetensors", pretrained)
    if pretrained:
        from models.backbones import load_matching

        load_matching(model, pretrained)
    return model


__all__ = ["MODELS", "ModelSpec", "TableMlp", "VisionTransformer", "build", "check_layers"]
