"""The bank's answers by brute force in float64."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from classifiers.bank import Bank, Neighbors
from classifiers.index import MISSING


def brute_force(bank: Bank, queries: torch.Tensor, k: int, exclude: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ids (-1 where there is none) and distances, in float64, equal distances by id."""
    rows, ids, q = bank.embeddings.double().numpy(), bank.ids.numpy(), queries.double().cpu().numpy()
    # NOTE: not a product of matrices, which rounds equal rows differently by where they stand.
    distance = np.stack([-(row * rows).sum(1) if bank.kind == "ip" else ((row - rows) ** 2).sum(1) for row in q])
    found, at = np.full((len(q), k), -1), np.full((len(q), k), np.inf)
    for i in range(len(q)):
        banned = set() if exclude is None else set(np.atleast_1d(exclude[i].numpy()).tolist())
        order = [j for j in np.lexsort((ids, distance[i])) if ids[j] not in banned][:k]
        found[i, : len(order)], at[i, : len(order)] = ids[order], distance[i][order]
    return found, at


def assert_exact(bank: Bank, queries: torch.Tensor, k: int, exclude: torch.Tensor | None = None) -> Neighbors:
    """Same ids wherever the float64 distances differ by more than float32 rounding; labels and embeddings are those of the ids."""
    found = bank.search(queries, k, exclude)
    ids, distance = brute_force(bank, queries, k, exclude)
    assert found.index.shape == found.label.shape == found.mask.shape == found.distance.shape == (len(queries), k)
    assert found.embedding.shape == (len(queries), k, bank.dim)
    there = ids >= 0
    assert (found.mask.numpy() == there).all()
    scale = np.abs(distance[there]).max(initial=1e-30)
    error = np.abs(found.distance.numpy()[there] - distance[there])
    assert (error <= 1e-6 * scale + 1e-6 * np.abs(distance[there])).all(), (error.max(), error.mean())
    row_of = {int(i): n for n, i in enumerate(bank.ids)}
    for i, j in zip(*np.nonzero(there), strict=True):
        mine = row_of[int(found.index[i, j])]
        if found.index[i, j] != ids[i, j]:  # then the two are as near
            mine_at, q = bank.embeddings[mine].double(), queries[i].double()
            other = -(q @ mine_at) if bank.kind == "ip" else (q - mine_at).square().sum()
            assert abs(other.item() - distance[i, j]) <= 1e-6 * abs(distance[i, j]), (i, j, other.item(), distance[i, j])
        assert found.label[i, j] == bank.labels[mine]
        assert (found.embedding[i, j] == bank.embeddings[mine]).all()
    missing = ~found.mask
    assert (found.index[missing] == MISSING).all()
    assert (found.label[missing] == 0).all()
    assert (found.embedding[missing] == 0).all()
    assert found.distance[missing].isinf().all()
    return found


def filled(rows: int, dim: int, kind: str = "flat", seed: int = 0, **options) -> tuple[Bank, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bank = Bank(dim, kind=kind, **options)
    bank.add(F.normalize(torch.randn(rows, dim, generator=generator), dim=1), torch.randint(7, (rows,), generator=generator))
    return bank, F.normalize(torch.randn(23, dim, generator=generator), dim=1)


def rewritten(bank: Bank, embeddings: torch.Tensor) -> None:
    """The rows of the bank get these embeddings, in the order of its ids."""
    bank.refresh(bank.labels, bank.ids, [(bank.ids, embeddings)])
