"""Runs whose bank has an approximate index: the rows it names are there, each once, and nearly the nearest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from classifiers import bank as banks
from config import Action
from evaluation.evaluator import leave_one_out
from inputs import store
from run.loaded import load
from run.prepare import prepare_loaded
from run.run import run
from tests.run.test_run import TINY

EMBEDDED: dict[str, Any] = {**TINY, "num_epochs": 1, "embed_dim": 8, "k_train": 5}
MANY: dict[str, Any] = {**EMBEDDED, "dataset": "fake(train=340, test=23, size=8, classes=3)", "head": "attn-knn", "calibrate": "none"}


def stored_bank(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and labels of the bank of a run, in the order of ids."""
    bank = store.load(folder / "checkpoints" / "best")[0]["bank"]
    order = bank["id"].argsort()
    return bank["embedding"][order].double().numpy(), bank["label"][order].numpy()


def nearest(rows: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """Row numbers (N, k)."""
    squared: np.ndarray = ((queries[:, None] - rows[None]) ** 2).sum(2)
    return squared.argsort(1, kind="stable")[:, :k]


@pytest.mark.parametrize(("index", "text"), [("hnsw", "HNSW32"), ("ivf", "IVF7,Flat"), ("IVF5,Flat", "IVF5,Flat")])
def test_a_run_through_an_approximate_index(index: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: set[str] = set()
    propose = banks.Proposer.propose

    def watched(proposer: banks.Proposer, queries: Tensor, count: int, live: int, effort: int) -> Tensor:
        asked.add(proposer.text)
        return propose(proposer, queries, count, live, effort)

    monkeypatch.setattr(banks.Proposer, "propose", watched)
    folder = tmp_path / "run"
    results = run({**MANY, "index": index, "output_dir": str(folder)}, Action())
    again = load(str(folder), {})
    evaluator = prepare_loaded(again)
    bank, n = again.model.head.bank, len(again.data.train)
    assert bank is not None
    assert (bank.kind, len(bank), results["predictors"]["bank"]) == (index, n, n)
    asked.clear()
    assert evaluator.retriever is not None
    retrieved = evaluator.retrieve(evaluator.sets.test)
    left_out, _ = leave_one_out(evaluator.retriever)
    assert asked == {text}
    rows, labels = stored_bank(folder)
    assert (labels == again.data.train.y).all()
    for found in (retrieved, left_out):
        ids = found.index.numpy()
        assert ids.shape[1] == 5
        assert ids.min() >= 0
        assert ids.max() < n
        assert all(len(set(row)) == 5 for row in ids.tolist())
        exact = ((found.embedding.double().numpy()[:, None] - rows[ids]) ** 2).sum(2)
        np.testing.assert_allclose(found.distance, exact, rtol=1e-4, atol=1e-6)
        assert (np.diff(found.distance) >= 0).all()
    recall = np.mean(retrieved.index.numpy()[..., None] == nearest(rows, retrieved.embedding.double().numpy(), 5)[:, None]) * 5
    assert recall > 0.8
    assert not (left_out.index == torch.arange(n)[:, None]).any()


@pytest.mark.parametrize("index", ["ivf", "IVF5,Flat"])
def test_testing_again_through_lists_gives_the_same_numbers(index: str, tmp_path: Path) -> None:
    results = run({**MANY, "index": index, "output_dir": str(tmp_path / "run")}, Action())
    run({"output_dir": str(tmp_path / "again")}, Action(test_only=True, checkpoint=str(tmp_path / "run")))
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    kept = json.loads((tmp_path / "run" / "results.json").read_text())
    assert again["test"] == kept["test"] == results["test"]
    assert again["predictors"] == kept["predictors"]
