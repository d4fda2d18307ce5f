"""Every option alone, with all others at one plain setting, to a figure that would be noticed if it were bad; and every head alone with
its defaults, which is what collapsed before features were standardized and dropout grew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from classifiers import HEADS
from config import FIELDS, Action
from layers import LAYERS
from run.run import run
from tests.run.test_alone_again import CASES

# Layers and images: digits in a second, 2 narrow blocks and 4 epochs without the mixing, averaging and dropout that pay over 60.
CHEAP: dict[str, Any] = {"calibrate": "temperature", "baselines": False}
PLAIN: dict[str, Any] = {**CHEAP, "num_epochs": 4, "num_layers": 2, "d_hidden": 32, "d_mlp": 64, "lr": 6e-3}
PLAIN |= {"mixup_alpha": 0.0, "ema_decay": 0.0, "dropout": 0.0}
ATTN, KNN, BOTH = {"head": "attn-knn"}, {"head": "knn"}, {"head": "linear+knn"}
BRIEF = {**ATTN, "head_epochs": 0}
CONV, SAMPLED = {"layer": "ConvNNAttention"}, {"layer": "ConvNNAttention", "sampling_type": "spatial", "num_samples": 4}
BRANCH = {"layer": "BranchConv"}

IMAGES: dict[str, list[dict[str, Any]]] = {
    "patch_size": [{"patch_size": 4}],
    "num_layers": [{"num_layers": 3}],
    "num_heads": [{"num_heads": 2}],
    "d_hidden": [{"d_hidden": 48}],
    "d_mlp": [{"d_mlp": 96}],
    "dropout": [{"dropout": 0.1}],
    "attention_dropout": [{"attention_dropout": 0.1}],
    "token_dropout": [{"token_dropout": 0.25}],
    "layer": [{"layer": name} for name in LAYERS],
    "K": [{**CONV, "K": 3}, {"layer": "KvtAttention", "K": 3}],
    "convolution_type": [{**CONV, "convolution_type": "standard"}, {**CONV, "convolution_type": "depthwise-separable", "num_epochs": 6}],
    "softmax_topk_val": [{**CONV, "softmax_topk_val": False}],
    "sampling_type": [{**CONV, "sampling_type": name, "num_samples": 12} for name in ("random", "grid")],
    "num_samples": [SAMPLED],
    "sample_padding": [{**SAMPLED, "sample_padding": 1}],
    "magnitude_type": [{**CONV, "magnitude_type": name} for name in ("cosine", "euclidean")],
    "coordinate_encoding": [{**CONV, "coordinate_encoding": True}],
    "self_score": [{**SAMPLED, "self_score": "one"}],
    "branch_ratio": [{**BRANCH, "branch_ratio": 0.25}],
    "kernel_size": [{**BRANCH, "kernel_size": 5}],
    "sparse_mode": [{"layer": "SparseAttention", "sparse_mode": "strided", "sparse_context_window": 4}],
    "sparse_context_window": [{"layer": "SparseAttention", "sparse_context_window": 9}],
    "resize": [{"resize": 16}],
    "augment": [{**BRIEF, "augment": True}],
    "noise": [{"noise": 0.1}],
    "cutmix_alpha": [{**BRIEF, "cutmix_alpha": 0.5}],
    "tta": [{"tta": 3}],
    "use_amp": [{**BRIEF, "use_amp": True}],
}

# All else: wine (178 rows), a table and a small network, with the defaults and to the end.
FULL: dict[str, Any] = {"calibrate": "head", "baselines": True}
TABLE: dict[str, list[dict[str, Any]]] = {
    "model": [{"model": "mlp"}, {"model": "identity", "dataset": "iris", "lr": 0.05}],
    "dataset": [{"dataset": "iris"}],
    "head": [{**FULL, "head": name} for name in HEADS],
    "embed_dim": [{**ATTN, "embed_dim": 0}, {**ATTN, "embed_dim": 32}, {**KNN, "embed_dim": 256}],
    "standardize": [{**ATTN, "standardize": False}],
    "vote": [{**KNN, "vote": name} for name in ("uniform", "distance")],
    "k_train": [{**ATTN, "k_train": 5}],
    "attention_heads": [{**ATTN, "attention_heads": 1}],
    "distance_bias": [{**ATTN, "distance_bias": False}],
    "neighbor_self_attention": [{**ATTN, "neighbor_self_attention": True}],
    "prototypes": [{**ATTN, "prototypes": True}],
    "label_bias": [{**ATTN, "label_bias": True}],
    "values": [{**ATTN, "values": "tabr"}],
    "prior": [{**ATTN, "prior": "constant"}],
    "interpolation": [{**BOTH, "interpolation": 0.3}],
    "index": [{**KNN, "index": name} for name in ("ip", "hnsw", "ivf")],
    "recall": [{**KNN, "index": "ivf", "recall": 0.9}],
    "bank_cap": [{**KNN, "bank_cap": 60}],
    "bank_evict": [{**KNN, "bank_cap": 60, "bank_evict": "class-balanced"}],
    "shard_bank": [{**ATTN, "shard_bank": True}],
    "memory_update_freq": [{**KNN, "memory_update_freq": 0.5}],
    "neighbor_sample": [{**ATTN, "neighbor_sample": 0.25}],
    "contrastive_weight": [{**ATTN, "contrastive_weight": 0.0}],
    "proxy_weight": [{**ATTN, "proxy_weight": 3.0}],
    "contrastive_form": [{**ATTN, "contrastive_form": "margin"}],
    "contrastive_temperature": [{**ATTN, "contrastive_temperature": 0.3}],
    "contrastive_margin": [{**ATTN, "contrastive_form": "margin", "contrastive_margin": 0.2}],
    "hard_negatives": [{**ATTN, "hard_negatives": 0.5}],
    "entropy_reg": [{**ATTN, "entropy_reg": 0.1}],
    "val_fraction": [{"val_fraction": 0.3}, {**ATTN, "val_fraction": 0.0, "calibrate": "none"}],
    "split_seed": [{"split_seed": 1}],
    "test_seed": [{"test_seed": 1}],
    "subset": [{**ATTN, "subset": 0.5}],
    "label_noise": [{"label_noise": "0.1"}, {**ATTN, "label_noise": "0.2:asymmetric"}],
    "noisy_val": [{"label_noise": "0.1", "noisy_val": True}],
    "imbalance": [{**BOTH, "imbalance": 0.3}],
    "keep_duplicates": [{**KNN, "keep_duplicates": True}],
    "num_epochs": [{"num_epochs": 60}],
    "head_epochs": [{**ATTN, "head_epochs": 0}, {"head_epochs": 5}],
    "batch_size": [{"batch_size": 16}],
    "optimizer": [{"optimizer": "adam"}, {"optimizer": "sgd", "lr": 0.1}],
    "lr": [{"lr": 4e-3}],
    "lr_backbone": [{"lr_backbone": 3e-3}],
    "lr_projection": [{**ATTN, "lr_projection": 4e-3}],
    "lr_attention": [{**ATTN, "lr_attention": 4e-3}],
    "weight_decay": [{"weight_decay": 0.0}],
    "momentum": [{"optimizer": "sgd", "lr": 0.3, "momentum": 0.0}],
    "scheduler": [{"scheduler": name} for name in ("step", "plateau", "none")],
    "lr_step": [{"scheduler": "step", "lr_step": 10}],
    "lr_gamma": [{"scheduler": "step", "lr_step": 3, "lr_gamma": 0.3}],
    "warmup_epochs": [{"warmup_epochs": 0.0}],
    "criterion": [{"criterion": "MSE"}],
    "label_smoothing": [{"label_smoothing": 0.1}],
    "mixup_alpha": [{**ATTN, "mixup_alpha": 0.3}],
    "clip_grad_norm": [{"clip_grad_norm": 0.0}],
    "accumulate": [{**ATTN, "accumulate": 2}],
    "ema_decay": [{**ATTN, "ema_decay": 0.95}],
    "dropout_ramp": [{"dropout": 0.1, "dropout_ramp": True}],
    "select": [{"select": name} for name in ("nll", "last")],
    "patience": [{"patience": 2}],
    "k_eval": [{**KNN, "k_eval": "5"}],
    "k_ensemble": [{**KNN, "k_ensemble": "5,10"}],
    "adaptive_k": [{**ATTN, "adaptive_k": True}],
    "calibrate": [{"calibrate": name} for name in ("none", "head")],
    "continual": [{**KNN, "continual": True}],
    "baselines": [{"baselines": True}],
    "seed": [{"seed": 1}],
    "paired_init": [{"paired_init": True}],
    "deterministic": [{"deterministic": True}],
}


def test_every_option_is_here() -> None:
    """A new one needs a case, here or in test_alone_again.py."""
    assert set(IMAGES) | set(TABLE) | set(CASES) == set(FIELDS)
    assert len(IMAGES) + len(TABLE) + len(CASES) == len(FIELDS)


def named(cases: dict[str, list[dict[str, Any]]]) -> list[Any]:
    return [pytest.param(option, case, id="-".join([option, *map(str, case.values())])) for option in cases for case in cases[option]]


def assert_good(option: str, results: dict[str, Any], least: float, most_nll: float) -> None:
    assert option in results["about"]["config"]
    assert option not in results["about"]["ignored"]
    for variant in {"test", "test_calibrated"} & set(results):
        scores = results[variant]
        assert scores["accuracy"] >= least, (variant, scores)
        assert scores["nll"] <= most_nll, (variant, scores)


@pytest.mark.parametrize(("option", "case"), named(IMAGES))
def test_alone_on_images(option: str, case: dict[str, Any], tmp_path: Path) -> None:
    """The plain setting has 84 %, chance is 10 %. Over few neighbors a class token needs more epochs; crops of 8 x 8 pixels lose a lot."""
    least = 0.4 if case.get("sampling_type") == "spatial" or option in ("tta", "sparse_mode") else 0.65
    assert_good(option, run({**PLAIN, **case, "output_dir": str(tmp_path / "run")}, Action()), least, 1.2 if least > 0.5 else 2)


@pytest.mark.parametrize(("option", "case"), named(TABLE))
def test_alone_on_a_table(option: str, case: dict[str, Any], tmp_path: Path) -> None:
    """36 test rows; chance is 40 %."""
    assert_good(option, run({"dataset": "wine", **CHEAP, **case, "output_dir": str(tmp_path / "run")}, Action()), 0.88, 0.5)


# The last two move a row farther than its class does.
HARD = {**CHEAP, "num_epochs": 5, "num_layers": 2, "dropout": 0.3, "mixup_alpha": 0.3}


@pytest.mark.parametrize(
    ("head", "embed_dim"), [("attn-knn", 256), ("attn-knn", 0), ("knn", 0), ("linear+attn-knn", 32), ("linear+knn", 0)]
)
def test_a_head_over_neighbors_trains_alone(head: str, embed_dim: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run({**HARD, "head": head, "embed_dim": embed_dim, "output_dir": str(tmp_path / "run")}, Action())
    assert results["test"]["accuracy"] > 0.85
    assert "collapse" not in capsys.readouterr().err


def test_the_older_form_collapses_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the test above would find if features were not standardized, dropout did not grow, and the head had no epochs of its own."""
    older = {"standardize": False, "dropout_ramp": False, "head_epochs": 0, "num_layers": 4}
    results = run({**HARD, **older, "head": "attn-knn", "output_dir": str(tmp_path / "run")}, Action())
    assert results["test"]["accuracy"] < 0.7
    assert "collapse: rows of different classes have nearly the same embedding" in capsys.readouterr().err
