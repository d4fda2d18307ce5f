"""What trackers are told of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.arms import Comparison
from experiments.command import conclude
from experiments.grid import Arm
from experiments.plan import Plan
from experiments.tracking import results_of
from experiments.verdict import judge
from main import main
from tests.experiments.made import arm_of, labels
from training.progress import TRACKERS, Results, Tracker, name_of

LABEL = labels(37)
HOSTILE = "<b>two</b>/../$x$"


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """The second arm is right on 4 of 37 rows more, in both seeds."""
    right = np.arange(37)[None] < np.array([[20], [22]])
    more = np.arange(37)[None] < np.array([[24], [26]])
    cells = [*arm_of(tmp_path / "cells", "one", right, LABEL), *arm_of(tmp_path / "cells", HOSTILE, more, LABEL)]
    return Comparison(arms=("one", HOSTILE), baseline="one", cells=tuple(cells))


class Told(Tracker):
    all: list[tuple[Path, Results]]

    def __init__(self, folder: Path, config: Any) -> None:
        self.folder = folder

    def results(self, results: Results) -> None:
        Told.all.append((self.folder, results))


def test_numbers_figures_and_words(comparison: Comparison) -> None:
    found = results_of(judge(comparison), "the text")
    means = {name: value for name, value in found.scores.items() if not name.startswith(("low", "high"))}
    assert means == pytest.approx({"accuracy/one": 21 / 37, f"accuracy/{HOSTILE}": 25 / 37, f"difference/{HOSTILE}": 4 / 37})
    assert found.scores[f"low/{HOSTILE}"] < 4 / 37 < found.scores[f"high/{HOSTILE}"]
    assert [found.options[name] for name in ("baseline", "metric", "seeds", "arms")] == ["one", "accuracy", "0,1", f"one | {HOSTILE}"]
    assert list(found.figures) == ["forest", "scores"]
    assert all(png.startswith(b"\x89PNG") for png in found.figures.values())
    assert found.text == "the text"


def test_a_verdict_is_told_once(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    Told.all = []
    monkeypatch.setitem(TRACKERS, "none", Told)
    conclude(comparison, tmp_path)
    assert Told.all == []
    (tmp_path / "comparison.json").unlink()
    for _ in range(2):
        conclude(comparison, tmp_path, ["none"])
    ((folder, told),) = Told.all
    sentence = json.loads((tmp_path / "comparison.json").read_text())["comparisons"][0]["sentence"]
    assert folder == tmp_path
    assert sentence in told.text
    assert told.text in capsys.readouterr().out


def test_a_tracker_that_is_not_there_takes_nothing(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def unreachable(folder: Path, config: Any) -> Tracker:
        raise OSError("no network")

    monkeypatch.setitem(TRACKERS, "none", unreachable)
    conclude(comparison, tmp_path, ["none"])
    said = capsys.readouterr()
    assert f"tracker: the results did not reach it (OSError: no network); {tmp_path} has them all" in said.err
    assert "written to" in said.out


def test_a_tracker_without_its_package_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TRACKERS["trackio"], "package", "is_not_installed")
    words = ["--layer", "Attention | KvtAttention(K=2)", "--tracker", "trackio", "--output_dir", str(tmp_path / "sweep")]
    assert main(["compare", *words]) == 2
    assert "--tracker needs an optional package: pip install is_not_installed, got 'trackio'" in capfd.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_trackers_of_a_plan_and_names_of_runs(tmp_path: Path) -> None:
    arms = [Arm("a", {"tracker": "wandb"}), Arm("b", {}), Arm("c", {"tracker": "none"}), Arm("d", {"tracker": "wandb"})]
    assert Plan(arms=tuple(arms), seeds=(0,), baseline="a").trackers == ["wandb"]
    assert name_of(tmp_path / "runs" / "dense") == "dense"
    assert name_of(tmp_path / "layers" / "cells" / "KvtAttention_K=5" / "seed0") == "layers/KvtAttention_K=5/seed0"
