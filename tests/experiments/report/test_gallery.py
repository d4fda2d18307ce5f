"""Pictures that ask a trained model: neighbors beside `explain`, what can't be asked said in a line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.report.gallery import NEAR, pictures
from experiments.report.ink import drawn
from experiments.report.material import gather
from main import main
from run.directory import files_of, look, new
from run.loaded import load
from run.prepare import prepare_loaded
from run.verify import verify_run
from tests.experiments.report.made import run_at
from utils import BadOption

SMALL = ["--num_layers", "1", "--num_heads", "3", "--d_hidden", "15", "--d_mlp", "7", "--num_epochs", "2", "--batch_size", "16"]
FAKE = ["--dataset", "fake(train=83, test=29, size=6, classes=5)", "--patch_size", "3", *SMALL, "--lr", "3e-3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    made = {"attn": [*FAKE, "--head", "attn-knn", "--embed_dim", "12", "--k_train", "7"], "without": [*FAKE, "--no-baselines"]}
    made["table"] = ["--dataset", "iris", "--num_epochs", "1", "--head", "knn", "--vote", "uniform"]
    for name, words in made.items():
        assert main([*words, "--output_dir", str(folder / name)]) == 0
    return folder


def test_neighbors_are_those_of_the_run(runs: Path) -> None:
    found = pictures(gather([str(runs / "attn")]), {})
    assert [p.name for p in found.pictures] == ["neighbors-1", "tokens-1"]
    assert not found.lines
    evaluator = prepare_loaded(load(str(runs / "attn"), {}))
    retrieved = evaluator.retrieve(evaluator.sets.test)
    rows = found.pictures[0].table.rows
    for row in {row[1] for row in rows}:
        shown = [r[6] for r in rows if r[1] == row]
        assert len(shown) == NEAR
        assert set(shown) <= set(retrieved.index[row].tolist())
        weights = [r[8] for r in rows if r[1] == row]
        assert weights == sorted(weights, reverse=True)
    page = drawn(found.pictures[0], files=False).page
    assert page.count("<image") == len({row[1] for row in rows}) * (1 + NEAR)
    reads = [row[4] for row in found.pictures[1].table.rows if row[2] == found.pictures[1].table.rows[0][2]]
    assert sum(reads) == pytest.approx(100, abs=40)  # of 4 patches all, but for what is on the class token


def test_what_cannot_be_asked_is_said(runs: Path, tmp_path: Path) -> None:
    without = pictures(gather([str(runs / "without")]), {})
    assert [p.name for p in without.pictures] == ["tokens-1"]
    assert "no picture of neighbors: checkpoint must hold a bank" in without.lines[0]
    table = pictures(gather([str(runs / "table")]), {})
    assert not table.pictures
    assert "explain --what neighbors --checkpoint" in table.lines[0]
    made = pictures(gather([str(run_at(tmp_path / "made", {"lr": 0.1}, 0))]), {})
    assert not made.pictures
    assert "the model can't be asked: " in made.lines[0]


def test_a_report_beside_a_run_is_the_runs_own(runs: Path, tmp_path: Path) -> None:
    """It goes when the run is overwritten; what somebody put beside its figures does not."""
    folder = Path(shutil.copytree(runs / "table", tmp_path / "run"))
    assert main(["report", str(folder), "--without_pictures"]) == 0
    made = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    added = made - (files_of(runs / "table") or set())
    assert "report.html" in added
    assert {Path(name).suffix for name in added if name.startswith("figures/")} == {".svg", ".png"}
    look(folder, overwrite=True)
    assert verify_run(folder).state == "whole"
    (folder / "figures" / "mine.svg").touch()
    with pytest.raises(BadOption, match=r"has not listed figures/mine\.svg as its own"):
        look(folder, overwrite=True)
    (folder / "figures" / "mine.svg").unlink()
    with new(folder, "", {"config": {}}, True):
        assert not (folder / "report.html").exists()
        assert not (folder / "figures").exists()
