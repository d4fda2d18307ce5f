"""A configuration completed: what stays open is filled in, what has no effect is named, what can't work is refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import building

import config as flags
from config import Config
from dataset import Data
from run.checks import check_evaluation
from run.complete import complete
from run.parts import foreign_rows, load_data
from run.saved import check_same, with_absolute_paths
from training.bank import order_in_bank
from utils import BadOption

FAKE = "fake(train=97, test=31, size=8, classes=3)"
CPU = torch.device("cpu")


def completed(**given: Any) -> tuple[Config, Data]:
    given = {"dataset": FAKE, **given}
    data = load_data(given)
    return complete(given, data), data


def unused(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What was said to be unused, by whom."""
    lines = [line.removeprefix("unused by ") for line in capsys.readouterr().err.splitlines() if line.startswith("unused by")]
    return dict(line.split(": ", 1) for line in lines)


# ---------------------------------------------------------------- what has no effect


@pytest.mark.parametrize(
    ("given", "owner", "named"),
    [
        ({"head": "knn", "lr_projection": 0.1}, "--embed_dim 0", "lr_projection"),
        ({"head": "attn-knn", "embed_dim": 0, "lr_projection": 0.1}, "--embed_dim 0", "lr_projection"),
        ({"head": "linear+knn", "lr_attention": 0.1}, "--head linear+knn", "lr_attention"),
        ({"head": "linear", "lr_attention": 0.1, "lr_projection": 0.1}, "--head linear", "lr_projection lr_attention"),
        ({"head": "attn-knn", "criterion": "MSE"}, "--head attn-knn", "criterion"),
        ({"head": "attn-knn", "baselines": False}, "--head attn-knn", "baselines"),
        ({"head": "attn-knn", "contrastive_weight": 0.0, "contrastive_temperature": 0.2, "hard_negatives": 1.0},
         "--contrastive_weight 0", "contrastive_temperature hard_negatives"),
        ({"head": "attn-knn", "contrastive_margin": 0.2}, "--contrastive_form temperature", "contrastive_margin"),
        ({"head": "knn", "model": "identity", "contrastive_weight": 0.7, "hard_negatives": 1.0},
         "a frozen backbone with --embed_dim 0", "contrastive_weight hard_negatives"),
        ({"head": "knn", "feature_cache": "there", "views": 3},
         "a backbone in training (no --freeze_backbone)", "views feature_cache"),
        ({"head": "knn", "freeze_backbone": True, "views": 3}, "--no-augment", "views"),
        ({"freeze_backbone": True, "lr_backbone": 0.1, "cutmix_alpha": 1.0, "use_compiled": True},
         "--freeze_backbone", "lr_backbone cutmix_alpha use_compiled"),
        ({"head": "knn", "bank_evict": "class-balanced"}, "a bank without --bank_cap", "bank_evict"),
        ({"head": "linear", "bank_evict": "class-balanced", "bank_cap": 9}, "--head linear", "bank_cap bank_evict"),
        ({"head": "linear", "views": 2, "freeze_backbone": True, "augment": False}, "--no-augment", "views"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_what_has_no_effect_is_named_with_its_owner(
    given: dict[str, Any], owner: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if given.get("model") == "identity":
        given["dataset"] = features(tmp_path / "f.npz")
    config, _ = completed(**given)
    assert unused(capsys) == {owner: ", ".join(f"--{name}" for name in named.split())}
    for name in named.split():
        assert getattr(config, name) in (None, 0.0, False), name


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
    assert unused(capsys) == {}
    assert {name: getattr(config, name) for name in given} == given


def test_its_own_configuration_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for head in ("linear", "knn", "attn-knn", "linear+knn"):
        config, _ = completed(head=head)
        (tmp_path / "c.yaml").write_text(flags.to_yaml(config))
        again, _ = completed(**flags.read_yaml(str(tmp_path / "c.yaml")))
        assert again == config
    assert unused(capsys) == {}


# ---------------------------------------------------------------- what is filled in


@pytest.mark.parametrize(
    ("given", "k"),
    [
        ({"head": "knn"}, 20), ({"head": "linear+knn"}, 20), ({"head": "knn", "vote": "softmax-cosine(temperature=0.1)"}, 20),
        ({"head": "knn", "vote": "distance"}, 16), ({"head": "attn-knn"}, 16), ({"head": "linear"}, None),
        ({"head": "knn", "k_train": 7}, 7),
    ],
    ids=str,
)  # fmt: skip
def test_k_follows_from_the_vote(given: dict[str, Any], k: int | None) -> None:
    assert completed(**given)[0].k_train == k


def features(path: Path) -> str:
    x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return f"npz:{path}"


def test_ready_made_features_are_a_frozen_backbone(tmp_path: Path) -> None:
    rows = features(tmp_path / "f.npz")
    plain, _ = completed(dataset=rows, model="identity", head="knn", vote="uniform()", k_train=3)
    assert (plain.num_epochs, plain.contrastive_weight) == (1, 0.0)
    assert completed(dataset=rows, model="identity", head="knn", embed_dim=4, k_train=3)[0].num_epochs > 1
    assert completed(dataset=rows, model="identity", head="linear+knn", k_train=3)[0].num_epochs > 1
    with pytest.raises(BadOption, match="vote uniform teaches the backbone nothing"):
        completed(dataset=rows, head="knn", vote="uniform()", contrastive_weight=0.0, k_train=3)


def test_no_validation_rows_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    few = "fake(train=20, test=9, size=8, classes=10)"
    completed(dataset=few, head="linear+knn", k_train=3)
    said = capsys.readouterr().err
    assert "validation: no rows (--val_fraction 0.1 rounds to 0 of 20 rows, class by class), so the last epoch counts" in said
    assert "calibrate: none (no validation rows; lambda stays at one half)" in said
    completed(val_fraction=0.0, head="attn-knn")
    said = capsys.readouterr().err
    assert "validation: no rows (--val_fraction 0.0)" in said
    assert "calibrate: none (no validation rows)" in said
    completed(val_fraction=0.0)
    assert "calibrate" not in capsys.readouterr().err
    with pytest.raises(BadOption, match=r"patience needs validation rows \(--val_fraction 0.1 rounds to 0 of 20 rows"):
        completed(dataset=few, patience=2)


# ---------------------------------------------------------------- what can't work


@pytest.mark.parametrize("cap", range(3, 9))
def test_a_cap_that_would_lose_a_class(cap: int) -> None:
    data = load_data({"dataset": FAKE})
    stays = data.train.y[order_in_bank(len(data.train), 0).numpy()][-cap:]
    lost = sorted({0, 1, 2} - set(stays.tolist()))
    config = Config(head="knn", k_train=1, bank_cap=cap)
    if lost:
        rule = f"bank_cap keeps no row of {', '.join(map(str, lost))}; --bank_evict class-balanced does, got {cap}"
        with pytest.raises(BadOption, match=rule):
            building.check_neighbors(config, data)
    else:
        building.check_neighbors(config, data)
    building.check_neighbors(dataclasses.replace(config, bank_evict="class-balanced"), data)


def test_a_sample_has_neighbors_to_spare() -> None:
    assert completed(head="knn", k_train=5, neighbor_sample=0.08)[0].neighbor_sample == 0.08  # 7 of 88
    with pytest.raises(BadOption, match=r"neighbor_sample must leave at least k_train \+ 2 \(7\) of the bank's 88 rows, got 0.07"):
        completed(head="knn", k_train=5, neighbor_sample=0.07)
    with pytest.raises(BadOption, match="of the bank's 44 rows"):
        completed(head="knn", k_train=5, neighbor_sample=0.08, bank_cap=44)


def test_a_cache_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config, data = completed(freeze_backbone=True, feature_cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(BadOption, match="feature_cache must be a directory that can be written"):
        check_evaluation(config, data, CPU)


def test_foreign_rows_are_blamed_on_their_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, data = completed(dataset="digits")
    for name, rule in (
        ("digitz", r"ood must be one of .*\(did you mean 'digits'\?\), got 'digitz'"),
        ("npz:none.npz", "ood must be a file that can be read .*, got 'none.npz'"),
        ("cifar10", "ood must hold cifar-10-batches-py"),
        (FAKE, r"ood must have one channel: digits has 1, got 'fake\(.*\) with 3'"),
    ):
        with pytest.raises(BadOption, match=f"^{rule}"):
            foreign_rows(dataclasses.replace(config, data_path=str(tmp_path)), data, name, CPU)
    color, three = completed()
    two = "fake(train=8, test=5, size=8, channels=2)"
    with pytest.raises(BadOption, match="ood must have one channel, or 3: fake"):
        foreign_rows(color, three, two, CPU)
    rows, table = completed(dataset="wine")
    with pytest.raises(BadOption, match=r"ood must have the columns that the model was trained on, 13 of numbers .*, not 4"):
        foreign_rows(rows, table, "iris", CPU)
    assert "own rows" not in capsys.readouterr().err
    check_evaluation(dataclasses.replace(config, ood="digits"), data, CPU)
    assert "ood: these are the run's own rows" in capsys.readouterr().err


def test_files_of_foreign_rows_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = with_absolute_paths({"ood": "npz:a.npz", "dataset": "csv:b.csv:y"})
    assert given == {"ood": f"npz:{tmp_path}{os.sep}a.npz", "dataset": f"csv:{tmp_path}{os.sep}b.csv:y"}
    assert with_absolute_paths({"ood": "digits"}) == {"ood": "digits"}


def test_tables_and_images_are_told_apart() -> None:
    """An image model asked about a table, the other way round, and a table with other columns."""
    images, wine = load_data({"dataset": FAKE}), load_data({"dataset": "wine"})
    with pytest.raises(BadOption, match=r"^dataset has the rows of a table, and the model reads images"):
        load_data({"dataset": "wine"}, images.fitted)
    facts = {"classes": list(wine.classes), "shape": list(wine.shape), "config": {"resize": 0}}
    with pytest.raises(BadOption, match=r"^dataset has images, and the model reads the rows of a table"):
        check_same(images, facts)
    with pytest.raises(BadOption, match=r"^dataset must have the columns that the model was trained on, 13 of numbers"):
        load_data({"dataset": "iris"}, wine.fitted)


def test_features_of_other_rows_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, data = completed(freeze_backbone=True, num_layers=1, num_heads=1, d_hidden=6, d_mlp=7)
    model = building.build(config, data, CPU)
    kept = sets_of(config, data, model, CPU, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert before
    again = sets_of(config, data, model, CPU, None)
    assert sorted(tmp_path.rglob("*")) == before
    assert torch.equal(next(again.test.epoch()).x, next(kept.test.epoch()).x)
