"""A finished run, tested with other rows, another k, in other places; and what its table says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config import Action
from evaluation.tables import table
from run.run import run
from tests.run.test_run import TINY
from utils import BadOption, Stopped

OTHER = "fake(train=50, test=17, size=8, classes=3)"
SMALL: dict[str, Any] = {**TINY, "head": "linear+attn-knn", "embed_dim": 8, "k_train": 5, "num_epochs": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mixed"
    run({**SMALL, "calibrate": "head", "output_dir": str(folder)}, Action())
    return folder


def evaluated(folder: Path, where: Path, **given: Any) -> dict[str, Any]:
    return run({**given, "output_dir": str(where)}, Action(test_only=True, checkpoint=str(folder)))


def test_a_confidence_fitted_for_another_k_is_not_used_on_other_rows(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = evaluated(finished, tmp_path, dataset=OTHER)
    assert set(there["predictors"]["scores"]["attention"]) >= {"raw", "calibrated"}
    assert "calibrate: not possible" not in capsys.readouterr().err
    with_other_k = evaluated(finished, tmp_path, dataset=OTHER, k_eval="2")
    assert "calibrated" not in with_other_k["predictors"]["scores"]["attention"]
    assert "calibrate: not possible (the run fitted none for this evaluation, and these are not its rows)" in capsys.readouterr().err
    on_its_rows = evaluated(finished, tmp_path, k_eval="2")  # to which confidence is fitted anew
    assert set(on_its_rows["about"]["test_variants"]) == {"raw", "calibrated"}


def test_baselines_asked_for_on_other_rows_are_shown(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    run({**TINY, "num_epochs": 1, "baselines": False, "output_dir": str(plain)}, Action())
    given = {"dataset": OTHER, "baselines": True, "ood": OTHER, "continual": True}
    results = evaluated(plain, tmp_path, **given)
    assert list(results["predictors"]["scores"]) == ["linear", "uniform", "distance", "attention"]
    assert results["about"]["ood"]["auroc_distance"] == 0.5  # the same rows
    assert results["about"]["continual"]["predictor"] == "attention"
    with pytest.raises(BadOption, match=r"^ood needs a bank"):
        evaluated(plain, tmp_path, ood=OTHER)


def test_the_record_of_a_run_stays(finished: Path) -> None:
    before = (finished / "results.json").read_bytes()
    with pytest.raises(BadOption, match=r"^output_dir must not be a run: its results\.json is of what it was trained for, got "):
        evaluated(finished, finished, noise=0.3)
    assert (finished / "results.json").read_bytes() == before


def test_every_column_is_one_measure(finished: Path, tmp_path: Path) -> None:
    results = evaluated(finished, tmp_path, tta=3)
    own = results["predictors"]["scores"]["interpolation"]
    assert results["about"]["test_variants"] == own
    assert (results["test"], results["test_calibrated"]) == (own["raw_tta"], own["calibrated_tta"])
    lines = table(results, tmp_path).splitlines()
    assert lines[0].split("  ")[-1] == "test calibrated, TTA"
    shown = next(line for line in lines if line.startswith("NLL")).split()[1:]
    of_columns = (results["val"], results["val_calibrated"], *(own[v] for v in ("raw", "calibrated", "raw_tta", "calibrated_tta")))
    assert shown == [f"{x['nll']:.4f}" for x in of_columns]
    once = evaluated(finished, tmp_path)
    assert (once["test"], once["test_calibrated"]) == (own["raw"], own["calibrated"])
    assert table(once, tmp_path).splitlines()[0].split()[2:] == ["val", "val", "calibrated", "test", "test", "calibrated"]


def test_without_calibration_there_is_one_column_and_its_views(tmp_path: Path) -> None:
    results = run({**TINY, "num_epochs": 1, "tta": 2, "calibrate": "none", "output_dir": str(tmp_path / "run")}, Action())
    assert list(results["about"]["test_variants"]) == ["raw", "raw_tta"]
    assert results["test"] == results["about"]["test_variants"]["raw_tta"]
    assert not {"test_calibrated", "val_calibrated"} & set(results)
    assert set(results["predictors"]["scores"]["linear"]) == {"raw", "raw_tta"}


def test_the_table_says_what_must_be_known_to_read_it(finished: Path, tmp_path: Path) -> None:
    text = table(evaluated(finished, tmp_path, adaptive_k=True), tmp_path)
    assert "as trained, without a prior: uniform, distance (" in text
    assert "trained after the model was done" not in text  # the attention is the head's own
    results = evaluated(finished, tmp_path, calibrate="temperature")  # leaves lambda as it was
    assert results["predictors"]["vote_share"] == pytest.approx(0.5)
    assert "interpolation: 0.50 of the vote, 0.50 of the linear head" in table(results, tmp_path)
    counts = evaluated(finished, tmp_path, adaptive_k=True)["predictors"]["neighbors"]
    assert 1 <= counts["attention"] <= counts["uniform"] == 5


def test_a_cap_for_a_bank_that_only_test_rows_fill(tmp_path: Path) -> None:
    given = {**TINY, "num_epochs": 1, "continual": True, "bank_cap": 20, "bank_evict": "class-balanced"}
    results = run({**given, "output_dir": str(tmp_path / "run")}, Action())
    assert results["about"]["continual"]["bank"] == 20
    assert results["about"]["continual"]["bank_before"] == results["predictors"]["bank"] > 20
    assert f"({results['predictors']['bank']} to 20 rows), attention:" in table(results, tmp_path)


def test_ctrl_c_in_the_final_evaluation_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    monkeypatch.setattr("run.finish.measure", interrupted)
    with pytest.raises(Stopped, match=r"training is done and saved\. resume with: .* --resume ") as stop:
        run({**SMALL, "output_dir": str(folder)}, Action())
    monkeypatch.undo()
    assert stop.value.exit_code == 130
    assert not (folder / "results.json").exists()
    assert run({}, Action(resume=str(folder)))["test"]["accuracy"] >= 0


def test_features_of_other_rows_are_not_put_into_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run({**SMALL, "freeze_backbone": True, "output_dir": str(folder)}, Action())
    before = sorted(folder.rglob("*"))
    evaluated(folder, tmp_path / "there", dataset=OTHER)
    assert sorted(folder.rglob("*")) == before
