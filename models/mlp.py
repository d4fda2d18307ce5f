"""Backbones for table rows and ready-made features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.registry import MODELS, ModelSpec
from models.vit import Mlp
from models.weights import with_weights
from utils import BadOption


class TableMlp(nn.Module):
    """Residual MLP blocks over a linear embedding of the row: (B, F) to (B, dim)."""

    def __init__(self, num_inputs: int, *, depth: int = 2, dim: int = 128, d_mlp: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_features = dim
        self.embed = nn.Linear(num_inputs, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), Mlp(dim, d_mlp, dropout)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return torch.relu(self.norm(x))


@MODELS.register("mlp")
def table_mlp(spec: ModelSpec) -> nn.Module:
    """Residual MLP for table rows and ready-made features."""
    model = TableMlp(spec.row_size, depth=spec.depth, dim=spec.dim, d_mlp=spec.d_mlp, dropout=spec.dropout)
    return with_weights(model, spec.pretrained)


@MODELS.register("identity")
def identity(spec: ModelSpec) -> nn.Module:
    """Nothing: the rows of an npz are features already."""
    num_features = spec.row_size
    if spec.pretrained:
        raise BadOption("pretrained", "has nowhere to go: the model identity has no weights", spec.pretrained)
    model = nn.Identity()
    model.num_features = num_features  # type: ignore[assignment]
    return model
