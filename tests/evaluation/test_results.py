"""The one reader of results.json: of today's, and of those that older versions wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.results import grouped, parsed, read

OLD = Path(__file__).parents[1] / "run" / "old"
FLAT: dict[str, Any] = {
    "test": {"nll": 2.0},
    "test_calibrated": {"nll": 1.0},
    "test_variants": {"raw": {"nll": 2.0}, "calibrated": {"nll": 1.0}},
    "predictors": {"k": 3, "scores": {}},
    "val": None,
    "val_calibrated": {"nll": 0.5},
    "epoch": 7,
    "warnings": ["one"],
    "config": {"seed": 1},
    "load": 0.5,
}


def test_scores_and_warnings_on_top_and_the_rest_under_about() -> None:
    found = grouped(FLAT)
    assert list(found) == ["test", "test_calibrated", "predictors", "val", "val_calibrated", "warnings", "about"]
    assert {name: found[name] for name in found if name != "about"} == {name: FLAT[name] for name in found if name != "about"}
    assert found["about"] == {"test_variants": FLAT["test_variants"], "epoch": 7, "config": {"seed": 1}, "load": 0.5}


def test_what_is_grouped_stays(tmp_path: Path) -> None:
    once = grouped(FLAT)
    assert grouped(once) == once
    (tmp_path / "results.json").write_text(json.dumps(once))
    assert read(tmp_path / "results.json") == once
    (tmp_path / "results.json").write_text(json.dumps(FLAT))
    assert read(tmp_path / "results.json") == once


@pytest.mark.parametrize("views", ["", "_tta"])
def test_where_the_result_was_the_calibrated_one_it_is_found_by_its_name(views: str) -> None:
    variants = {"raw": {"nll": 4.0}, "calibrated": {"nll": 3.0}}
    variants |= {f"raw{views}": {"nll": 2.0}, f"calibrated{views}": {"nll": 1.0}}
    found = grouped({"test": {"nll": 1.0}, "test_variants": variants})
    assert (found["test"], found["test_calibrated"]) == ({"nll": 2.0}, {"nll": 1.0})


def test_a_run_without_calibration_has_none() -> None:
    assert list(grouped({"test": {"nll": 1.0}, "test_variants": {"raw": {"nll": 1.0}}, "val": None})) == ["test", "val", "about"]


def test_runs_of_an_older_version() -> None:
    """By hand, from the files: what was called votes, voters, mixture, lambda."""
    linear, mixed = (read(OLD / name / "results.json") for name in ("linear", "interpolation"))
    assert list(linear) == ["test", "predictors", "val", "about"]
    assert list(mixed) == ["test", "test_calibrated", "predictors", "val", "about"]
    assert (mixed["test"]["nll"], mixed["test_calibrated"]["nll"]) == (2.2618598436578736, 2.237287872348987)
    assert list(mixed["predictors"]["scores"]) == ["linear", "uniform", "distance", "attention", "interpolation"]
    assert (mixed["predictors"]["vote_share"], mixed["predictors"]["calibration"]) == (0.3834174573421478, "head")
    assert (linear["test"]["nll"], linear["about"]["epoch"], linear["about"]["params"]) == (2.3066661484062174, 1, 602)
    assert "votes" not in mixed["about"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"{}", b'{"test": 3}', b'{"test": {}, "about": 3}', b"\xff\xfe\x00", b'{"test":' + b"[" * 100_000],
    ids=["empty", "torn", "a list", "no scores", "a number", "about a number", "no text", "deep"],
)
def test_what_holds_no_results_is_told_in_one_way(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parsed(content)
