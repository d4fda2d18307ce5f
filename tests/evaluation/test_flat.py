"""results.json as one row."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.flat import as_csv, flat_results, scores_of
from main import main

RESULTS: dict[str, Any] = {
    "test": {"accuracy": 0.5, "nll": 1.25},
    "test_calibrated": {"accuracy": 0.75},
    "predictors": {
        "k": 3,
        "scores": {
            "uniform": {"raw": {"accuracy": 0.25, "nll": 2.0, "ece": 0.1, "brier": 0.3}, "train_leave_one_out": 0.9},
            "linear": {"calibrated": {"accuracy": 0.5}},
        },
    },
    "val": {"accuracy": 0.625, "nll": 3.0},
    "warnings": ["one", "two"],
    "about": {
        "test_variants": {"raw": {"accuracy": 0.5}},
        "confusion": [[1, 2], [3, 4]],
        "epoch": 7,
        "data": {"train": 11, "val": 5, "test": 3, "sha256": "x"},
        "config": {"dataset": "wine, red", "model": "mlp", "layer": "Attention", "head": "knn", "seed": 3, "lr": 0.1},
        "ignored": {"layer": "--model mlp"},
        "git": None,
    },
}


def test_the_row_by_hand() -> None:
    assert flat_results(RESULTS) == {
        "test/accuracy": 0.5,
        "test/nll": 1.25,
        "test_calibrated/accuracy": 0.75,
        "predictors/uniform/raw/accuracy": 0.25,
        "predictors/uniform/raw/nll": 2.0,
        "predictors/uniform/raw/ece": 0.1,
        "predictors/linear/calibrated/accuracy": 0.5,
        "about/dataset": "wine, red",
        "about/model": "mlp",
        "about/head": "knn",
        "about/seed": 3,
        "about/epoch": 7,
        "about/val_accuracy": 0.625,
        "about/val_nll": 3.0,
        "about/train_rows": 11,
        "about/val_rows": 5,
        "about/test_rows": 3,
        "about/warnings": 2,
    }
    scores = scores_of(flat_results(RESULTS))
    assert len(scores) == 7
    assert not any(name.startswith("about/") for name in scores)
    (line,) = csv.DictReader(io.StringIO(as_csv(flat_results(RESULTS))))
    assert (line["about/dataset"], line["test/nll"], len(line)) == ("wine, red", "1.25", 18)


def test_a_run_writes_its_row_and_it_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--dataset", "wine", "--num_epochs", "1", "--head", "linear+attn-knn", "--embed_dim", "8"]
    assert main([*words, "--output_dir", "run"]) == 0
    results = json.loads(Path("run/results.json").read_text())
    (line,) = csv.DictReader(io.StringIO(Path("run/results.csv").read_text()))
    assert line == {name: str(value) for name, value in flat_results(results).items()}
    assert float(line["test_calibrated/nll"]) == results["test_calibrated"]["nll"]
    assert {name.split("/")[0] for name in line} == {"test", "test_calibrated", "predictors", "about"}
    assert len(line) < 90
    assert main(["check", "run"]) == 0
    assert main(["--resume", "run", "--num_epochs", "2"]) == 0  # the row is of the run as it is now
    (line,) = csv.DictReader(io.StringIO(Path("run/results.csv").read_text()))
    assert line["about/epoch"] == str(json.loads(Path("run/results.json").read_text())["about"]["epoch"])
