"""Attn-KNN for scikit-learn users: `NeighborClassifier()` where `KNeighborsClassifier()` stood.

    from classifiers.sklearn import NeighborClassifier
    NeighborClassifier(n_neighbors=16).fit(features, y).predict_proba(others)

It learns an embedding of the features and an attention over the nearest training rows, each left out of its own neighbors, and fits
confidence to rows that it held out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from classifiers.bank import Bank
from classifiers.calibration import calibrate
from classifiers.neighbor_heads import AttnKnnHead
from dataset import stratified
from inputs.copies import first_copies
from utils import whole_number

FEWEST_HELD = 10  # rows; fewer tell nothing of confidence


class NeighborClassifier(ClassifierMixin, BaseEstimator):
    """A vote of the nearest training rows, by weights that an attention learns.

    n_neighbors: rows that vote. embed_dim: numbers of an embedding; 0 takes the features as they are, at length 1. epochs, batch_size,
    learning_rate: of the training of both. validation_fraction: rows that training does not see and confidence is fitted to (none
    where they would be fewer than ten); they vote afterwards. random_state: weights, order and which rows are held out.
    """

    def __init__(
        self,
        n_neighbors: int = 16,
        *,
        embed_dim: int = 64,
        attention_heads: int = 4,
        epochs: int = 30,
        batch_size: int = 128,
        learning_rate: float = 3e-3,
        contrastive_weight: float = 0.5,
        proxy_weight: float = 1.0,
        validation_fraction: float = 0.15,
        random_state: Any = None,
    ) -> None:
        self.n_neighbors, self.embed_dim, self.attention_heads = n_neighbors, embed_dim, attention_heads
        self.epochs, self.batch_size, self.learning_rate = epochs, batch_size, learning_rate
        self.contrastive_weight, self.proxy_weight = contrastive_weight, proxy_weight
        self.validation_fraction, self.random_state = validation_fraction, random_state

    # ------------------------------------------------ learning

    def fit(self, X: Any, y: Any) -> NeighborClassifier:
        X, y = validate_data(self, X, y, dtype=np.float32, order="C", copy=True)
        check_classification_targets(y)
        for name in ("n_neighbors", "epochs", "batch_size", "attention_heads"):
            whole_number(name, getattr(self, name), 1)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"needs rows of at least two classes, got 1 class ({self.classes_[0]!r})")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        labels = labels.reshape(-1).astype(np.int64)
        held = stratified(labels, self.validation_fraction, seed) if self.validation_fraction else np.empty(0, np.int64)
        held = held if len(held) >= FEWEST_HELD else held[:0]
        rows = np.setdiff1d(np.arange(len(X)), held)
        (copies,) = first_copies(X) or (None,)
        self._copies = None if copies is None or (copies == np.arange(len(X))).all() else copies
        x, target = torch.from_numpy(X), torch.from_numpy(labels)
        with torch.random.fork_rng():  # their generator stays theirs
            torch.manual_seed(seed)
            self._train(x, target, torch.from_numpy(rows))
            self.predictor_ = self.head_.predictor
            if len(held):
                found = self.head_.retrieve(x[torch.from_numpy(held)])
                self.predictor_ = calibrate(self.predictor_, found, target[torch.from_numpy(held)], "head", seed)
        self._build_bank(x, target, torch.arange(len(x)))
        return self

    def _train(self, x: Tensor, target: Tensor, rows: Tensor) -> None:
        """The head on `rows`, its bank built anew in every epoch."""
        k, width = min(self.n_neighbors, len(rows)), self.embed_dim or x.shape[1]
        heads = math.gcd(self.attention_heads, width)  # features as they are may be of any number
        self.head_ = AttnKnnHead(
            x.shape[1],
            len(self.classes_),
            embed_dim=self.embed_dim,
            attention_heads=heads,
            k_train=k,
            contrastive_weight=self.contrastive_weight if self.embed_dim else 0.0,
            proxy_weight=self.proxy_weight if self.embed_dim else 0.0,
        )
        self._standardize(x[rows])
        optimizer = torch.optim.AdamW([p for p in self.head_.parameters() if p.requires_grad], self.learning_rate, weight_decay=1e-4)
        steps = self.epochs * math.ceil(len(rows) / self.batch_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(self.epochs):
            self._build_bank(x, target, rows)
            self.head_.train()
            self.head_.embedder.standardize.eval()
            for batch in rows[torch.randperm(len(rows))].split(self.batch_size):
                loss = torch.stack(list(self.head_.loss(x[batch], target[batch], batch).values())).sum()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.head_.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        self._build_bank(x, target, rows)

    def _standardize(self, x: Tensor) -> None:
        """NOTE: set once, of all rows. Features do not move, and the mean of a batch would move the queries away from the bank."""
        statistics: Any = self.head_.embedder.standardize
        statistics.running_mean.copy_(x.mean(0))
        variance = x.var(0, unbiased=False)
        statistics.running_var.copy_(torch.where(variance > 1e-12 * x.mean(0).square().clamp_min(1), variance, 1.0))

    @torch.no_grad()
    def _build_bank(self, x: Tensor, target: Tensor, rows: Tensor) -> None:
        self.head_.eval()
        bank = Bank(self.head_.embedder.dim, copies=self._copies)
        bank.add(self.head_.embed(x[rows]), target[rows], rows)
        self.head_.refresh(bank)

    # ------------------------------------------------ answering

    def _read(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.from_numpy(validate_data(self, X, dtype=np.float32, order="C", copy=True, reset=False))

    @torch.no_grad()
    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, classes), in the order of `classes_`."""
        x = self._read(X)
        found: np.ndarray = self.predictor_.predict(self.head_.retrieve(x)).exp().numpy()
        return found

    def predict(self, X: Any) -> np.ndarray:
        best = self.predict_proba(X).argmax(1)
        found: np.ndarray = self.classes_[best]
        return found

    @torch.no_grad()
    def kneighbors(self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True) -> Any:
        """Distances between embeddings, and numbers of the training rows, the nearest first; without X, of the training rows, none of
        which is its own neighbor."""
        check_is_fitted(self)
        bank = self.head_.bank
        assert bank is not None
        embedding, exclude = (bank.embeddings, bank.ids) if X is None else (self.head_.embed(self._read(X)), None)
        asked = self.head_.k if n_neighbors is None else n_neighbors
        k = whole_number("n_neighbors", asked, 1, len(bank) - (X is None))
        found = self.head_.search(embedding, k, exclude)
        index: np.ndarray = found.index.numpy()
        return (found.distance.clamp_min(0).sqrt().numpy(), index) if return_distance else index
