"""`--head_epochs`: after training the head alone learns a little longer, over the features of the finished backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dataset
import run.finish
import run.head_alone
from config import Action
from evaluation import tables
from inputs import store
from run.complete import complete
from run.run import run as start
from tests.run.test_run import TINY, assert_same
from utils import BadOption, Diverged, Stopped

SMALL: dict[str, Any] = {**TINY, "head": "attn-knn", "embed_dim": 8, "k_train": 5, "num_epochs": 2, "val_fraction": 0.3, "head_epochs": 4}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return store.load(folder / "checkpoints" / "best", "model")[0]["model"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without the head's own epochs, one whose validation took them, and one with them."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        start({**SMALL, "head_epochs": 0, "output_dir": str(folder / "without")}, Action())
        start({**SMALL, "output_dir": str(folder / "with")}, Action())
        patch.setattr(run.head_alone, "better_head", lambda *_: True)
        start({**SMALL, "output_dir": str(folder / "kept")}, Action())
        patch.setattr(run.head_alone, "better_head", lambda *_: False)
        start({**SMALL, "output_dir": str(folder / "left")}, Action())
    return folder


def results(folder: Path) -> dict[str, Any]:
    from evaluation.results import read

    return read(folder / "results.json")


def test_the_backbone_stays_and_the_head_moves(runs: Path) -> None:
    before, after = weights(runs / "without"), weights(runs / "kept")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("head.") for name in moved)
    assert {"projection", "attention"} <= {"projection" if "embedder" in name else "attention" for name in moved}


def test_a_head_that_is_no_better_stays_as_it_was(runs: Path) -> None:
    before, after = weights(runs / "without"), weights(runs / "left")
    assert all(torch.equal(before[name], after[name]) for name in before)
    one, other = results(runs / "without"), results(runs / "left")
    assert one["test"] == other["test"]
    assert other["about"]["head_alone"]["kept"] is False
    assert other["val"] == one["val"] == other["about"]["head_alone"]["before"]


def test_results_are_those_of_the_head_that_was_kept(runs: Path) -> None:
    found = results(runs / "kept")
    alone = {name: value for name, value in found["about"]["head_alone"].items() if name != "seconds"}
    assert alone == {"epochs": 4, "kept": True, "before": results(runs / "without")["val"]}
    assert found["val"] != found["about"]["head_alone"]["before"]
    again = start({"output_dir": str(runs / "again")}, Action(test_only=True, checkpoint=str(runs / "kept")))
    assert again["test"] == found["test"]
    assert again["about"]["head_alone"] == found["about"]["head_alone"]
    assert again["about"]["seconds"] == found["about"]["seconds"] > found["about"]["head_alone"]["seconds"]  # of training, to its end


@pytest.mark.parametrize(("folder", "line"), [("kept", "4 more epochs"), ("left", "4 more epochs, no better"), ("without", "")])
def test_the_table_says_whose_scores_these_are(folder: str, line: str, runs: Path) -> None:
    lines = [shown for shown in tables.table(results(runs / folder), Path("here")).splitlines() if shown.startswith("head alone")]
    assert lines == ([f"{'head alone':<16}{line:>32}"] if line else [])


@pytest.mark.parametrize("stage", ["learning", "learned"])
def test_a_run_that_was_stopped_there_ends_alike(stage: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stage == "learning":
            patch.setattr(run.head_alone, "train_head", interrupted)
        else:
            patch.setattr(run.finish, "prepare", interrupted)
        with pytest.raises(Stopped, match="training is done and saved"):
            start({**SMALL, "output_dir": str(tmp_path / "stopped")}, Action())
    start({}, Action(resume=str(tmp_path / "stopped")))
    assert_same(runs / "with", tmp_path / "stopped")


def test_training_goes_on_from_the_last_epoch(runs: Path, tmp_path: Path) -> None:
    start({**SMALL, "output_dir": str(tmp_path / "run")}, Action())
    found = start({"num_epochs": 3}, Action(resume=str(tmp_path / "run")))
    assert found["about"]["epoch"] in (1, 2, 3)
    assert "head_alone" in found["about"]


def test_a_head_that_diverges_is_left_as_it_was(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverges(*_: Any) -> None:
        raise Diverged("training diverged", 1)

    monkeypatch.setattr(run.head_alone, "train_head", diverges)
    found = start({**SMALL, "output_dir": str(tmp_path / "run")}, Action())
    assert found["test"] == results(runs / "without")["test"]
    assert "head alone: training diverged\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"head": "linear"}, 0),
        ({"head": "linear", "head_epochs": 3}, 3),
        ({"head": "knn"}, 0),
        ({"head": "knn", "embed_dim": 4}, 10),
        ({"head": "attn-knn", "embed_dim": 0}, 10),
        ({"head": "attn-knn", "freeze_backbone": True}, 0),
        ({"head": "attn-knn", "freeze_backbone": True, "head_epochs": 3}, 0),
    ],
)
def test_the_default(options: dict[str, Any], epochs: int) -> None:
    data = dataset.load(TINY["dataset"])
    unset = {name: value for name, value in TINY.items() if name != "head_epochs"}
    assert complete({**unset, "k_train": 5, **options}, data).training.head_epochs == epochs


def test_a_linear_head_may_too(tmp_path: Path) -> None:
    found = start({**TINY, "num_epochs": 1, "head_epochs": 2, "output_dir": str(tmp_path / "run")}, Action())
    assert found["about"]["head_alone"]["epochs"] == 2


NOTHING = """
import torch
from torch.nn.functional import cross_entropy, log_softmax
from classifiers import HEADS, Head

@HEADS.register("fixed")
class Fixed(Head):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.register_buffer("way", torch.eye(num_classes, num_features))

    def forward(self, features):
        return log_softmax(features @ self.way.T, 1)

    def loss(self, features, target, index):
        return {"cross_entropy": cross_entropy(features @ self.way.T, target)}
"""


def test_a_head_that_has_nothing_to_learn_is_not_trained_alone(tmp_path: Path) -> None:
    """Which is found before its backbone is trained, not after it."""
    plugin = tmp_path / "fixed.py"
    plugin.write_text(NOTHING)
    given = {**TINY, "plugin": str(plugin), "head": "fixed", "num_epochs": 1, "head_epochs": 0}
    assert "head_alone" not in start({**given, "output_dir": str(tmp_path / "run")}, Action())["about"]
    for alone, flag in ({"head_epochs": 2}, "head_epochs"), ({"freeze_backbone": True}, "freeze_backbone"):
        with pytest.raises(BadOption, match=f"{flag} needs a head that learns: fixed has no parameters"):
            start({**given, **alone, "output_dir": str(tmp_path / "refused")}, Action())
        assert not (tmp_path / "refused").exists()
