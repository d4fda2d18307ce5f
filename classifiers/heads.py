"""Heads: features to a loss in training and to log-probabilities in evaluation. The loop calls all of them alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from classifiers.bank import Bank
from classifiers.predictors import HeadPredictor, Predictor
from classifiers.retrieved import Retrieved
from layers.functional import full_precision
from utils import Registry


class Head(nn.Module):
    """The head contract.

    `loss(features, target, index)` gives named terms, whose sum is minimized. target: class numbers (B,) or soft targets (B, C).
    index: row numbers in the training split, (B,) or (B, 2) for mixed rows; a head that looks at neighbors excludes them.
    `forward(features)` gives log-probabilities. A head that looks at neighbors sets `wants_bank` and has
    `embed(features)`: the loop hands a bank of the embeddings of all training rows to `refresh(bank)`, with the row numbers as ids.
    """

    wants_bank = False
    learned = False  # whether it has an attention over neighbors that training teaches
    bank: Bank | None = None
    bank_options: Mapping[str, Any] = {}
    shard_bank = False  # whether of several processes each keeps a part of it

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def embed(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def refresh(self, bank: Bank) -> None:
        """A head without a bank has nothing to refresh."""

    def retrieve(self, features: Tensor, k: int | None = None) -> Retrieved:
        """What the head's predictor looks at: of a head without a bank, the features alone."""
        return Retrieved.without_neighbors(features)

    def as_predictor(self, num_classes: int) -> Predictor:
        """The head's answer in two steps, scores and confidence."""
        return HeadPredictor(self, num_classes)

    def part_of(self, name: str) -> str:
        """The group of one of its parameters, for a learning rate of its own: head, projection or attention."""
        return "head"


HEADS: Registry[type[Head]] = Registry("head", "head")


@HEADS.register("linear")
class LinearHead(Head):
    """One linear layer; cross-entropy, or squared error to the one-hot label (arXiv 2006.07322)."""

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        criterion: str = "CrossEntropy",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features, num_classes)
        nn.init.trunc_normal_(self.fc.weight, std=0.02)
        nn.init.zeros_(self.fc.bias)
        self.criterion, self.label_smoothing = criterion, label_smoothing

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        logits = full_precision(self.fc(features))
        if self.criterion == "CrossEntropy":
            return {"cross_entropy": F.cross_entropy(logits, target, label_smoothing=self.label_smoothing)}
        soft = target if target.ndim == 2 else F.one_hot(target, logits.shape[1]).to(logits.dtype)
        return {"squared_error": F.mse_loss(logits, soft * (1 - self.label_smoothing) + self.label_smoothing / logits.shape[1])}

    def forward(self, features: Tensor) -> Tensor:
        return F.log_softmax(full_precision(self.fc(features)), 1)
