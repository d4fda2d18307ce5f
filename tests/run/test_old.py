"""What older versions wrote is read: options by their old names, and runs that lie in tests/run/old as such a version left them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from config import Action
from evaluation import results
from inputs import store
from inputs.yaml_file import read_yaml
from layers.dropout import Dropout
from main import main
from run.complete import complete
from run.loaded import load
from run.parts import load_data
from run.prepare import prepare_loaded
from run.run import run
from tests.run.test_run import TINY

OLD = Path(__file__).parent / "old"
NAMES = ("interpolation", "linear")
FAKE = "fake(train=40, test=20, size=8, classes=3)"


# ---------------------------------------------------------------- options by their old names


def typed(tmp_path: Path, *words: str) -> dict[str, Any]:
    """The configuration that a command line gives."""
    small = ["--dataset", FAKE, "--num_layers", "1", "--num_heads", "1", "--d_hidden", "6", "--d_mlp", "7", "--num_epochs", "1"]
    assert main([*small, *words, "--output_dir", str(tmp_path / "run"), "--overwrite"]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "run" / "results.json").read_text())["about"]["config"]
    return found


def test_a_command_line_with_old_names(tmp_path: Path) -> None:
    assert typed(tmp_path, "--head", "linear+knn", "--k_train", "3", "--mix_lambda", ".3")["interpolation"] == 0.3
    assert typed(tmp_path, "--no-compare_votes")["baselines"] is False
    assert typed(tmp_path, "--k_eval", "3", "--compare_votes")["baselines"] is True
    assert not {"mix_lambda", "compare_votes"} & set(typed(tmp_path, "--k_eval", "3", "--compare-votes"))


def test_a_file_with_old_names(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("head: linear+knn\nmix_lambda: .3\ncompare_votes: false\n")
    assert read_yaml(str(file)) == {"head": "linear+knn", "interpolation": 0.3, "baselines": False}


@pytest.mark.parametrize(
    ("given", "old", "value"),
    [({"head": "linear+knn", "interpolation": 0.3}, "mix_lambda", 0.3), ({"baselines": False}, "compare_votes", False)],
    ids=["mix_lambda", "compare_votes"],
)
def test_a_checkpoint_with_old_names(given: dict[str, Any], old: str, value: Any, tmp_path: Path) -> None:
    (name,) = set(given) - {"head"}
    folder = tmp_path / "run"
    first = run({**TINY, "num_epochs": 1, "k_train": 3, "calibrate": "head", **given, "output_dir": str(folder)}, Action())
    best = folder / "checkpoints" / "best"
    tensors, facts = store.load(best)
    renamed = {old if option == name else option: kept for option, kept in facts["config"].items()}
    assert renamed[old] == value
    store.save(best, tensors, {**facts, "config": renamed})
    again = run({}, Action(test_only=True, checkpoint=str(folder)))
    assert again["about"]["config"][name] == value
    assert again["test"] == first["test"]


# ---------------------------------------------------------------- runs of an older version


def results_of(name: str) -> dict[str, Any]:
    return results.read(OLD / name / "results.json")


# A confidence within rounding of a bin's edge counts to the bin below since then.
BINNED = {"ece", "ece_classwise"}
# Confidences that are equal to six digits are equal since then. Most predictors of these runs have such, up to 204 of 359; the vote by
# distance has none, and its numbers stay.
ORDERED = {"ece_equal_mass", "aurc", "accuracy_at_80", "accuracy_at_90", "accuracy_at_95"}
RESULT = ("test", "test_calibrated")


def assert_close(found: dict[str, float], wanted: dict[str, float], *, tied: bool = True) -> None:
    assert set(found) == set(wanted)
    for name in set(wanted) - (ORDERED if tied else set()):
        assert found[name] == pytest.approx(wanted[name], rel=0, abs=5e-3 if name in BINNED else 1e-6), name


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_gives_its_numbers(name: str) -> None:
    wanted = results_of(name)
    loaded = load(str(OLD / name), {})
    assert loaded.has_run_rows
    found, _ = prepare_loaded(loaded).evaluate()
    for of in set(RESULT) & set(wanted):
        assert_close(found[of], wanted[of])
    assert set(found["test_variants"]) >= set(wanted["about"]["test_variants"])
    if name == "linear":  # of a head over neighbors, it was of the calibrated predictor
        assert found["confusion"] == wanted["about"]["confusion"]
    old = wanted["predictors"]["scores"]
    assert list(found["predictors"]["scores"]) == list(old)
    for predictor, variants in old.items():
        assert set(variants) >= {"raw", "calibrated"}
        scores = found["predictors"]["scores"][predictor]
        assert [key for key in scores if key != "val_accuracy"] == list(variants)
        for variant in ("raw", "calibrated"):
            assert_close(scores[variant], variants[variant], tied=predictor != "distance")
        if "train_leave_one_out" in variants:
            assert scores["train_leave_one_out"] == pytest.approx(variants["train_leave_one_out"], abs=1e-6)
    assert found["predictors"].get("vote_share") == pytest.approx(wanted["predictors"].get("vote_share"), abs=1e-6)
    for fact in ("k", "bank", "calibration", "left_out_rows"):
        assert found["predictors"][fact] == wanted["predictors"][fact]


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_is_tested_from_the_command_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--test_only", "--checkpoint", str(OLD / name), "--output_dir", str(tmp_path)]) == 0
    wanted = results_of(name)
    found, said = json.loads((tmp_path / "results.json").read_text()), capsys.readouterr().out
    assert_close(found["val"], wanted["val"])
    for of in set(RESULT) & set(wanted):
        assert_close(found[of], wanted[of])
        assert f"{wanted[of]['nll']:.4f}" in said


@pytest.mark.parametrize("name", NAMES)
def test_a_classifier_of_an_old_run_predicts_what_was_scored(name: str) -> None:
    """Probabilities that count to the accuracies in its results.json, as trained and calibrated."""
    loaded, wanted = load(str(OLD / name), {}), results_of(name)
    batches = prepare_loaded(loaded).sets.test
    loaded = load(str(OLD / name), {})  # as it was read: nothing was fitted again
    x, target = (torch.cat([getattr(batch, part) for batch in batches.epoch()]) for part in ("x", "target"))
    for variant, scores in wanted["predictors"]["scores"][name].items():
        probabilities = loaded.model.predict(x, calibrated=variant == "calibrated")
        torch.testing.assert_close(probabilities.sum(1), torch.ones(len(x)))
        assert (probabilities.argmax(1) == target).double().mean().item() == pytest.approx(scores["accuracy"], abs=1e-6)
        nll = -probabilities[torch.arange(len(x)), target].double().log().mean().item()
        assert nll == pytest.approx(scores["nll"], abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_old_configuration_means_what_it_meant(name: str) -> None:
    # What runs did before these options existed.
    then: dict[str, Any] = {"standardize": False, "dropout_ramp": False, "split_seed": 0, "keep_duplicates": True}
    then |= {"proxy_weight": 0.0, "head_epochs": 0}
    given = {**read_yaml(str(OLD / name / "config.yaml")), **then}
    given["lr_attention"] = given["lr"]
    data = load_data(given)
    config = complete(given, data)
    saved = load(str(OLD / name), {}).config
    assert {**config.flat(), "output_dir": None} == {**saved.flat(), "output_dir": None}
    wanted = results_of(name)["about"]["data"]
    assert {part: data.summary[part] for part in wanted} == wanted


def test_an_old_run_goes_on_as_it_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer, average, bank and schedule: the second epoch is the one that the older version trained, both without dropout, which drew
    from a generator then."""
    monkeypatch.setattr(Dropout, "forward", lambda self, x: x)
    folder = tmp_path / "run"
    shutil.copytree(OLD / "interpolation", folder)
    run({"num_epochs": 2}, Action(resume=str(folder)))
    line = json.loads((folder / "metrics.jsonl").read_text())
    assert line["epoch"] == 2
    losses = {"knn_nll": 3.3313827280832533, "contrastive": 1.695687453443019, "linear_cross_entropy": 2.303934823039876}
    assert line["train"] == pytest.approx(losses, rel=1e-5)
    assert line["lr"] == pytest.approx(9.059233262386224e-07)
    assert line["grad_norm"] == pytest.approx(1.1045761108398438, rel=1e-4)
    assert line["val"]["nll"] == pytest.approx(2.286660686239496, rel=1e-5)
    assert line["val"]["accuracy"] == pytest.approx(0.13986013986013987)
