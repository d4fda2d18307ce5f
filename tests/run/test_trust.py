"""What the numbers of a run mean: the same for every head, kept, and recomputed from what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from classifiers import HEADS, LinearHead
from classifiers.metrics import detailed_metrics, standard_metrics
from config import Action
from evaluation.predictions import keep, read
from layers import LAYERS, TokenMixer
from run.checks import warn_of_few_rows, warn_of_known_rows
from run.complete import complete
from run.loaded import load
from run.parts import load_data, loader
from run.run import run
from tests.run.test_run import TINY
from utils import WARNINGS, BadOption

SMALL: dict[str, Any] = {**TINY, "num_epochs": 1, "embed_dim": 8, "k_train": 5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for head in ("linear", "linear+attn-knn"):
        made[head] = tmp_path_factory.mktemp("runs") / head
        run({**SMALL, "head": head, "calibrate": "head", "output_dir": str(made[head])}, Action())
    return made


def results_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("head", ["linear", "linear+attn-knn"])
def test_test_is_as_trained_and_test_calibrated_is_calibrated_for_every_head(runs: dict[str, Path], head: str) -> None:
    results = results_of(runs[head])
    own = "linear" if head == "linear" else "interpolation"
    assert results["test"] == results["predictors"]["scores"][own]["raw"]
    assert results["test_calibrated"] == results["predictors"]["scores"][own]["calibrated"]
    assert results["val_calibrated"]["nll"] <= results["val"]["nll"]
    assert results["test"] != results["test_calibrated"]


@pytest.mark.parametrize("head", ["linear", "linear+attn-knn"])
def test_every_mean_over_rows_comes_again_from_the_predictions(runs: dict[str, Path], head: str) -> None:
    tensors, metadata = read(runs[head])
    results, data = results_of(runs[head]), load_data(SMALL)
    assert tensors["row"].tolist() == list(range(len(data.test)))
    assert tensors["label"].tolist() == data.test.y.tolist()
    assert metadata["test_rows"] == results["about"]["data"]["test_sha256"] == data.summary["test_sha256"]
    assert metadata["own"] in json.loads(metadata["predictors"])
    for name, of_variant in results["predictors"]["scores"].items():
        for variant in ("raw", "calibrated"):
            log_probs = tensors[f"{name}.{variant}"]
            again = standard_metrics(log_probs, tensors["label"]) | detailed_metrics(log_probs, tensors["label"])
            assert again == pytest.approx(of_variant[variant], abs=1e-6)


@pytest.mark.parametrize("head", ["linear", "linear+attn-knn"])
def test_so_do_means_over_validation_rows_and_left_out_rows(runs: dict[str, Path], head: str) -> None:
    tensors, _ = read(runs[head])
    results, data = results_of(runs[head]), load_data(SMALL)
    assert data.val is not None
    assert tensors["validation/label"].tolist() == data.val.y.tolist()
    for name, wanted in {"raw": "val", "calibrated": "val_calibrated"}.items():
        assert standard_metrics(tensors[f"validation/{name}"], tensors["validation/label"]) == pytest.approx(results[wanted], abs=1e-6)
    votes = {n: s for n, s in results["predictors"]["scores"].items() if "train_leave_one_out" in s}
    assert set(votes) == set(results["predictors"]["scores"]) - {"linear", "interpolation"}
    for name, of_vote in votes.items():
        assert len(tensors[f"{name}.left_out"]) == results["predictors"]["left_out_rows"]
        assert tensors[f"{name}.left_out"].double().mean().item() == pytest.approx(of_vote["train_leave_one_out"], abs=1e-12)
        assert tensors[f"{name}.validation"].double().mean().item() == pytest.approx(of_vote["val_accuracy"], abs=1e-12)


def test_of_many_numbers_the_largest_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    log_probs, target = torch.randn(7, 13).log_softmax(1), torch.arange(7)
    keep(tmp_path, {"raw": {"linear": log_probs}}, target, own="linear", test_rows="x", most=90)
    tensors, _ = read(tmp_path)
    assert set(tensors) == {"row", "label", *(f"linear.raw.{part}" for part in ("largest", "classes", "label", "entropy"))}
    assert tensors["linear.raw.classes"].tolist() == log_probs.argsort(1, descending=True)[:, :10].tolist()
    torch.testing.assert_close(tensors["linear.raw.label"].float(), log_probs[range(7), range(7)], atol=3e-3, rtol=0)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    torch.testing.assert_close(tensors["linear.raw.entropy"].float(), entropy, atol=3e-3, rtol=0)


def test_the_seed_does_not_draw_the_rows() -> None:
    first, second = (load_data({**SMALL, "seed": seed}) for seed in (0, 1))
    other = load_data({**SMALL, "split_seed": 1})
    assert first.summary == second.summary
    assert other.summary["sha256"] != first.summary["sha256"]
    assert other.summary["test_sha256"] == first.summary["test_sha256"]


def test_label_noise_reaches_validation_rows_only_if_asked() -> None:
    clean, noisy = (load_data({**SMALL, "label_noise": "0.3", "noisy_val": value}) for value in (False, True))
    plain = load_data(SMALL)
    assert clean.val is not None
    assert noisy.val is not None
    assert plain.val is not None
    assert np.array_equal(clean.val.y, plain.val.y)
    assert (noisy.val.y != plain.val.y).sum() == round(0.3 * len(plain.val))
    assert np.array_equal(noisy.train.y, clean.train.y)


def test_noise_in_a_test_reaches_test_rows_only(runs: dict[str, Path], tmp_path: Path) -> None:
    """Confidence stays as the run fitted it, and the validation rows as they were."""
    folder = runs["linear+attn-knn"]
    run({"noise": 0.2, "output_dir": str(tmp_path / "noisy")}, Action(test_only=True, checkpoint=str(folder)))
    before, noisy = results_of(folder), results_of(tmp_path / "noisy")
    assert noisy["val"] == pytest.approx(before["val"])
    assert noisy["val_calibrated"] == pytest.approx(before["val_calibrated"])
    assert noisy["test"]["nll"] != before["test"]["nll"]
    run({"noise": 0.2, "recalibrate": True, "output_dir": str(tmp_path / "anew")}, Action(test_only=True, checkpoint=str(folder)))
    anew = results_of(tmp_path / "anew")
    assert anew["test"] == pytest.approx(noisy["test"])
    assert anew["val"]["nll"] != before["val"]["nll"]
    assert anew["test_calibrated"]["nll"] != noisy["test_calibrated"]["nll"]


def test_several_k_are_a_sweep_beside_the_result(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = runs["linear+attn-knn"]
    run({"k_eval": "1,3,7", "output_dir": str(tmp_path / "sweep")}, Action(test_only=True, checkpoint=str(folder)))
    before, sweep = results_of(folder), results_of(tmp_path / "sweep")
    assert sweep["test"] == pytest.approx(before["test"])
    assert sweep["test_calibrated"] == pytest.approx(before["test_calibrated"])
    assert sweep["predictors"]["k"] == 5
    by_k = sweep["predictors"]["by_k"]
    assert set(by_k) == {"raw", "calibrated"}
    assert set(by_k["raw"]["attention"]) == {"1", "3", "7"}
    run({"k_eval": "3", "output_dir": str(tmp_path / "single")}, Action(test_only=True, checkpoint=str(folder)))
    assert results_of(tmp_path / "single")["predictors"]["k"] == 3


def test_warnings_are_kept_and_shown(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(runs["linear"] / "checkpoints" / "best")
    given = {**SMALL, "head": "linear", "split_seed": 3, "pretrained": weights, "freeze_backbone": True}
    run({**given, "output_dir": str(tmp_path / "run")}, Action())
    results = results_of(tmp_path / "run")
    assert any("--split_seed 0 gives its split" in warning for warning in results["warnings"])
    out = capsys.readouterr()
    assert "warning: pretrained: that run split the rows otherwise" in out.err
    assert "to be known before these numbers are trusted:" in out.out
    assert [w for w in results_of(runs["linear"])["warnings"] if "calibrate: fitted to" not in w] == []


def test_a_backbone_that_has_seen_test_rows_is_a_warning(tmp_path: Path) -> None:
    wine = {**SMALL, "dataset": "wine", "head": "linear", "num_epochs": 1}
    run({**wine, "output_dir": str(tmp_path / "first")}, Action())
    given = {**wine, "test_seed": 3, "pretrained": str(tmp_path / "first"), "freeze_backbone": True}
    warnings = run({**given, "output_dir": str(tmp_path / "second")}, Action())["warnings"]
    assert any("it has seen test rows of this one; --test_seed 0 gives its split" in warning for warning in warnings)


def test_few_validation_rows_are_a_warning_of_what_was_fitted_to_them(runs: dict[str, Path], tmp_path: Path) -> None:
    """In the run and in a test that takes its calibration; not where nothing was fitted, nor with rows enough."""
    few = "calibrate: fitted to {} validation rows, and below 50 the calibrated scores are chance to a large part"
    rows = results_of(runs["linear"])["about"]["data"]["val"]
    assert rows < 50
    run({"output_dir": str(tmp_path / "again")}, Action(test_only=True, checkpoint=str(runs["linear"])))
    for found in (results_of(runs["linear"]), results_of(tmp_path / "again")):
        assert [w.startswith(few.format(rows)) for w in found["warnings"]] == [True]
    run({"calibrate": "none", "output_dir": str(tmp_path / "none")}, Action(test_only=True, checkpoint=str(runs["linear"])))
    assert results_of(tmp_path / "none")["warnings"] == []
    for count, said in ((49, True), (50, False), (1, True)):
        WARNINGS.clear()
        warn_of_few_rows(count)
        assert len(WARNINGS) == said
    assert WARNINGS[0].startswith("calibrate: fitted to 1 validation row, ")


def test_several_k_leave_the_number_for_foreign_rows_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    foreign = "fake(test=23, size=8, classes=3)"
    for name, ks in {"one": {}, "several": {"k_eval": "1,9"}}.items():
        given = {"ood": foreign, **ks, "output_dir": str(tmp_path / name)}
        run(given, Action(test_only=True, checkpoint=str(runs["linear+attn-knn"])))
    one, several = (results_of(tmp_path / name)["about"]["ood"] for name in ("one", "several"))
    assert several == pytest.approx(one)


def again(tensors: dict[str, torch.Tensor], name: str, *, detailed: bool = True) -> dict[str, float]:
    more = detailed_metrics(tensors[name], tensors["label"]) if detailed else {}
    return standard_metrics(tensors[name], tensors["label"]) | more


def test_several_k_views_and_a_bank_that_grows_come_again_from_the_predictions(runs: dict[str, Path], tmp_path: Path) -> None:
    given = {"k_eval": "1,7", "tta": 2, "continual": True, "output_dir": str(tmp_path)}
    run(given, Action(test_only=True, checkpoint=str(runs["linear+attn-knn"])))
    results, (tensors, _) = results_of(tmp_path), read(tmp_path)
    assert again(tensors, "interpolation.raw_tta") == pytest.approx(results["test"], abs=1e-6)
    assert again(tensors, "interpolation.calibrated_tta") == pytest.approx(results["test_calibrated"], abs=1e-6)
    for variant, of_variant in results["predictors"]["by_k"].items():
        for name, of_k in of_variant.items():
            for k, wanted in of_k.items():
                assert again(tensors, f"{name}.{variant}.k{k}", detailed=False) == pytest.approx(wanted, abs=1e-6)
    grown = results["about"]["continual"]
    assert again(tensors, "interpolation.continual") == pytest.approx(grown["after"], abs=1e-6)
    assert again(tensors, "interpolation.calibrated") == pytest.approx(grown["before"], abs=1e-6)


def test_many_k_are_kept_as_the_largest_where_one_predictor_is_kept_whole(tmp_path: Path) -> None:
    log_probs, target = torch.randn(7, 13).log_softmax(1), torch.arange(7)
    variants = {v: {"uniform": log_probs} for v in ("raw", "raw.k1", "raw.k5")}
    keep(tmp_path, variants, target, own="uniform", test_rows="x", most=2 * 7 * 13 - 1)
    tensors, _ = read(tmp_path)
    assert tensors["uniform.raw"].shape == (7, 13)
    assert "uniform.raw.k5" not in tensors
    assert tensors["uniform.raw.k5.largest"].shape == (7, 10)


def test_the_hash_of_the_test_rows_is_of_these_rows_and_of_nothing_else(tmp_path: Path) -> None:
    """Rows of a table are encoded by what the training split has; another split is another encoding of the same test rows."""
    given = {**SMALL, "dataset": "wine"}
    first, second = (load_data({**given, "split_seed": seed}) for seed in (0, 1))
    assert not np.array_equal(first.test.x, second.test.x)
    assert first.summary["test_sha256"] == second.summary["test_sha256"]
    assert len(first.summary["test_sha256"]) == 64
    rng, hashes = np.random.default_rng(0), set()
    x, y = rng.normal(size=(40, 3)), np.arange(40) % 2
    for change in ("nothing", "value", "label"):
        x_test, y_test = x[:9].copy(), y[:9].copy()
        x_test[4, 1] += change == "value"
        y_test[4] ^= change == "label"
        np.savez(tmp_path / f"{change}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
        hashes.add(load_data({**SMALL, "dataset": f"npz:{tmp_path / change}.npz"}).summary["test_sha256"])
    assert len(hashes) == 3


def test_a_last_batch_of_one_row_trains(tmp_path: Path) -> None:
    """88 training rows; features are standardized over the batch, and one row has no variance."""
    results = run({**SMALL, "head": "attn-knn", "batch_size": 29, "accumulate": 1, "num_epochs": 2, "output_dir": str(tmp_path)}, Action())
    assert results["about"]["data"]["train"] % 29 == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert np.isfinite([*line["train"].values(), *line["val"].values()]).all()
        assert set(line["embeddings"]) == {"effective_rank", "cosine_between_classes"}
        assert 1 <= line["embeddings"]["effective_rank"] <= 8
        assert -1 <= line["embeddings"]["cosine_between_classes"] <= 1


class OfAPlugin(LinearHead):
    """As a user's file may have it: it knows nothing of calibration."""


HEADS.register("of-a-plugin")(OfAPlugin)


@pytest.mark.parametrize("head", ["knn", "attn-knn", "linear+knn", "of-a-plugin"])
def test_every_head_has_four_columns(head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run({**SMALL, "head": head, "output_dir": str(tmp_path)}, Action())
    assert all(results[name]["nll"] > 0 for name in ("test", "test_calibrated", "val", "val_calibrated"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1 ")]
    assert [words.strip() for words in line[16:].split("  ") if words.strip()] == ["val", "val calibrated", "test", "test calibrated"]


class Logits(LinearHead):
    """Gives logits where log-probabilities are wanted."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features) + 3


HEADS.register("logits")(Logits)


def test_what_does_not_sum_to_one_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    line = r"^head must give log-probabilities: those of Logits.forward sum to \S+ after exp, not to 1, got 'logits'$"
    with pytest.raises(BadOption, match=line):
        run({**TINY, "head": "logits", "output_dir": str(tmp_path / "run")}, Action())
    assert not (tmp_path / "run").exists()


class Zeroth(TokenMixer):
    """A temperature of 0."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1) / 0).softmax(-1) @ v


@pytest.mark.parametrize("head", ["linear", "attn-knn"])
def test_a_layer_that_gives_nan_is_named_and_not_the_head(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS._parts, "Zeroth", Zeroth)
    line = r"^model must give finite features: NaN or infinity comes first out of Zeroth \(\S*1\.attn\), got 'vit'$"
    with pytest.raises(BadOption, match=line):
        run({**TINY, "num_layers": 2, "head": head, "layer": "Attention,Zeroth", "output_dir": str(tmp_path / "run")}, Action())
    assert not (tmp_path / "run").exists()


class Crowd(TokenMixer):
    """Reads the rows beside it."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v.mean(0, keepdim=True).expand_as(v)


@pytest.mark.parametrize(
    ("layer", "mixes"),
    [
        ("Attention,Crowd", True),
        ("Attention", False),
        ("KvtAttention(K=2)", False),
        ("SampledKnnAttention(K=2, num_samples=1)", False),
        ("ConvNNAttention(K=2, sampling_type='random', num_samples=3)", False),
        ("BranchConv(K=2, kernel_size=3)", False),
    ],
)
def test_rows_that_depend_on_those_beside_them_are_said(layer: str, mixes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS._parts, "Crowd", Crowd)
    given = {**TINY, "num_layers": 2, "d_hidden": 12, "num_epochs": 1, "layer": layer, "output_dir": str(tmp_path / "run")}
    warnings = run(given, Action())["warnings"]
    line = "model: what vit makes of a row depends on the rows beside it in a batch, and so does every score"
    assert (line in warnings) == mixes


def test_a_loaded_run_predicts_calibrated_probabilities(runs: dict[str, Path]) -> None:
    loaded = load(str(runs["linear"]), {})
    tensors, _ = read(runs["linear"])
    rows = loader(loaded.config, loaded.data, "test", loaded.device)
    assert rows is not None
    probabilities = torch.cat([loaded.model.predict(batch.x) for batch in rows.epoch()])
    torch.testing.assert_close(probabilities, tensors["linear.calibrated"].exp(), atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------- rows that are not new


def twice(folder: Path) -> str:
    """Every training row stored twice, with random labels; 30 of the 90 test rows are training rows."""
    x, y = load_digits().images[:290].astype(np.uint8) * 15, np.random.default_rng(0).integers(0, 3, 290)
    file = folder / "twice.npz"
    x_test, y_test = np.concatenate([x[200:], x[:30]])[-90:], np.concatenate([y[200:], y[:30]])[-90:]
    np.savez(file, x_train=np.concatenate([x[:200]] * 2), y_train=np.concatenate([y[:200]] * 2), x_test=x_test, y_test=y_test)
    return f"npz:{file}"


def test_copies_are_said_and_make_nothing_look_easy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A vote over the pixels of rows that are there twice: only with --keep_duplicates does each row find itself."""
    given = {"dataset": twice(tmp_path), "model": "vit", "head": "knn", "freeze_backbone": True, "val_fraction": 0.2, "k_train": 1}
    given |= {"num_layers": 1, "num_heads": 1, "d_hidden": 16, "d_mlp": 8, "patch_size": 4, "resize": 0, "contrastive_weight": 0.0}
    found = run({**given, "output_dir": str(tmp_path / "a")}, Action())
    kept = run({**given, "keep_duplicates": True, "output_dir": str(tmp_path / "b")}, Action())
    counts = found["about"]["data"]["duplicates"]
    assert counts["test_in_train"] + counts["test_in_val"] == 30
    assert counts["train"] > 100
    assert found["about"]["data"]["val"] + counts["val_in_train"] == kept["about"]["data"]["val"] == 80
    for results in (found, kept):
        assert sum("duplicates:" in warning for warning in results["warnings"]) >= 3
    left_out = [results["predictors"]["scores"]["uniform"]["train_leave_one_out"] for results in (found, kept)]
    assert left_out[0] < 0.5  # of three classes
    assert left_out[1] > 0.8  # most rows find their copy, and it has their class


def test_validation_rows_that_a_backbone_was_trained_on_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random labels: only who was trained on a row can know its class."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (400, 8, 8), np.uint8), rng.integers(0, 2, 400)
    everything, split = tmp_path / "all.npz", tmp_path / "split.npz"
    np.savez(everything, x_train=x[:300], y_train=y[:300], x_test=x[300:], y_test=y[300:])
    np.savez(split, x_train=x[:200], y_train=y[:200], x_val=x[200:300], y_val=y[200:300], x_test=x[300:], y_test=y[300:])
    small = {"num_layers": 1, "num_heads": 2, "d_hidden": 64, "d_mlp": 64, "patch_size": 8, "calibrate": "none", "baselines": False}
    seen = {**small, "dataset": f"npz:{everything}", "val_fraction": 0.0, "num_epochs": 60, "lr": 3e-3, "batch_size": 32}
    run({**seen, "output_dir": str(tmp_path / "seen")}, Action())
    later = {**small, "dataset": f"npz:{split}", "num_epochs": 1, "freeze_backbone": True, "pretrained": str(tmp_path / "seen")}
    results = run({**later, "output_dir": str(tmp_path / "later")}, Action())
    assert results["val"]["accuracy"] > results["test"]["accuracy"] + 0.2
    (warning,) = [w for w in results["warnings"] if "validation rows are easier" in w]
    assert "than test rows" in warning


@pytest.mark.parametrize(
    ("val", "test", "by_votes", "left_out", "said"),
    [
        (0.8, 0.8, 0.8, 0.8, ""),
        (0.9, 0.8, 0.8, 0.8, "than test rows (80.0%)"),
        (0.9, 0.9, 0.9, 0.8, "than training rows without themselves (80.0%)"),
        (0.9, 0.9, 0.8, 0.8, ""),  # a linear head that is better than its votes, on all rows
        (0.8, 0.79, 0.8, 0.79, ""),
        (0.8, 0.9, 0.8, 0.95, ""),  # as it should be: training rows lie where they were taught to
    ],
)
def test_validation_rows_that_look_too_easy(val: float, test: float, by_votes: float, left_out: float, said: str) -> None:
    """1,000 rows each; one standard error of a difference is below 2 points."""
    data = load_data({**SMALL, "dataset": "fake(train=2000, test=1000, size=4, classes=2)", "val_fraction": 0.5})
    config = complete({**SMALL, "dataset": data.name, "noise": 0.0, "pretrained": "weights.safetensors"}, data)
    scores: dict[str, Any] = {"linear": {}, "uniform": {"train_leave_one_out": left_out, "val_accuracy": by_votes}}
    found = {"test": {"accuracy": test}, "predictors": {"scores": scores, "left_out_rows": 1000}}
    WARNINGS.clear()
    warn_of_known_rows(config, data, found, {"accuracy": val})
    assert [said in warning for warning in WARNINGS] == [True] * bool(said)
