"""Backbones by name: images or table rows to a feature vector (B, num_features)."""

from __future__ import annotations

from torch import nn

from models.mlp import TableMlp
from models.registry import MODELS, ModelSpec
from models.vit import VisionTransformer


def build(spec: ModelSpec) -> nn.Module:
    """The backbone that a spec names: a module with `num_features`, images or rows to features."""
    if spec.name.startswith("timm/"):
        from models.backbones import timm_backbone  # late: timm takes longer to load than all of the toolkit

        return timm_backbone(spec)
    return MODELS[spec.name](spec)


__all__ = ["MODELS", "ModelSpec", "TableMlp", "VisionTransformer", "build"]
