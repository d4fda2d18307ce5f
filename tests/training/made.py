"""A small classifier, small batches and a state of training, for the tests of the loop and of its parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classifiers import Head, LinearHead
from classifiers.classifier import Classifier
from config import Config
from inputs.batches import Batches
from inputs.rows import Data, Split
from run.complete import with_defaults
from training.state import TrainingState

CPU = torch.device("cpu")
FEATURES, CLASSES = 5, 3


def configured(**given: Any) -> Config:
    plain: dict[str, Any] = dict(optimizer="sgd", momentum=0.0, lr=0.1, weight_decay=0.0, scheduler="none", warmup_epochs=0)
    return Config.of(with_defaults({"dataset": "made", "clip_grad_norm": 0.0, **plain, **given}, (FEATURES,), {"train": 31}))


def table(rows: int, seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    split = Split(rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, rows))
    return Data("made", "table", (FEATURES,), tuple("abc"), split, split, split, True, {"mean": [], "std": [], "levels": []})


def batches(rows: int, size: int, *, shuffled: bool = False) -> Batches:
    data = table(rows)
    return Batches(data.train, data, batch_size=size, device=CPU, train=shuffled)


class Backbone(nn.Module):
    """A matrix, a norm and a class token: one of each kind of parameter."""

    num_features = 7

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, 7)
        self.norm = nn.LayerNorm(7)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.fc(x))) + self.cls_token[0]


def classifier(backbone: nn.Module | None = None, head: Head | None = None, **given: Any) -> Classifier:
    torch.manual_seed(3)
    return Classifier(backbone or Backbone(), head or LinearHead(7, CLASSES), CLASSES, {"config": {}}, **given)


def state(model: Classifier | None = None, per_epoch: int = 10, **given: Any) -> TrainingState:
    return TrainingState(configured(**given), model or classifier(), per_epoch, CPU)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


class Rooted(Backbone):
    """Its loss is finite and its gradient is not: the root of zero."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        features = super().forward(x)
        return features + (self.cls_token * 0).sum().sqrt() if self.armed else features


class Watching(LinearHead):
    """Notes what the loop hands over."""

    def __init__(self) -> None:
        super().__init__(7, CLASSES)
        self.seen: list[tuple[torch.dtype, Tensor, Tensor]] = []

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.seen.append((features.dtype, target, index))
        return {**super().loss(features, target, index), "extra": features.new_tensor(2.0)}
