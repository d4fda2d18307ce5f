"""A configuration completed: what stays open is filled in, what has no effect is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

import config as flags
from config import Config
from evaluation import tables
from inputs.rows import Data
from inputs.yaml_file import read_yaml
from run.complete import complete
from run.parts import load_data
from utils import BadOption

FAKE = "fake(train=97, test=31, size=8, classes=3)"


def completed(**given: Any) -> tuple[Config, Data]:
    given = {"dataset": FAKE, **given}
    data = load_data(given)
    return complete(given, data), data


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What was said to be ignored, by its reason."""
    start = "ignored because of "
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(start)]
    return dict(line.removeprefix(start).rsplit(": ", 1) for line in lines)


def features(path: Path) -> str:
    x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return f"npz:{path}"


# ---------------------------------------------------------------- a configuration is complete

KINDS: dict[str, dict[str, Any]] = {
    "digits, linear": {"dataset": "digits"},
    "digits, attn-knn": {"dataset": "digits", "head": "attn-knn", "embed_dim": 28, "k_train": 13},
    "timm": {"model": "timm/test_vit", "dataset": "fake(train=97, test=31, size=37, classes=3)"},
    "table": {"dataset": "iris", "d_hidden": 23, "d_mlp": 29},
    "identity": {"model": "identity", "head": "knn", "k_train": 3},
}


def of_kind(kind: str, tmp_path: Path, **given: Any) -> Config:
    rows = {"dataset": features(tmp_path / "f.npz")} if kind == "identity" else {}
    return completed(**rows, **KINDS[kind], **given)[0]


def another(name: str, value: Any) -> Any:
    """A value that passes the option's own rule and is not this one."""
    field = flags.FIELDS[name]
    kind, choices = flags.kind_of(field), field.metadata["choices"]
    candidates = choices or {int: (7, 11), float: (0.37, 0.41), bool: (True, False), str: ("this", "that")}[kind]
    return next(candidate for candidate in candidates if candidate != value)


def assert_complete(config: Config) -> None:
    """Every field, by its annotation: a float may be a whole number, and nothing is None but where the annotation says so."""
    found = {}
    for topic, owner in flags.TOPICS.items():
        group = getattr(config, topic)
        assert type(group) is owner
        for name, hint in get_type_hints(owner).items():
            kinds = get_args(hint) or (hint,)
            value = getattr(group, name)
            assert type(value) in kinds or (type(value) is int and float in kinds), (name, value, hint)
            found[name] = value
    assert found == config.flat()
    flags.check(found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_value_of_its_type(kind: str, tmp_path: Path) -> None:
    config = of_kind(kind, tmp_path)
    assert_complete(config)
    assert_complete(config.but(lr=0.5))
    assert set(config.ignored) <= set(config.flat())
    assert all(isinstance(reason, str) and reason for reason in config.ignored.values())


@pytest.mark.parametrize("kind", KINDS)
def test_configurations_that_differ_in_what_is_ignored_only_are_equal(kind: str, tmp_path: Path) -> None:
    """Each ignored option with another value, one by one and all at once."""
    plain = of_kind(kind, tmp_path)
    typed = {name: another(name, plain.flat()[name]) for name in plain.ignored}
    flags.check(typed)
    assert {"k_train", "K", "layer", "views"} & set(typed)
    for given in [{name: value} for name, value in typed.items()] + [typed]:
        other = of_kind(kind, tmp_path, **given)
        assert other == plain, given
        assert other.ignored == plain.ignored, given
    assert of_kind(kind, tmp_path, lr=0.37) != plain


def test_an_option_that_the_call_of_the_layer_sets_is_not_described() -> None:
    config, data = completed(layer="KvtAttention(K=5)", K=7, num_samples=None, seed=11)
    assert config.ignored["K"] == "--layer KvtAttention(K=5)"
    text = tables.description(config, data.summary, data.shape, torch.nn.Linear(2, 3))
    assert "layer=KvtAttention(K=5)" in text
    assert "seed=11" in text
    assert "K=7" not in text
    assert "parameters:     9" in text
    assert "K=7" in tables.description(completed(layer="KvtAttention", K=7)[0], data.summary, data.shape, torch.nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("given", "rate"),
    [({"lr": 2e-3}, 5e-4), ({"lr": 1e-4}, 1e-4), ({"lr": 0.1, "optimizer": "sgd"}, None), ({"lr": 2e-3, "lr_attention": 1e-3}, 1e-3)],
    ids=str,
)
def test_attention_over_neighbors_learns_more_slowly_than_the_rest(given: dict[str, Any], rate: float | None) -> None:
    assert completed(head="attn-knn", **given)[0].training.lr_attention == rate


# ---------------------------------------------------------------- what has no effect


@pytest.mark.parametrize(
    ("given", "reason", "canonical"),
    [
        ({"head": "knn", "lr_projection": 0.1}, "--embed_dim 0", {"lr_projection": None}),
        ({"head": "attn-knn", "embed_dim": 0, "lr_projection": 0.1}, "--embed_dim 0", {"lr_projection": None}),
        ({"head": "linear+knn", "lr_attention": 0.1}, "--head linear+knn", {"lr_attention": None}),
        ({"head": "linear", "lr_attention": 0.1, "lr_projection": 0.1}, "--head linear", {"lr_projection": None, "lr_attention": None}),
        ({"head": "linear", "k_train": 7}, "--head linear", {"k_train": 16}),
        ({"head": "attn-knn", "criterion": "MSE"}, "--head attn-knn", {"criterion": "CrossEntropy"}),
        ({"head": "attn-knn", "baselines": False}, "--head attn-knn", {"baselines": True}),
        ({"head": "attn-knn", "contrastive_weight": 0.0, "contrastive_temperature": 0.2, "hard_negatives": 1.0},
         "--contrastive_weight 0", {"contrastive_temperature": 0.1, "hard_negatives": 0.0}),
        ({"head": "attn-knn", "contrastive_margin": 0.2}, "--contrastive_form temperature", {"contrastive_margin": 0.5}),
        ({"head": "knn", "model": "identity", "contrastive_weight": 0.7, "hard_negatives": 1.0},
         "a frozen backbone with --embed_dim 0", {"contrastive_weight": 0.0, "hard_negatives": 0.0}),
        ({"head": "knn", "feature_cache": "there", "views": 3},
         "a backbone in training (no --freeze_backbone)", {"views": 4, "feature_cache": None}),
        ({"head": "knn", "freeze_backbone": True, "views": 3}, "--no-augment", {"views": 4}),
        ({"freeze_backbone": True, "token_dropout": 0.5}, "--freeze_backbone", {"token_dropout": 0.0}),
        ({"freeze_backbone": True, "lr_backbone": 0.1, "cutmix_alpha": 1.0, "use_compiled": True},
         "--freeze_backbone", {"lr_backbone": None, "cutmix_alpha": 0.0, "use_compiled": False}),
        ({"head": "knn", "bank_evict": "class-balanced"}, "a bank without --bank_cap", {"bank_evict": "fifo"}),
        ({"head": "linear", "bank_evict": "class-balanced", "bank_cap": 9}, "--head linear", {"bank_cap": None, "bank_evict": "fifo"}),
        ({"head": "linear", "views": 2, "freeze_backbone": True, "augment": False}, "--no-augment", {"views": 4}),
        ({"layer": "KvtAttention(K=5)", "K": 7}, "--layer KvtAttention(K=5)", {"K": None}),
        ({"layer": "Attention*2,KvtAttention(K=5)", "K": 7, "num_samples": 3},
         "--layer Attention*2,KvtAttention(K=5)", {"K": None, "num_samples": None}),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_what_has_no_effect_is_ignored_for_a_reason(
    given: dict[str, Any], reason: str, canonical: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if given.get("model") == "identity":
        given = {**given, "dataset": features(tmp_path / "f.npz")}
    config, _ = completed(**given)
    assert told(capsys) == {reason: ", ".join(f"--{name}" for name in canonical)}
    values = config.flat()
    for name, value in canonical.items():
        assert config.ignored[name] == reason
        assert (values[name], type(values[name])) == (value, type(value)), name


@pytest.mark.parametrize(
    "given",
    [
        {"head": "attn-knn", "lr_projection": 0.1, "lr_attention": 0.1, "hard_negatives": 1.0, "bank_cap": 50, "bank_evict": "fifo"},
        {"head": "knn", "embed_dim": 8, "lr_projection": 0.1, "freeze_backbone": True, "contrastive_weight": 0.7, "feature_cache": "c"},
        {"head": "linear", "baselines": False, "criterion": "MSE"},
        {"head": "linear", "continual": True, "bank_cap": 50, "bank_evict": "class-balanced"},  # of the bank that grows
        {"head": "linear+knn", "criterion": "MSE", "vote": "distance"},
    ],
    ids=str,
)
def test_what_has_an_effect_is_kept(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = completed(**given)
    assert told(capsys) == {}
    assert {name: config.flat()[name] for name in given} == given
    assert not set(given) & set(config.ignored)


def test_its_own_configuration_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for head in ("linear", "knn", "attn-knn", "linear+knn"):
        config, _ = completed(head=head)
        (tmp_path / "c.yaml").write_text(flags.to_yaml(config))
        again, _ = completed(**read_yaml(str(tmp_path / "c.yaml")))
        assert again == config
    assert told(capsys) == {}


# ---------------------------------------------------------------- what is filled in


@pytest.mark.parametrize(
    ("given", "k"),
    [
        ({"head": "knn"}, 20), ({"head": "linear+knn"}, 20), ({"head": "knn", "vote": "softmax-cosine(temperature=0.1)"}, 20),
        ({"head": "knn", "vote": "distance"}, 16), ({"head": "attn-knn"}, 16), ({"head": "linear"}, 16),
        ({"head": "knn", "k_train": 7}, 7),
    ],
    ids=str,
)  # fmt: skip
def test_k_follows_from_the_vote(given: dict[str, Any], k: int) -> None:
    assert completed(**given)[0].head.k_train == k


def test_ready_made_features_are_a_frozen_backbone(tmp_path: Path) -> None:
    rows = features(tmp_path / "f.npz")
    plain, _ = completed(dataset=rows, model="identity", head="knn", vote="uniform()", k_train=3)
    assert (plain.training.num_epochs, plain.head.contrastive_weight) == (1, 0.0)
    assert completed(dataset=rows, model="identity", head="knn", embed_dim=4, k_train=3)[0].training.num_epochs > 1
    assert completed(dataset=rows, model="identity", head="linear+knn", k_train=3)[0].training.num_epochs > 1
    with pytest.raises(BadOption, match="vote uniform teaches the backbone nothing"):
        completed(dataset=rows, head="knn", vote="uniform()", contrastive_weight=0.0, proxy_weight=0.0, k_train=3)


def test_no_validation_rows_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    few = "fake(train=20, test=9, size=8, classes=10)"
    completed(dataset=few, head="linear+knn", k_train=3)
    said = capsys.readouterr().err
    assert "validation: no rows (--val_fraction 0.1 rounds to 0 of 20 rows, class by class), so the last epoch counts" in said
    assert "calibrate: none (no validation rows; the share of the vote stays at one half)" in said
    completed(val_fraction=0.0, head="attn-knn")
    said = capsys.readouterr().err
    assert "validation: no rows (--val_fraction 0.0)" in said
    assert "calibrate: none (no validation rows)" in said
    assert completed(val_fraction=0.0)[0].evaluation.calibrate == "none"
    assert "calibrate: none (no validation rows)" in capsys.readouterr().err
    with pytest.raises(BadOption, match=r"patience needs validation rows \(--val_fraction 0.1 rounds to 0 of 20 rows"):
        completed(dataset=few, patience=2)
