"""The bank in training: how often it is built anew, and that a stop between two refreshes leaves no trace."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from classifiers import HEADS, AttnKnnHead
from config import Action
from inputs import store
from run.run import run
from tests.run.test_run import TINY, assert_same
from utils import Stopped

SMALL: dict[str, Any] = {**TINY, "head": "attn-knn", "embed_dim": 8, "k_train": 5, "num_epochs": 3}


class Counting(AttnKnnHead):
    """Counts how often it is handed a bank in training; sends nothing, changes nothing."""

    refreshed = 0
    kept: list[int] = []  # noqa: RUF012

    def loss(self, features: torch.Tensor, target: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        type(self).kept.append(id(self.bank))
        return super().loss(features, target, index)


HEADS.register("counting")(Counting)


@pytest.mark.parametrize(("every", "banks"), [(0.5, 6), (1.0, 3), (1.5, 2), (2.0, 2), (9.0, 1)])
def test_training_sees_a_new_bank_every_so_often(every: float, banks: int, tmp_path: Path) -> None:
    Counting.kept = []
    given = {**SMALL, "head": "counting", "memory_update_freq": every, "accumulate": 1, "batch_size": 11, "output_dir": str(tmp_path)}
    run(given, Action())
    steps = Counting.kept  # 88 rows: 8 steps an epoch
    assert len(steps) == 24
    changes = [0] + [i for i in range(1, 24) if steps[i] != steps[i - 1]]
    assert changes == [i for i in range(24) if i % round(8 * every) == 0]
    assert len(changes) == banks


# ---------------------------------------------------------------- stopped between two refreshes of the bank


class Interrupted(AttnKnnHead):
    """Sends its own process a signal at its n-th loss."""

    at, count = -1, 0

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        cls = Interrupted
        cls.count += 1
        if cls.count == cls.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(features, target, index)


HEADS.register("interrupted")(Interrupted)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    Interrupted.at = -1


# 88 rows: 8 batches an epoch, and round(0.37 * 8) = 3 between refreshes. With --calibrate none there is nothing to fit.
SAMPLED: dict[str, Any] = {
    **TINY, "head": "interrupted", "embed_dim": 8, "k_train": 5, "memory_update_freq": 0.37, "neighbor_sample": 0.4, "calibrate": "none",
    "batch_size": 11, "accumulate": 1, "num_epochs": 3, "lr_projection": 5e-3, "lr_attention": 2e-3, "lr_backbone": 8e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run({**SAMPLED, "output_dir": str(folder)}, Action())
    torch.use_deterministic_algorithms(False)
    return folder


@pytest.mark.parametrize("at", [4, 12, 17], ids=["between two", "where one is due", "after evaluation made a newer bank"])
def test_a_stop_in_mid_epoch_leaves_no_trace_in_weights_average_and_bank(at: int, whole: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    Interrupted.at, Interrupted.count = at, 0
    where = f"stopped by SIGTERM in epoch {at // 8 + 1}, batch {at % 8} of 8"
    with pytest.raises(Stopped, match=where):
        run({**SAMPLED, "output_dir": str(parts)}, Action())
    groups, facts = store.load(parts / "checkpoints" / "last")
    assert {"model", "ema", "bank", "training"} <= set(groups)
    assert (facts["training"]["place"]["updates"], facts["training"]["place"]["batch"]) == (at, at % 8)
    torch.rand(7)  # whatever else happened in between
    run({}, Action(resume=str(parts)))
    assert_same(whole, parts)
    last, best = (store.load(whole / "checkpoints" / name)[0] for name in ("last", "best"))
    assert {"model", "ema", "bank", "training"} <= set(last)  # so that there was something to compare
    assert not torch.equal(last["bank"]["embedding"], best["bank"]["embedding"])
