"""Negative controls of the tests of --resume: a checkpoint that lacks something must give another run, or these tests see nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config import Action
from layers import dropout
from run.run import run
from tests.run.test_run import TINY, assert_same
from training import checkpoint
from training.state import TrainingState
from utils import Stopped

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, and one that was."""
    folder = tmp_path_factory.mktemp("runs")
    run({**TINY, "calibrate": "head", "output_dir": str(folder / "whole")}, Action())
    with pytest.raises(Stopped):
        run({**TINY, "calibrate": "head", "output_dir": str(folder / "stopped")}, Action(stop_after=2))
    return folder


def optimizer(patch: Patch) -> None:
    patch.setattr(checkpoint, "unpack_optimizer", lambda *given: None)


def draws(patch: Patch) -> None:
    """Nothing of them is in a checkpoint: they follow from seed, epoch and row, by the name of the stream."""
    patch.setattr(dropout, "ROWS", dropout.ROWS + 100)


def average(patch: Patch) -> None:
    load = TrainingState._load

    def without(state: TrainingState, checkpoints: Any) -> None:
        load(state, checkpoints)
        assert state.ema is not None
        state.ema.load_state_dict(state.model.state_dict())

    patch.setattr(TrainingState, "_load", without)


def nothing(patch: Patch) -> None:
    pass


@pytest.mark.parametrize("leave_out", [nothing, optimizer, draws, average])
def test_what_a_checkpoint_lacks_is_noticed(leave_out: Callable[[Patch], None], runs: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    shutil.copytree(runs / "stopped", tmp_path / "resumed")
    leave_out(monkeypatch)
    torch.rand(7)  # whatever else happened in between
    run({}, Action(resume=str(tmp_path / "resumed")))
    if leave_out is nothing:
        assert_same(runs / "whole", tmp_path / "resumed")
    else:
        with pytest.raises(AssertionError):
            assert_same(runs / "whole", tmp_path / "resumed")
