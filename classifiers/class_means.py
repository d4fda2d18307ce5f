"""The mean embedding of each class in a bank, as a query sees it: without itself."""

from __future__ import annotations

import torch
from torch import Tensor

from classifiers.bank import Bank


class ClassMeans:
    """Sums of the embeddings of each class; only directions count, so that no division is needed."""

    def __init__(self, bank: Bank, num_classes: int) -> None:
        self.bank = bank
        self.sums = bank.class_sums(num_classes)

    @torch.no_grad()
    def cosine(self, embedding: Tensor, exclude: Tensor | None = None) -> Tensor:
        """Cosine of each embedding (B, D) with the mean of each class (B, C), without the rows whose ids `exclude` names: (B,) or
        (B, M). 0 for a class without rows."""
        sums = self.sums.to(embedding)
        dots = embedding @ sums.T  # (B, C)
        squares = sums.square().sum(1).expand_as(dots).clone()
        if exclude is not None:
            exclude = exclude[:, None] if exclude.ndim == 1 else exclude
            rows, label, mask = self.bank.take(exclude)  # (B, M, D), (B, M)
            again = (exclude[:, :, None] == exclude[:, None]).tril(-1).any(2)  # a row mixed with itself is left out once
            mask = mask & ~again.to(mask.device)
            rows = rows.to(sums).masked_fill(~mask[..., None], 0)
            dots.scatter_add_(1, label, -(rows @ embedding[:, :, None])[..., 0])
            # |S - a - b|^2 = |S|^2 - 2 S.(a + b) + |a + b|^2, for the rows of one class
            together = (label[:, :, None] == label[:, None]).to(rows.dtype)  # (B, M, M)
            squares.scatter_add_(1, label, -2 * (sums[label] * rows).sum(2) + (rows @ rows.transpose(1, 2) * together).sum(2))
        length = squares.clamp_min(0).sqrt()
        return torch.where(length > 1e-4, dots / length.clamp_min(1e-4), 0)
