"""Continual: test rows join the bank with their labels, once they were classified."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from classifiers.bank import Bank
from classifiers.neighbor_heads import NeighborHead
from classifiers.predictors import Predictor
from training.bank import order_in_bank

BLOCK = 100  # test rows that join the bank at once


@dataclass(frozen=True)
class Growth:
    """What bounds the bank that grows. `seed` orders the rows that a smaller cap lets go."""

    cap: int | None
    evict: str | None  # None: as the bank that was there
    seed: int

    def copy_of(self, bank: Bank) -> Bank:
        """A bank that may change, with this cap."""
        evict = self.evict or bank.evict
        if (self.cap, evict) == (bank.cap, bank.evict):
            return copy.deepcopy(bank)
        copied = Bank(bank.dim, kind=bank.kind, cap=self.cap, evict=evict)
        order = order_in_bank(len(bank), self.seed)
        copied.add(bank.embeddings[order], bank.labels[order], bank.ids[order])
        return copied


def predict_while_growing(
    predictor: Predictor, retriever: NeighborHead, growth: Growth, features: Tensor, target: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Log-probabilities of the rows in their order: each block is classified, then joins the bank, whose eviction makes room for it."""
    assert retriever.bank is not None
    static, parts = retriever.bank, []
    growing = growth.copy_of(static)
    try:
        for block, labels in zip(features.split(BLOCK), target.split(BLOCK), strict=True):
            retriever.use(growing)
            with torch.no_grad():
                retrieved = retriever.retrieve(block)
            parts.append(predictor.predict(retrieved))
            growing.add(retrieved.embedding, labels)
    finally:
        retriever.use(static)
    return torch.cat(parts), {"block": BLOCK, "bank_before": len(static), "bank": len(growing)}
