"""metrics.jsonl, read back: what is no line of an epoch is left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from training.epochs import METRICS, read_lines

LINE: dict[str, Any] = {"epoch": 1, "lr": 0.1, "train": {"nll": 2.0}, "val": {"accuracy": 0.5, "nll": 1.5}, "seconds": 3}


@pytest.mark.parametrize(
    "change",
    [
        {"val": "../x"},
        {"val": {"accuracy": 0.5}},
        {"val": {"accuracy": 0.5, "nll": None}},
        {"train": [1]},
        {"train": {"nll": True}},
        {"epoch": 1.0},
        {"epoch": "1"},
        {"lr": None},
        {"embeddings": {"effective_rank": 2.0}},
        {"embeddings": 7},
    ],
)
def test_a_line_has_its_form(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(f"{json.dumps({**LINE, **change})}\n{json.dumps(LINE)}\n" + "[" * 100_000)
    assert read_lines(tmp_path / METRICS) == [LINE]


def test_no_validation_rows_and_no_file(tmp_path: Path) -> None:
    assert read_lines(tmp_path / METRICS) == []
    (tmp_path / METRICS).write_text(json.dumps({**LINE, "val": None}) + "\nhalf a li")
    assert read_lines(tmp_path / METRICS) == [{**LINE, "val": None}]
    (tmp_path / METRICS).unlink()
    os.mkfifo(tmp_path / METRICS)
    assert read_lines(tmp_path / METRICS) == []
