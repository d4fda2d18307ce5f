"""A head for `benchmarks/training.py forms`: features less their running mean, as DINO centers its outputs, in place of standardized ones.

python main.py --head centered-attn-knn --plugin benchmarks/centering.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from classifiers import HEADS
from classifiers.neighbor_heads import AttnKnnHead


class Center(nn.Module):
    """Features less the mean of those that training saw lately."""

    mean: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


@HEADS.register("centered-attn-knn")
class CenteredAttnKnn(AttnKnnHead):
    def __init__(self, num_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(num_features, num_classes, **options)
        self.embedder.standardize = Center(num_features)
