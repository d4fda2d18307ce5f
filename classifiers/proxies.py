"""Proxies: a learned vector for each class, which teaches a backbone from the first step on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from classifiers.losses import nll
from layers.functional import full_precision


class Proxies(nn.Module):
    """Cross-entropy of the softmax over the products of features with all proxies: a linear layer that no prediction looks at.

    NOTE: a vote teaches by the neighbors that it finds, and those of a fresh backbone are of any class: the first epochs of a ResNet
    pulled rows towards wherever the few right ones were. Proxies move apart at once, and neighbors sort themselves around them. They
    stand at the features, for behind a projection they taught the backbone less; and are products, because cosines taught it more slowly.
    """

    def __init__(self, num_classes: int, num_features: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(nn.init.trunc_normal_(torch.empty(num_classes, num_features), std=0.02))

    def forward(self, features: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The loss of features (B, F); target: class numbers (B,) or soft (B, C)."""
        with torch.autocast(features.device.type, enabled=False):
            logits = full_precision(features) @ self.vectors.T  # (B, C)
        return nll(logits.log_softmax(1), target, label_smoothing)
