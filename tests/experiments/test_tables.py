"""What a comparison writes: readable by programs, and harmless whatever the arms are called."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.arms import Cell, Comparison
from experiments.cells import place_of
from experiments.grid import Arm
from experiments.plan import Plan
from experiments.published import beside_published
from experiments.tables import latex, markdown, write
from experiments.verdict import Verdicts, judge
from tests.experiments.made import arm_of, finished, labels, log_probs

HOSTILE = 'a|b & 100%_{x} \\input{y} $z$ #1 ~^ <i> "q" `c`\nnext'
LABEL = labels(30)


def rows(share: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((3, len(LABEL))) < share


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    place = tmp_path_factory.mktemp("runs")
    return [*arm_of(place, "base", rows(0.5, 0), LABEL), *arm_of(place, HOSTILE, rows(0.95, 1), LABEL, seconds=20.0, load=9.0)]


@pytest.fixture(scope="module")
def written(cells: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Verdicts]:
    folder = tmp_path_factory.mktemp("comparison")
    failed = Cell("third", 0, "failed", None)
    verdicts = judge(Comparison(arms=("base", HOSTILE, "third"), baseline="base", cells=(*cells, failed)))
    return folder, write(verdicts, folder), verdicts


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_comparison_json_is_what_was_promised(written: tuple[Path, str, Verdicts]) -> None:
    folder, _, verdicts = written
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    assert {"metric": "accuracy", "baseline": "base", "arms": ["base", HOSTILE, "third"]}.items() <= found.items()
    promised = {"arm", "baseline", "metric", "difference", "low", "high", "df", "p_holm", "verdict", "seeds", "rows", "variance"}
    hostile, third = found["comparisons"]
    assert promised <= hostile.keys()
    assert promised <= third.keys()
    of = verdicts.verdicts[0]
    assert of.estimate
    assert hostile["difference"] == of.estimate.mean
    assert (hostile["low"], hostile["high"], hostile["verdict"], hostile["seeds"], hostile["rows"]) == (of.low, of.high, "better", 3, 30)
    assert hostile["variance"] == {"seed": of.estimate.spread.seed, "row": of.estimate.spread.row, "residual": of.estimate.spread.residual}
    assert (third["verdict"], third["difference"], third["variance"]) == ("no result", None, None)
    assert len(found["cells"]) == 7
    assert found["cells"][-1] == {"arm": "third", "seed": 0, "state": "failed", "run": None}
    assert found["cells"][0] == {"arm": "base", "seed": 0, "state": "done", "run": str(verdicts.comparison.cells[0].run)}


def test_the_table_is_sorted_as_planned_and_holds_the_numbers_of_results_json(written: tuple[Path, str, Verdicts]) -> None:
    folder, _, verdicts = written
    base, hostile, third = table(folder, "table.csv")
    assert [line["arm"] for line in (base, hostile, third)] == ["base", HOSTILE, "third"]
    of_base = [json.loads((c.run / "results.json").read_text())["test"]["accuracy"] for c in verdicts.comparison.cells[:3] if c.run]
    assert float(base["mean"]) == pytest.approx(np.mean(of_base))
    assert float(base["raw"]) == pytest.approx(np.mean(of_base))
    assert float(base["low"]) < float(base["mean"]) < float(base["high"])
    assert (base["difference"], third["mean"], third["seeds"]) == ("", "", "0")
    assert (float(hostile["time_ratio"]), float(hostile["seconds"]), float(hostile["images_per_second_low"])) == (2.0, 20.0, 1900.0)


def test_markdown_and_latex_stay_tables(written: tuple[Path, str, Verdicts]) -> None:
    folder, _, _ = written
    lines = (folder / "table.md").read_text().splitlines()
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:5]}
    assert len(columns) == 1
    tex = (folder / "table.tex").read_text()
    assert {len(re.findall(r"(?<!\\)&", line)) for line in tex.splitlines() if line.endswith(r" \\")} == {columns.pop() - 2}
    assert all(rule in tex for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    assert "**" not in (folder / "table.md").read_text()
    assert r"\textbf" not in tex
    assert r"\input" not in tex


@pytest.mark.parametrize(
    ("character", "in_latex", "in_markdown"),
    [
        ("|", r"\textbar{}", r"\|"),
        ("&", r"\&", r"\&"),
        ("_", r"\_", r"\_"),
        ("%", r"\%", "%"),
        ("\\", r"\textbackslash{}", r"\\"),
        ("<", r"\textless{}", r"\<"),
        ("a\n b", "a b", "a b"),
    ],
)
def test_what_means_something_is_escaped(character: str, in_latex: str, in_markdown: str) -> None:
    assert (latex(character), markdown(character)) == (in_latex, in_markdown)


def test_the_text_has_every_arm_its_sentence_and_what_must_be_known(written: tuple[Path, str, Verdicts]) -> None:
    _, text, _ = written
    assert "2.00 x the training time" in text
    assert "points better than base" in text
    assert "third: no result" in text
    assert "cells without a result that counts: 1 failed" in text
    assert "measured on a busy machine (load up to 9.0)" in text
    assert "variance of the differences:" in text
    assert re.search(r"seeds \d+ %, test rows \d+ %, seeds x rows \d+ %; paired, the standard error is 0\.\d\d", text)
    assert "3/3" in text


def test_results_csv_has_a_row_for_each_run_and_predictor(cells: list[Cell], tmp_path: Path) -> None:
    both = {"linear": log_probs(rows(0.5, 2)[0], LABEL), "uniform": log_probs(rows(0.5, 3)[0], LABEL)}
    votes = Cell("votes", 0, "done", finished(tmp_path / "votes", both, LABEL))
    comparison = Comparison(arms=("base", "votes"), baseline="base", cells=(*cells[:3], votes, Cell("votes", 1, "failed", None)))
    write(judge(comparison), tmp_path / "out")
    found = table(tmp_path / "out", "results.csv")
    assert [(r["arm"], r["seed"], r["predictor"], r["own"]) for r in found] == [
        *(("base", str(seed), "linear", "True") for seed in range(3)),
        ("votes", "0", "linear", "True"),
        ("votes", "0", "uniform", "False"),
        ("votes", "1", "", ""),
    ]
    results = json.loads((tmp_path / "votes" / "results.json").read_text())
    assert float(found[4]["accuracy"]) == results["predictors"]["scores"]["uniform"]["raw"]["accuracy"]
    assert float(found[4]["calibrated_nll"]) == results["predictors"]["scores"]["uniform"]["calibrated"]["nll"]
    assert (found[3]["config.lr"], found[3]["params"]) == ("0.1", "1000")


def test_raw_and_calibrated_stand_side_by_side(cells: list[Cell], tmp_path: Path) -> None:
    comparison = Comparison(arms=("base", HOSTILE), baseline="base", cells=tuple(cells), metric="nll")
    text = write(judge(comparison), tmp_path)
    assert "NLL (as trained, 95 % interval)" in text
    assert "NLL, calibrated" in text
    raw, calibrated = (float(table(tmp_path, "table.csv")[0][name]) for name in ("raw", "calibrated"))
    assert raw != calibrated
    write(judge(replace(comparison, calibrated=True)), tmp_path)
    assert float(table(tmp_path, "table.csv")[0]["mean"]) == pytest.approx(calibrated)


def test_what_joined_later_is_marked_in_every_table(cells: list[Cell], tmp_path: Path) -> None:
    """An arm by its name, seeds by their number."""
    comparison = Comparison(arms=("base", HOSTILE), baseline="base", cells=tuple(cells), exploratory_seeds=frozenset({2}))
    text = write(judge(comparison), tmp_path)
    for shown in (text, (tmp_path / "table.md").read_text(), (tmp_path / "table.tex").read_text()):
        assert shown.count("3 (1 exploratory)") == 2
    assert [(line["exploratory"], line["exploratory_seeds"]) for line in table(tmp_path, "table.csv")] == [("True", "1")] * 2
    assert [line["exploratory"] for line in table(tmp_path, "results.csv")] == ["False", "False", "True"] * 2
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [cell.get("exploratory", False) for cell in found["cells"]] == [False, False, True] * 2
    assert found["comparisons"][0]["exploratory"]
    text = write(judge(replace(comparison, exploratory_seeds=frozenset(), exploratory=frozenset({HOSTILE}))), tmp_path)
    for name in ("table.md", "table.tex"):
        assert (tmp_path / name).read_text().count("next (exploratory)") == 1
    assert [line["exploratory"] for line in table(tmp_path, "table.csv")] == ["False", "True"]


def test_published_numbers_stand_beside_ours_and_what_joined_later_is_marked(tmp_path: Path) -> None:
    arms = (Arm("a", {}, published={"accuracy": 77.6, "nll": 0.25}), Arm("b", {}, exploratory=True))
    plan = Plan(arms=arms, seeds=(0, 1), baseline="a", conditions="from a paper", later_seeds=(1,))
    half, most = np.arange(30) < 15, np.arange(30) < 27
    places = [place_of(tmp_path, arm, seed) for arm in "ab" for seed in (0, 1)]
    for place, right in zip(places, (half, most, most, most), strict=True):
        finished(place.run, {"linear": log_probs(right, LABEL)}, LABEL)
    nll = -np.mean([np.log(0.8) * n / 30 + np.log(0.1) * (30 - n) / 30 for n in (15, 27)])
    text = beside_published(plan, places, {}, tmp_path).splitlines()
    assert re.split(r"  +", text[1]) == ["a", "70.00", "77.6", f"{nll:.4f}", "0.25"]
    assert re.split(r"  +", text[2])[:3] == ["b (exploratory)", "90.00", "-"]
    assert text[4:] == ["here: exploratory, with seeds that were added after the plan was written (1)", "", "published: from a paper"]
    assert "here: exploratory" in (tmp_path / "published.md").read_text()
    assert "here: exploratory" not in beside_published(replace(plan, later_seeds=()), places, {}, tmp_path)


def test_a_hundred_runs(tmp_path: Path) -> None:
    """Twenty arms of five seeds; each line of the table is whole."""
    arms = [f"arm {number}" for number in range(20)]
    right = np.random.default_rng(0).random((20, 5, len(LABEL))) < 0.7
    runs = [cell for arm, of_seeds in zip(arms, right, strict=True) for cell in arm_of(tmp_path / "runs", arm, of_seeds, LABEL)]
    text = write(judge(Comparison(arms=tuple(arms), baseline="arm 0", cells=tuple(runs))), tmp_path)
    assert "the 19 comparisons of the family share the error rate of 5 % (Holm)" in text
    assert [line["arm"] for line in table(tmp_path, "table.csv")] == arms
    assert len(table(tmp_path, "results.csv")) == len(json.loads((tmp_path / "comparison.json").read_text())["cells"]) == 100


def test_nothing_finished_is_a_table_too(tmp_path: Path) -> None:
    cells = tuple(Cell(arm, 0, "pending", None) for arm in "ab")
    text = write(judge(Comparison(arms=("a", "b"), baseline="a", cells=cells)), tmp_path)
    assert "b: no result" in text
    assert json.loads((tmp_path / "comparison.json").read_text())["comparisons"][0]["verdict"] == "no result"


def test_two_writings_are_the_same(cells: list[Cell], tmp_path: Path) -> None:
    comparison = Comparison(arms=("base", HOSTILE), baseline="base", cells=tuple(cells), metric="ece")
    for name in "ab":
        write(judge(comparison), tmp_path / name)
    for file in ("table.csv", "table.md", "table.tex", "comparison.json", "results.csv"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
