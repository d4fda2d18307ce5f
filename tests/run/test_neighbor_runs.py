"""Runs whose head looks at neighbors, or whose backbone is frozen: resumed, tested again, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config import Action
from inputs import store
from run.complete import complete
from run.loaded import load
from run.parts import foreign_rows, load_data
from run.run import run
from tests.run.test_run import TINY, assert_same
from utils import BadOption, Diverged, Stopped

SMALL: dict[str, Any] = {**TINY, "head": "attn-knn", "embed_dim": 8, "k_train": 5, "num_epochs": 3}


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "options",
    [
        {"calibrate": "head"},
        {"head": "linear+attn-knn", "neighbor_sample": 0.4, "memory_update_freq": 2.0, "contrastive_form": "margin"},
        {"head": "knn", "ema_decay": 0.0, "memory_update_freq": 0.5, "accumulate": 1},
        {"freeze_backbone": True, "views": 2},
    ],
    ids=["attn-knn", "sampled, every 2 epochs", "knn, twice an epoch, no average", "frozen"],
)
def test_a_run_that_stopped_is_the_run_that_did_not(options: dict[str, Any], tmp_path: Path) -> None:
    given = {**SMALL, **options}
    run({**given, "output_dir": str(tmp_path / "whole")}, Action())
    with pytest.raises(Stopped, match="after epoch 1 of 3"):
        run({**given, "output_dir": str(tmp_path / "parts")}, Action(stop_after=1))
    torch.rand(7)
    run({}, Action(resume=str(tmp_path / "parts")))
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_frozen_run_resumes_on_the_features_that_it_began_with(plain: Path, tmp_path: Path) -> None:
    """Its backbone comes from another run: built anew without those weights, it would give other features."""
    given = {**SMALL, "freeze_backbone": True, "views": 1, "pretrained": str(plain)}
    run({**given, "output_dir": str(tmp_path / "whole")}, Action())
    with pytest.raises(Stopped):
        run({**given, "output_dir": str(tmp_path / "parts")}, Action(stop_after=1))
    run({}, Action(resume=str(tmp_path / "parts")))
    assert_same(tmp_path / "whole", tmp_path / "parts")


# ---------------------------------------------------------------- frozen


def test_features_are_computed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**SMALL, "freeze_backbone": True, "views": 2, "head": "linear+attn-knn", "feature_cache": str(tmp_path / "cache")}
    first = run({**given, "output_dir": str(tmp_path / "a")}, Action())
    assert capsys.readouterr().err.count("through the backbone") == 5  # train, two views, val, test
    second = run({**given, "output_dir": str(tmp_path / "b"), "lr": 1e-3}, Action())
    assert "through the backbone" not in capsys.readouterr().err
    assert first["test"] != second["test"]
    before = load(str(tmp_path / "a"), {}).model.backbone.state_dict()
    after = load(str(tmp_path / "b"), {}).model.backbone.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    # Another backbone, or damage, and they are computed anew.
    for entry in (tmp_path / "cache").glob("test-*/features-*"):
        entry.write_bytes(entry.read_bytes()[:-1] + b"\x07")
    run({**given, "output_dir": str(tmp_path / "c"), "seed": 1, "d_hidden": 4}, Action())
    assert capsys.readouterr().err.count("through the backbone") == 5
    third = run({**given, "output_dir": str(tmp_path / "d")}, Action())
    said = capsys.readouterr().err
    assert said.count("through the backbone") == 1
    assert "features: computed anew" in said
    assert third["test"] == first["test"]


def test_layers_with_the_same_weights_have_features_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**SMALL, "freeze_backbone": True, "augment": False, "num_epochs": 1, "feature_cache": str(tmp_path / "cache")}
    for layer in ("Attention", "KvtAttention(K=1)"):
        run({**given, "layer": layer, "output_dir": str(tmp_path / layer[:3])}, Action())
        assert capsys.readouterr().err.count("through the backbone") == 3


def test_frozen_equals_a_learning_rate_of_zero(tmp_path: Path) -> None:
    """The same head on the same features, once cached and once computed in every step."""
    given = {**SMALL, "augment": False, "noise": 0.0, "mixup_alpha": 0.0, "cutmix_alpha": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
    given |= {"ema_decay": 0.0, "weight_decay": 0.0}
    frozen = run({**given, "freeze_backbone": True, "clip_grad_norm": 0.0, "output_dir": str(tmp_path / "frozen")}, Action())
    still = run({**given, "lr_backbone": 0.0, "clip_grad_norm": 0.0, "output_dir": str(tmp_path / "still")}, Action())
    for name, value in frozen["test"].items():
        assert value == pytest.approx(still["test"][name], abs=1e-4), name


def test_ready_made_features(tmp_path: Path) -> None:
    """kNN over the rows of an npz as they are: scikit-learn's accuracy, far from the origin and on unequal scales too."""
    from sklearn.neighbors import KNeighborsClassifier

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(311, 7)) * np.arange(1, 8), np.arange(311) % 3
    x[:, 2] += 2.0 * y
    path = tmp_path / "features.npz"
    np.savez(path, x_train=x[:211], y_train=y[:211], x_test=x[211:], y_test=y[211:])
    given = dict(dataset=f"npz:{path}", model="identity", head="knn", vote="uniform", k_train=5, freeze_backbone=True, val_fraction=0.0)
    results = run({**given, "contrastive_weight": 0.0, "output_dir": str(tmp_path / "run")}, Action())
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    expected = KNeighborsClassifier(5).fit(unit[:211], y[:211]).predict_proba(unit[211:])
    right = (expected.argmax(1) == y[211:]).mean()
    assert results["predictors"]["scores"]["uniform"]["raw"]["accuracy"] == pytest.approx(right, abs=0.021)  # ties: the lowest class there
    one = KNeighborsClassifier(1).fit(unit[:211], y[:211]).score(unit[211:], y[211:])
    again = run({}, Action(test_only=True, checkpoint=str(tmp_path / "run")))
    assert again["test"] == results["test"]
    nearest = run({"k_eval": "1"}, Action(test_only=True, checkpoint=str(tmp_path / "run")))
    assert nearest["predictors"]["scores"]["uniform"]["raw"]["accuracy"] == pytest.approx(one)


def test_the_backbone_of_another_run(plain: Path, tmp_path: Path) -> None:
    """A plain vote over a finished run's frozen backbone: what that run said of its baselines."""
    given = {k: v for k, v in TINY.items() if k not in ("num_epochs", "lr", "ema_decay", "mixup_alpha", "cutmix_alpha", "augment")}
    given |= {"pretrained": str(plain), "freeze_backbone": True, "head": "knn", "vote": "uniform", "output_dir": str(tmp_path)}
    found = run(given, Action())["predictors"]["scores"]["uniform"]["raw"]
    there = json.loads((plain / "results.json").read_text())["predictors"]["scores"]["uniform"]["raw"]
    assert found["accuracy"] == there["accuracy"]


# ---------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "mixed"
    return folder, run({**SMALL, "head": "linear+attn-knn", "calibrate": "head", "output_dir": str(folder)}, Action())


def test_all_predictors_side_by_side(finished: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, results = finished
    predictors = results["predictors"]["scores"]
    assert list(predictors) == ["linear", "uniform", "distance", "attention", "interpolation"]
    assert all(set(scores) >= {"raw", "calibrated"} for scores in predictors.values())
    assert results["test_calibrated"] == predictors["interpolation"]["calibrated"]
    assert results["about"]["test_variants"] == predictors["interpolation"]
    assert 0 <= predictors["uniform"]["train_leave_one_out"] <= 1
    assert sum(map(sum, results["about"]["confusion"])) == 31
    assert json.loads((folder / "results.json").read_text())["predictors"] == json.loads(json.dumps(results["predictors"]))


def test_testing_again_gives_the_same(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, results = finished
    again = run({}, Action(test_only=True, checkpoint=str(folder)))
    assert again["test"] == results["test"]
    assert again["predictors"] == results["predictors"]
    assert again["val"] == pytest.approx(results["val"])


@pytest.mark.parametrize(
    "given",
    [{"k_eval": "3,5,7"}, {"k_ensemble": "2,4"}, {"adaptive_k": True}, {"tta": 3}, {"calibrate": "none"}, {"calibrate": "temperature"}],
    ids=lambda given: next(iter(given)) + str(next(iter(given.values()))),
)
@pytest.mark.parametrize("head", ["linear+attn-knn", "linear"])
def test_other_evaluations_of_a_checkpoint(
    head: str, given: dict[str, Any], finished: tuple[Path, dict[str, Any]], plain: Path, tmp_path: Path
) -> None:
    folder = finished[0] if head != "linear" else plain
    results = run({**given, "output_dir": str(tmp_path)}, Action(test_only=True, checkpoint=str(folder)))
    predictors = results["predictors"]["scores"]
    if "k_eval" in given:
        k = results["predictors"]["k"]
        assert k == (5 if head != "linear" else 16)  # that of training: several are a table beside it
        by_k = results["predictors"]["by_k"]
        assert {variant: list(of["uniform"]) for variant, of in by_k.items()} == {"raw": [3, 5, 7], "calibrated": [3, 5, 7]}
        if k in by_k["raw"]["uniform"]:
            assert by_k["raw"]["uniform"][k]["accuracy"] == predictors["uniform"]["raw"]["accuracy"]
    if "tta" in given:
        assert set(predictors["uniform"]) >= {"raw", "raw_tta", "calibrated", "calibrated_tta"}
        assert predictors["uniform"]["raw"]["nll"] != predictors["uniform"]["raw_tta"]["nll"]
    if "calibrate" in given:
        kind = given["calibrate"]
        assert ("calibrated" in predictors["uniform"]) == (kind != "none")
        if kind == "temperature":  # one temperature changes no decision
            assert predictors["linear"]["calibrated"]["accuracy"] == predictors["linear"]["raw"]["accuracy"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    results = run({**TINY, "num_epochs": 2, "output_dir": str(folder)}, Action())
    assert list(results["predictors"]["scores"]) == ["linear", "uniform", "distance", "attention"]
    assert results["test"] == results["predictors"]["scores"]["linear"]["raw"]
    return folder


def test_rows_from_elsewhere(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    given = {"ood": "fake(train=8, test=23, size=8, channels=1)", "output_dir": str(tmp_path)}
    results = run(given, Action(test_only=True, checkpoint=str(finished[0])))
    assert results["about"]["ood"]["rows"] == 23
    assert 0 <= results["about"]["ood"]["auroc_distance"] <= 1
    assert 0 <= results["about"]["ood"]["auroc_confidence"] <= 1


@pytest.mark.parametrize("evict", ["fifo", "class-balanced"])
def test_a_bank_that_grows_while_it_is_used(evict: str, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Twice the same test rows: the second time, each has its own copy with its true label in the bank."""
    data = np.random.default_rng(0).integers(0, 256, (120, 8, 8, 3), np.uint8)
    labels = np.random.default_rng(1).integers(0, 3, 120)
    x, y = np.concatenate([data, data]), np.concatenate([labels, labels])
    np.savez(tmp_path / "twice.npz", x_train=data[:30], y_train=np.arange(30) % 3, x_test=x, y_test=y)
    given = {"dataset": f"npz:{tmp_path / 'twice.npz'}", "continual": True, "k_eval": "1", "head": "knn", "vote": "uniform", "noise": 0.0}
    given |= {"bank_evict": evict, "output_dir": str(tmp_path / "run"), "num_epochs": 1}
    found = run({**SMALL, **given}, Action())["about"]["continual"]
    assert found["before"]["accuracy"] < 0.45  # chance
    assert found["after"]["accuracy"] >= 0.5  # each of the second half has joined before, at distance 0
    assert found["bank"] == 27 + 240
    order = np.argsort(y, kind="stable")  # as folders are: for a while only one class is new
    np.savez(tmp_path / "twice.npz", x_train=data[:30], y_train=np.arange(30) % 3, x_test=x[order], y_test=y[order])
    capped = run({**SMALL, **given, "bank_cap": 27}, Action(overwrite=True))["about"]["continual"]
    assert capped["bank"] == 27


def test_rows_of_another_set_are_tested_with_the_calibration_of_the_run(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    other = {"dataset": "fake(train=50, test=17, size=8, classes=3)", "output_dir": str(tmp_path)}
    results = run(other, Action(test_only=True, checkpoint=str(finished[0])))
    assert sum(map(sum, results["about"]["confusion"])) == 17
    assert "calibrated" in results["predictors"]["scores"]["attention"]


def test_baselines_are_shown_when_asked_for_later(tmp_path: Path) -> None:
    run({**TINY, "num_epochs": 1, "baselines": False, "output_dir": str(tmp_path / "run")}, Action())
    assert "predictors" not in json.loads((tmp_path / "run" / "results.json").read_text())
    test_only = Action(test_only=True, checkpoint=str(tmp_path / "run"))
    assert "predictors" not in run({}, test_only)
    assert list(run({"baselines": True}, test_only)["predictors"]["scores"]) == ["linear", "uniform", "distance", "attention"]


def test_what_is_said_again_changes_nothing(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    given = {"calibrate": "head", "k_eval": "5", "output_dir": str(tmp_path)}
    again = run(given, Action(test_only=True, checkpoint=str(finished[0])))
    assert again["test"] == finished[1]["test"]
    assert again["predictors"]["scores"] == finished[1]["predictors"]["scores"]


def test_a_linear_head_whose_training_rows_lack_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(40) % 2, x_test=x[:9], y_test=np.arange(9) % 3)
    results = run({**TINY, "num_epochs": 1, "dataset": f"npz:{tmp_path / 'd.npz'}", "output_dir": str(tmp_path / "run")}, Action())
    assert "predictors" not in results
    assert "baselines: none; there is no training row of 2" in capsys.readouterr().err


def test_foreign_tables_keep_their_units(tmp_path: Path) -> None:
    """Rows that are five times as large and far away: in the run's units they are so too, in their own they would not be."""
    x, y = np.random.default_rng(0).normal(size=(50, 5)), np.arange(50) % 2
    for name, rows in (("home", x), ("far", 5 * x + 100)):
        np.savez(tmp_path / f"{name}.npz", x_train=rows[:40], y_train=y[:40], x_test=rows[40:], y_test=y[40:])
    given = {"dataset": f"npz:{tmp_path / 'home.npz'}"}
    data = load_data(given)
    config = complete(given, data)
    found = foreign_rows(config, data, f"npz:{tmp_path / 'far.npz'}", torch.device("cpu")).split.x
    mean, std = np.array(data.fitted["mean"]), np.array(data.fitted["std"])
    np.testing.assert_allclose(found, (5 * x[40:] + 100 - mean) / std, rtol=1e-5)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"k_train": 89}, "k_train must be at most the number of rows in the bank \\(88\\), got 89"),
        ({"k_eval": "3,99"}, "k_eval must be at most the number of rows in the bank \\(88\\)"),
        ({"bank_cap": 4, "bank_evict": "class-balanced"}, "k_train must be at most the number of rows in the bank \\(4\\), got 5"),
        ({"embed_dim": 10}, "embed_dim must be a multiple of --attention_heads \\(4\\), got 10"),
        ({"embed_dim": 0}, "embed_dim 0 leaves 6 features, whose number must be a multiple of --attention_heads \\(4\\)"),
        ({"bank_cap": 4}, "bank_cap keeps no row of 1; --bank_evict class-balanced does, got 4"),
        ({"neighbor_sample": 0.05}, "neighbor_sample must leave at least k_train \\+ 2 \\(7\\) of the bank's 88 rows, got 0.05"),
        ({"ood": "digitz"}, "ood must be one of .*did you mean 'digits'.*, got 'digitz'"),
        ({"ood": "iris"}, "ood must have rows like those of"),
        ({"index": ""}, "index must not be empty, got ''"),
        ({"index": "IVF89,Flat"}, "index must have at most as many lists as the bank has rows \\(88\\), not 89"),
        ({"index": "IVF40,Flat", "bank_cap": 39}, "index must have at most as many lists as the bank has rows \\(39\\), not 40"),
        ({"index": "PQ4"}, "index must have at most as many values of a code as the bank has rows \\(88\\), not 256"),
        ({"head": "knn", "vote": "uniform", "contrastive_weight": 0.0, "proxy_weight": 0.0}, "vote uniform teaches the backbone nothing"),
        ({"head": "knn", "vote": "unifrom"}, "did you mean 'uniform'"),
        ({"head": "attnknn"}, "did you mean 'attn-knn'"),
        ({"index": "flatt"}, "index must be one of"),
        ({"ood": "npz:nowhere.npz"}, "nowhere.npz"),
        ({"tta": 2, "dataset": "iris", "augment": False}, "tta needs images"),
        ({"head": "linear", "k_eval": "500"}, "k_eval must be at most the number of rows in the bank"),
        ({"head": "linear", "k_eval": "a,b"}, "k_eval must be whole numbers"),
        ({"head": "linear", "baselines": False, "continual": True}, "continual needs a bank"),
        ({"calibrate": "head", "val_fraction": 0.0}, "calibrate needs validation rows"),
        ({"contrastive_margin": 1.5}, "contrastive_margin must be between -1 and 1"),
        ({"bank_cap": 2, "k_train": 1}, "bank_cap must be at least the number of classes \\(3\\), got 2"),
        ({"index": "IVF16,PQ128"}, "index must be one of"),
        ({"model": "identity"}, "model must be one for images"),
    ],
)
def test_refused_before_anything_is_trained(given: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=rule):
        run({**SMALL, **given, "output_dir": str(tmp_path / "run")}, Action())
    assert not (tmp_path / "run").exists()


def test_a_class_without_training_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(40) % 2, x_test=x[:9], y_test=np.arange(9) % 3)
    with pytest.raises(BadOption, match="head attn-knn votes for classes of training rows; there is none of 2"):
        run({**SMALL, "dataset": f"npz:{tmp_path / 'd.npz'}", "output_dir": str(tmp_path / "run")}, Action())


def test_a_damaged_bank(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = finished[0] / "checkpoints" / "best"
    (path,) = folder.glob("bank-*.safetensors")
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-3] + b"\x00\x01\x02")
        with pytest.raises(BadOption, match=r"checkpoint is damaged: bank-\w+.safetensors does not have the SHA-256"):
            run({"output_dir": str(tmp_path)}, Action(test_only=True, checkpoint=str(finished[0])))
    finally:
        path.write_bytes(whole)
    groups, facts = store.load(folder)
    groups["bank"]["embedding"] = groups["bank"]["embedding"][:-1]
    store.save(tmp_path / "short", groups, facts)
    with pytest.raises(BadOption, match="bank must be whole"):
        run({"output_dir": str(tmp_path)}, Action(test_only=True, checkpoint=str(tmp_path / "short")))


def test_diverging_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"diverged|NaN"):
        run({**SMALL, "lr": 1e18, "clip_grad_norm": 0.0, "optimizer": "sgd", "output_dir": str(tmp_path / "run")}, Action())
