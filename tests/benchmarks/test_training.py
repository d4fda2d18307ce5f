"""The tables of heads: every cell is a command line that main.py takes, and what is printed is what the runs have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import config as flags
from benchmarks.training import RECIPES, TABLES, Cell, cells_of, show, show_grid, show_predictors
from classifiers import HEADS
from inputs.yaml_file import read_yaml


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    x = np.zeros((7, 4, 4), np.uint8)
    for name in ("fashion-mnist", "cifar10"):
        np.savez(folder / f"{name}.npz", x_train=x, y_train=np.arange(7), x_test=x[:3], y_test=np.arange(3))
    return folder


def typed(words: list[str]) -> dict[str, Any]:
    """What a command line asks for, as main.py reads it."""
    given: dict[str, Any] = {}
    at = 0
    while at < len(words):
        assert words[at].startswith("--"), words[at]
        name = words[at][2:]
        if flags.kind_of(flags.FIELDS[name.removeprefix("no-")]) is bool:
            given[name.removeprefix("no-")] = not name.startswith("no-")
            at += 1
        else:
            given[name] = flags.parse(name, words[at + 1])
            at += 2
    return given


@pytest.mark.parametrize("table", TABLES)
def test_each_cell_is_a_run_of_its_own_that_the_command_line_takes(table: str, data: Path, tmp_path: Path) -> None:
    cells = cells_of(table, 2, data, tmp_path)
    assert len({cell.folder for cell in cells}) == len(cells)
    for cell in cells:
        given = typed(cell.flags)
        if recipe := given.pop("config", None):
            assert Path(recipe).parent == RECIPES
            given = {**read_yaml(recipe), **given}
        flags.check(given)
        if plugin := given.get("plugin"):
            assert f'@HEADS.register("{given["head"]}")' in Path(plugin).read_text()
            continue
        assert given["head"] in HEADS
        assert given["head"] == cell.arm.partition(",")[0]
    for group in {cell.group for cell in cells} if table != "forms" else ():
        assert "linear" in {cell.arm for cell in cells if cell.group == group}  # what all others are compared with


def test_the_noise_tables_have_clean_and_noisy_validation_rows(data: Path, tmp_path: Path) -> None:
    of_group = {cell.group: typed(cell.flags) for cell in cells_of("neighbors", 1, data, tmp_path)}
    noisy = {group: given for group, given in of_group.items() if "label_noise" in given}
    assert sorted(given.get("noisy_val", False) for given in noisy.values()) == [False] * 3 + [True] * 3
    assert len(noisy) == len(of_group) - 3


def finished(cell: Cell, out: Path, results: dict[str, Any]) -> Cell:
    (out / cell.folder).mkdir(parents=True)
    (out / cell.folder / "results.json").write_text(json.dumps(results))
    return cell


def scored(accuracy: float, nll: float, ece: float = 0.0) -> dict[str, float]:
    return {"accuracy": accuracy, "nll": nll, "ece": ece}


def test_lowest_seed_and_difference_to_the_linear_head_of_the_same_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = []
    for arm, accuracies in {"linear": (0.5, 0.7), "knn": (0.6, 0.9)}.items():
        for seed, accuracy in enumerate(accuracies):
            results = {"test": scored(accuracy, 0.5 + seed), "test_calibrated": scored(accuracy, 0.25)}
            cells.append(finished(Cell("digits", arm, seed, []), tmp_path, results))
    show("digits", cells, tmp_path)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| linear | 60.0 ± 14.1 | 50.0 | 0.0 ± 0.0 | 1.000 ± 0.707 | 0.250 ± 0.000 |",
        "| knn | 75.0 ± 21.2 | 60.0 | 15.0 ± 7.1 | 1.000 ± 0.707 | 0.250 ± 0.000 |",
    ]


def test_the_grid_names_what_is_most_under_the_linear_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = []
    both = {"dropout 0 mixup 0.3 average 0 lr 0.1": (0.9, 0.95), "dropout 0.1 mixup 0 average 0 lr 0.1": (0.8, 0.775)}
    for settings, accuracies in both.items():
        for arm, accuracy in zip(("linear", "knn"), accuracies, strict=True):
            cells.append(finished(Cell(f"grid/{settings}", arm, 0, []), tmp_path, {"test": scored(accuracy, 0.5)}))
    show_grid(cells, tmp_path)
    *_, first, second, _, last = capsys.readouterr().out.splitlines()
    assert [first, second] == ["| 0 | 0.3 | 0 | 0.1 | 90.0 | 95.0 |", "| 0.1 | 0 | 0 | 0.1 | 80.0 | 77.5 |"]
    assert last == "Most under the linear head with the same settings: knn, -2.5 points (dropout 0.1 mixup 0 average 0 lr 0.1)."


def test_every_predictor_as_trained_and_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = []
    for arm, names in {"linear": ("linear", "uniform"), "knn": ("uniform",)}.items():
        for seed in (0, 1):
            better = 0.1 * seed + (0.05 if arm == "knn" else 0)
            both = {"raw": scored(0.5 + better, 1 - better, 0.2), "calibrated": scored(0.6 + better, 0.5 - better, 0.1)}
            results = {"test": both["raw"], "test_calibrated": both["calibrated"], "predictors": {"scores": dict.fromkeys(names, both)}}
            cells.append(finished(Cell("neighbors/toys", arm, seed, []), tmp_path, results))
    show_predictors("neighbors", cells, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    numbers = "55.0 ± 7.1 | 0.950 ± 0.071 / 0.200 ± 0.000 | 65.0 ± 7.1 | 0.450 ± 0.071 / 0.100 ± 0.000"
    assert lines[5:7] == [f"| toys | linear | linear | {numbers} |", f"|  |  | uniform | {numbers} |"]
    assert lines[7].startswith("|  | knn | uniform | 60.0 ± 7.1 | 0.900 ± 0.071 / ")
    assert lines[-1] == "| toys | knn | 5.0 ± 0.0 | -0.050 ± 0.000 | 5.0 ± 0.0 | -0.050 ± 0.000 |"
