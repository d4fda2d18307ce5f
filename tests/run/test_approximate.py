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
from run.run import run
from tests.experiments.test_measuring import EMBEDDED, evaluated, nearest, opened, stored_bank

pytestmark = pytest.mark.usefixtures("without_a_stopwatch")
MANY: dict[str, Any] = {**EMBEDDED, "dataset": "fake(train=340, test=23, size=8, classes=3)", "head": "attn-knn", "calibrate": "none"}


@pytest.mark.parametrize(("index", "text"), [("hnsw", "HNSW32"), ("ivf", "IVF7,Flat"), ("IVF5,Flat", "IVF5,Flat")])
def test_a_run_through_an_approximate_index(index: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: set[str] = set()
    propose = banks.Proposer.propose

    def watched(proposer: banks.Proposer, queries: Tensor, count: int, live: int) -> Tensor:
        asked.add(proposer.text)
        return propose(proposer, queries, count, live)

    monkeypatch.setattr(banks.Proposer, "propose", watched)
    folder = tmp_path / "run"
    results = run({**MANY, "index": index, "output_dir": str(folder)}, Action())
    again, judge, sets = opened(folder)
    bank, n = again.model.head.bank, len(again.data.train)
    assert bank is not None
    assert (bank.kind, len(bank), results["votes"]["bank"]) == (index, n, n)
    asked.clear()
    questions = judge.ask(sets.test)
    left_out, _ = judge.left_out(judge.asker) if judge.asker is not None else (None, None)
    assert asked == {text}
    rows, labels = stored_bank(folder)
    assert (labels == again.data.train.y).all()
    for found in (questions, left_out):
        assert found is not None
        ids = found.index.numpy()
        assert ids.shape[1] == 5
        assert ids.min() >= 0
        assert ids.max() < n
        assert all(len(set(row)) == 5 for row in ids.tolist())
        exact = ((found.embedding.double().numpy()[:, None] - rows[ids]) ** 2).sum(2)
        np.testing.assert_allclose(found.distance, exact, rtol=1e-4, atol=1e-6)
        assert (np.diff(found.distance) >= 0).all()
    recall = np.mean(questions.index.numpy()[..., None] == nearest(rows, questions.embedding.double().numpy(), 5)[1][:, None]) * 5
    assert recall > 0.8
    assert left_out is not None
    assert not (left_out.index == torch.arange(n)[:, None]).any()


@pytest.mark.parametrize("index", ["ivf", "IVF5,Flat"])
def test_testing_again_through_lists_gives_the_same_numbers(index: str, tmp_path: Path) -> None:
    results = run({**MANY, "index": index, "output_dir": str(tmp_path / "run")}, Action())
    again = evaluated(tmp_path / "run", tmp_path / "again")
    kept = json.loads((tmp_path / "run" / "results.json").read_text())
    assert again["test"] == kept["test"] == results["test"]
    assert again["votes"] == kept["votes"]
