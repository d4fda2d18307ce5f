"""`main.py probe`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from explain.probe import draw, interval_of
from main import main
from models.probe import Count, KRow

FAKE = "fake(train=40, test=23, size=32, classes=3)"
SMALL = ["--num_epochs", "1", "--batch_size", "16"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_probe_of_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K = all and K of every token give the accuracy that the run reported."""
    model = ["--num_layers", "2", "--num_heads", "1", "--d_hidden", "6", "--d_mlp", "7", "--patch_size", "16"]
    assert main(["--dataset", FAKE, *SMALL, *model, "--output_dir", "run"]) == 0
    accuracy = json.loads((here / "run" / "results.json").read_text())["test"]["accuracy"]
    assert main(["probe", "--checkpoint", "run", "--K", "1,5,all"]) == 0
    rows = json.loads((here / "run" / "probe.json").read_text())
    assert [row["K"] for row in rows] == [1, 5, "all"]
    assert rows[1]["accuracy"] == rows[2]["accuracy"] == accuracy
    assert {row["rows"] for row in rows} == {23}
    assert (here / "run" / "probe.png").read_bytes()[:4] == b"\x89PNG"
    assert "as dense" in capsys.readouterr().out
    for row in rows:
        low, high = row["interval"]
        assert 0 <= low < row["accuracy"] < high <= 1 or row["accuracy"] in (low, high)


@pytest.mark.parametrize(("right", "rows"), [(0, 7), (3, 7), (7, 7), (41, 100), (99, 100)])
def test_the_interval_holds_the_shares_from_which_the_count_is_not_unlikely(right: int, rows: int) -> None:
    """Wilson's interval is where |accuracy - p| <= z sqrt(p (1 - p) / n); searched here on a grid."""
    low, high = interval_of(KRow("all", right / rows, 1.0, rows))
    shares = np.linspace(0, 1, 200_001)
    likely = shares[abs(right / rows - shares) <= 1.959964 * np.sqrt(shares * (1 - shares) / rows) + 1e-12]
    assert (low, high) == pytest.approx((likely.min(), likely.max()), abs=1e-5)


def test_the_picture_has_the_intervals(tmp_path: Path) -> None:
    """Also of K = all alone, and with a title that matplotlib would read as mathematics."""
    asked: dict[str, list[Count]] = {"both": [1, 9, "all"], "all": ["all"], "cut": [4]}
    for name, counts in asked.items():
        draw([KRow(k, 0.5, 1.0, 20) for k in counts], tmp_path / f"{name}.png", title="$a_{")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_probe_of_published_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A timm model with a file of trained weights: its own classifier answers, its own normalization is used."""
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=3, img_size=32).state_dict(), "weights.safetensors")
    words = ["--model", "timm/test_vit", "--pretrained", "weights.safetensors", "--K", "1,all", "--output_dir", "out"]
    assert main(["probe", *words, "--dataset", FAKE]) == 0
    assert len(json.loads((here / "out" / "probe.json").read_text())) == 2
    capsys.readouterr()
    assert main(["probe", *words, "--dataset", "fake(train=40, test=23, size=32, classes=5)"]) == 2
    assert "--pretrained must be weights with a classifier for the 5 classes of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--K 0,3 --checkpoint x", "error: --K must list whole numbers of at least 1, and 'all', got '0,3'"),
        ("", "error: --checkpoint or --model timm/NAME must say what to probe"),
        ("--checkpoint none", "error: --checkpoint must be a run or a checkpoint that exists, got 'none'"),
    ],
)
def test_probe_refuses(words: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *words.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert list(here.iterdir()) == []


def test_probe_of_a_model_without_attention(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", "iris", "--num_epochs", "1", "--output_dir", "run"]) == 0
    capsys.readouterr()
    assert main(["probe", "--checkpoint", "run", "--K", "1"]) == 2
    assert "--checkpoint can't be probed" in capsys.readouterr().err.splitlines()[-1]
