"""`main.py predict`: a line for each row of whatever is named, an error in the line of a row that can't be read."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from main import main
from run import load

SIZES = {"num_layers": 1, "num_heads": 1, "d_hidden": 6, "d_mlp": 7, "num_epochs": 1, "batch_size": 16, "embed_dim": 4, "k_train": 3}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))] + ["--head", "attn-knn", "--attention_heads", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs over images and over a table, and what to ask them."""
    root, rng = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    images = ["--dataset", "fake(train=40, test=20, size=8, classes=3, channels=1)", "--patch_size", "4"]
    assert main([*images, *SMALL, "--output_dir", str(root / "images")]) == 0
    lines = [f'{rng.normal():.3f};{"ab"[n % 2]}b;"{"yes" if n % 2 else "no"}, sir"' for n in range(40)]
    (root / "table.csv").write_text("\n".join(["size;kind;said", *lines]) + "\n")
    assert main(["--dataset", f"csv:{root / 'table.csv'}:said", *SMALL, "--output_dir", str(root / "table")]) == 0
    (root / "in").mkdir()
    for name in "ba":
        Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(root / "in" / f"{name}.png")
    (root / "in" / "c.png").write_text("no image")
    for name in ("pipe.csv", "pipe.npz", "pipe.png"):  # who opens one waits for ever
        os.mkfifo(root / name)
    np.savez(root / "x.npz", x=rng.integers(0, 256, (5, 8, 8), np.uint8), other=rng.integers(0, 256, (2, 8, 8), np.uint8))
    return root


def asked(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[list[dict[str, str]], str]:
    capsys.readouterr()
    assert main(["predict", *words]) == code
    said = capsys.readouterr()
    return list(csv.DictReader(io.StringIO(said.out))), said.err


def test_a_folder_with_an_odd_image_and_a_file_that_is_not_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", str(place / "images"), "--input", str(place / "in"), str(place / "none.png"), "--K", "2"]
    rows, said = asked(words, capsys)
    assert [Path(row["input"]).name for row in rows] == ["a.png", "b.png", "c.png", "none.png"]
    assert list(rows[0]) == ["input", "prediction", "class", "probability", "distance", "neighbors", "p:0", "p:1", "p:2", "error"]
    found = load(place / "images").predict(place / "in", k=2)
    for n, row in enumerate(rows[:2]):
        assert [float(row[f"p:{c}"]) for c in range(3)] == pytest.approx(found.probabilities[n].tolist(), abs=1e-6)
        assert row["prediction"] == row["class"] == found.classes[n]
        assert float(row["probability"]) == pytest.approx(found.confidence[n], abs=1e-6)
        assert found.neighborhood is not None
        near = json.loads(row["neighbors"])
        assert [neighbor["row"] for neighbor in near] == found.neighborhood.rows[n].tolist()
        assert set(near[0]) == {"row", "class", "weight", "distance"}
        assert row["error"] == ""
    assert [row["error"] for row in rows[2:]] == ["can't be read as an image (UnidentifiedImageError)", "there is no such file"]
    assert rows[2]["class"] == rows[2]["p:0"] == ""
    assert "predict: 4 rows, 2 with an error" in said


def test_below_a_confidence_it_abstains(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", str(place / "images"), "--input", str(place / "x.npz")]
    every, _ = asked(words, capsys)
    tops = sorted(float(row["probability"]) for row in every)
    least = f"{(tops[1] + tops[2]) / 2:.9f}"
    some, said = asked([*words, "--confidence", least, "--K", "0"], capsys)
    assert [row["prediction"] == "abstain" for row in some] == [float(row["probability"]) < float(least) for row in every]
    assert [row["class"] for row in some] == [row["class"] for row in every]
    assert f"5 rows, 2 below --confidence {float(least):g}" in said
    assert "neighbors" not in some[0]


def test_json_lines_of_an_array_by_name(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out.jsonl"
    asked(["--checkpoint", str(place / "images"), "--input", f"{place / 'x.npz'}:other", "--output", str(out), "--batch_size", "1"], capsys)
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["input"] for line in lines] == [f"{place / 'x.npz'} row {n}" for n in range(2)]
    assert sum(lines[0]["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]  # no temporary file stays


def test_a_table_by_its_columns(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In any order, with others beside them; a row that does not fit is one with an error."""
    (tmp_path / "new.csv").write_text("id,kind,size\n1,ab,0.5\n\n2,unheard of,\n3,bb,tall\n4,ab\n")
    rows, said = asked(["--checkpoint", str(place / "table"), "--input", str(tmp_path / "new.csv")], capsys)
    assert [row["error"] for row in rows] == ["", "", "must have a number as 'size', got 'tall'", "has 2 cells, and the header 3"]
    assert f"input: {tmp_path / 'new.csv'} has columns that the model does not read: id" in said
    assert rows[0]["class"] in ("yes, sir", "no, sir")
    expected = load(place / "table").predict([{"size": 0.5, "kind": "ab"}, {"size": None, "kind": "?"}]).probabilities
    assert float(rows[0]["p:yes, sir"]) == pytest.approx(expected[0, 1], abs=1e-6)
    assert float(rows[1]["p:yes, sir"]) == pytest.approx(expected[1, 1], abs=1e-6)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--input x.npz", "--checkpoint must name the run that predicts"),
        ("--checkpoint images", "--input must name what to predict"),
        ("--checkpoint images --input table.csv", "--input must be image files, a folder of them, or FILE.npz: the model reads images"),
        ("--checkpoint table --input in", "--input must be FILE.csv or FILE.npz: the model reads the rows of a table"),
        ("--checkpoint table --input short.csv", "--input must have the columns that the model reads; it has no 'kind'"),
        ("--checkpoint table --input none.csv", r"--input must be a file that can be read \(No such file or directory\)"),
        ("--checkpoint table --input pipe.csv", r"--input must be a file that can be read \(it is a pipe\)"),
        ("--checkpoint images --input pipe.npz", r"--input must be a file that can be read \(it is a pipe\)"),
        ("--checkpoint images --input x.npz:z", "--input must hold an array 'z'; it has x, other"),
        ("--checkpoint images --input table/checkpoints", "--input must hold image files"),
        ("--checkpoint images --input x.npz --confidence 2", "--confidence must be a number from 0 to 1, got '2'"),
        ("--checkpoint images --input x.npz --K -1", "--K must be a whole number of at least 0, got '-1'"),
        ("--checkpoint images --input x.npz --output out.txt", "--output must be a file that ends in .csv or .jsonl, got 'out.txt'"),
        ("--checkpoint images --input x.npz --output x.npz/out.csv", "--output must be a directory that can be written"),
        ("--checkpoint images --input x.npz --batch_size 0", "--batch_size must be a whole number of at least 1"),
        ("--checkpoint none --input x.npz", "--checkpoint must be a run or a checkpoint that exists, got 'none'"),
    ],
)
def test_what_can_not_be(words: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(place)
    (place / "short.csv").write_text("size\n1\n")
    before = sorted(place.rglob("*"))
    rows, said = asked(words.split(), capsys, code=2)
    (error,) = (text for text in said.splitlines() if text.startswith("error: "))
    assert error.startswith(f"error: {line.replace(chr(92), '')}")
    assert rows == []
    assert sorted(place.rglob("*")) == before


def test_where_no_row_can_be_read_the_exit_code_tells(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", str(place / "images"), "--input", "none.png", str(place / "pipe.png")]
    rows, said = asked(words, capsys, code=1)
    assert [row["error"] for row in rows] == ["there is no such file", "must be a file that can be read (it is a pipe)"]
    assert "error: no row could be predicted" in said
