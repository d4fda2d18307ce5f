"""Proxies: a learned vector for each class, which teaches embeddings from the first step on (as in NormFace, arXiv 1704.06369)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from classifiers.embedder import unit
from classifiers.losses import nll

TEMPERATURE = 0.1  # of the cosine


class Proxies(nn.Module):
    """Cross-entropy of the softmax over the cosines of an embedding with all proxies. For training alone: no vote looks at them.

    NOTE: a vote teaches by the neighbors that it finds, and those of a fresh backbone are of any class: the first epochs of a ResNet
    pulled rows towards wherever the few right ones were. Proxies move apart at once, and neighbors sort themselves around them.
    """

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(num_classes, dim) / math.sqrt(dim))

    def forward(self, embedding: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The loss of unit vectors (B, D); target: class numbers (B,) or soft (B, C)."""
        cosine = embedding @ unit(self.vectors).T  # (B, C)
        return nll((cosine / TEMPERATURE).log_softmax(1), target, label_smoothing)
