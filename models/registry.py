"""Backbones by name, and what each of them may need to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from utils import BadOption, Registry


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
    token_dropout: float = 0.0
    pretrained: str | None = None

    @property
    def image_size(self) -> tuple[int, int]:
        if len(self.shape) != 3:
            raise BadOption("model", "must be one for table rows (mlp; identity for ready-made features) with this data set", self.name)
        return self.shape[1], self.shape[2]

    @property
    def row_size(self) -> int:
        if len(self.shape) != 1:
            raise BadOption("model", "must be one for images (vit, timm/NAME) with this data set", self.name)
        return self.shape[0]


MODELS: Registry[Callable[[ModelSpec], nn.Module]] = Registry("model", "model")
