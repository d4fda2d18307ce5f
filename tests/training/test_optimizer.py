"""Which weights learn at which rate; and that a stop between two refreshes of the bank leaves no trace in what moves them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from classifiers import HEADS, AttnKnnHead
from classifiers.classifier import Classifier
from classifiers.neighbor_heads import NeighborHead
from config import Action
from inputs import store
from run.run import run
from tests.test_run import TINY, assert_same
from tests.test_train import CLASSES, batches, classifier, configured, state
from training.bank import build_bank
from training.optimizer import make_optimizer
from utils import Stopped

pytestmark = pytest.mark.usefixtures("without_a_stopwatch")
EMBEDDING: dict[str, Any] = {"embed_dim": 6, "k_train": 5}
EXTRAS = {"neighbor_self_attention": True, "prototypes": True, "label_bias": True, "values": "tabr"}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "knn": EMBEDDING,
    "attn-knn": {**EMBEDDING, **EXTRAS, "attention_heads": 2},
    "linear+knn": EMBEDDING,
    "linear+attn-knn": {**EMBEDDING, "attention_heads": 3},
}
PARTS = ("backbone", "projection", "attention", "head")
RATES = {"lr": 0.3, "lr_backbone": 0.02, "lr_projection": 0.05, "lr_attention": 0.07}


def made(kind: str) -> Classifier:
    return classifier(head=HEADS[kind](7, CLASSES, **KINDS[kind]))


def part_of_each(model: Classifier) -> dict[str, str]:
    """By name, told from the modules that they stand in; the rest of the head is its linear layer and its prior."""
    inside: list[tuple[str, nn.Module | None]] = [("backbone", model.backbone)]
    if isinstance(model.head, NeighborHead):
        inside.append(("projection", model.head.embedder))
        inside += [("attention", part) for part in (model.head.knn.weigh, model.head.knn.values) if isinstance(part, nn.Module)]
    known = {id(p): part for part, module in inside if module is not None for p in module.parameters()}
    return {name: known.get(id(p), "head") for name, p in model.named_parameters() if p.requires_grad}


def rates_of_each(model: Classifier, **given: Any) -> dict[str, tuple[str, float]]:
    """By name, the group and its peak rate; fails if a parameter is in two groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(configured(**given), model).param_groups
    listed = [(names[id(p)], (group["name"], group["peak_lr"])) for group in groups for p in group["params"]]
    assert len(listed) == len({name for name, _ in listed})
    return dict(listed)


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_weight_learns_once_and_at_the_rate_of_its_part(kind: str, optimizer: str) -> None:
    model = made(kind)
    rates = {"backbone": 0.02, "projection": 0.05, "attention": 0.07, "head": 0.3}
    parts = part_of_each(model)
    wanted = {"linear": {"backbone", "head"}, "knn": set(PARTS) - {"attention"}, "linear+knn": set(PARTS) - {"attention"}}
    assert set(parts.values()) == wanted.get(kind, set(PARTS))
    found = rates_of_each(model, optimizer=optimizer, **RATES)
    assert found == {name: (part, rates[part]) for name, part in parts.items()}


@pytest.mark.parametrize("part", ["backbone", "projection", "attention"])
@pytest.mark.parametrize("rate", [0.0, 0.6])
def test_a_rate_is_for_its_part_only_and_zero_is_a_rate(part: str, rate: float) -> None:
    model = made("linear+attn-knn")
    found = rates_of_each(model, lr=0.3, **{f"lr_{part}": rate})
    assert found == {name: (owner, rate if owner == part else 0.3) for name, owner in part_of_each(model).items()}


def test_without_rates_of_their_own_all_parts_learn_at_lr() -> None:
    found = rates_of_each(made("linear+attn-knn"), lr=0.3)
    assert {part for part, _ in found.values()} == set(PARTS)
    assert {rate for _, rate in found.values()} == {0.3}


def test_what_only_calibration_fits_is_in_no_group() -> None:
    found = rates_of_each(made("linear+attn-knn"))
    held = {name for name in dict(made("linear+attn-knn").named_parameters()) if name not in found}
    assert {name.rpartition(".")[2] for name in held} == {"log_temperature", "log_vote_temperature", "share_logit"}
    assert not any(name.endswith("prior.share_logit") for name in held)  # the prior learns, the share of the mixture does not


def test_weights_decay_in_every_part_and_biases_in_none() -> None:
    model = made("linear+attn-knn")
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    decays: dict[bool, set[str]] = {True: set(), False: set()}
    for group in make_optimizer(configured(weight_decay=0.05, **RATES), model).param_groups:
        assert group["weight_decay"] in (0.0, 0.05)
        decays[group["weight_decay"] > 0] |= {names[id(p)] for p in group["params"]}
    parts = part_of_each(model)
    assert {parts[name] for name in decays[True]} == set(PARTS)
    assert all(name.endswith("weight") and parameters[name].ndim == 2 for name in decays[True])
    assert {name for name in decays[False] if parameters[name].ndim > 1} == {"backbone.cls_token"}


@pytest.mark.parametrize("still", ["backbone", "projection", "attention"])
def test_a_part_whose_rate_is_zero_stands_still_while_the_others_move(still: str) -> None:
    model = made("linear+attn-knn")
    data = batches(31, 7)
    build_bank(model, data.plain())
    rates: dict[str, Any] = {"lr": 0.3, f"lr_{still}": 0.0}
    run = state(model, **rates)
    before: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in data.epoch():
        run.update([batch])
    parts = part_of_each(model)
    moved = {parts[name] for name, p in model.named_parameters() if name in parts and not torch.equal(p, before[name])}
    assert moved == set(PARTS) - {still}


# ---------------------------------------------------------------- stopped between two refreshes of the bank


class Interrupted(AttnKnnHead):
    """Sends its own process a signal at its n-th loss."""

    at, count = -1, 0

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        cls = Interrupted
        cls.count += 1
        if cls.count == cls.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(features, target, index)


HEADS.register("interrupted")(Interrupted)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    Interrupted.at = -1


# 88 rows: 8 batches an epoch, and round(0.37 * 8) = 3 between refreshes. With --calibrate none the panel has nothing to fit.
SAMPLED: dict[str, Any] = {
    **TINY, "head": "interrupted", "embed_dim": 8, "k_train": 5, "memory_update_freq": 0.37, "neighbor_sample": 0.4, "calibrate": "none",
    "batch_size": 11, "accumulate": 1, "num_epochs": 3, "lr_projection": 5e-3, "lr_attention": 2e-3, "lr_backbone": 8e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run({**SAMPLED, "output_dir": str(folder)}, Action())
    torch.use_deterministic_algorithms(False)
    return folder


@pytest.mark.parametrize("at", [4, 12, 17], ids=["between two", "where one is due", "after evaluation made a newer bank"])
def test_a_stop_in_mid_epoch_leaves_no_trace_in_weights_average_and_bank(at: int, whole: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    Interrupted.at, Interrupted.count = at, 0
    where = f"stopped by SIGTERM in epoch {at // 8 + 1}, batch {at % 8} of 8"
    with pytest.raises(Stopped, match=where):
        run({**SAMPLED, "output_dir": str(parts)}, Action())
    groups, facts = store.load(parts / "checkpoints" / "last")
    assert {"model", "ema", "bank", "training"} <= set(groups)
    assert (facts["training"]["place"]["updates"], facts["training"]["place"]["batch"]) == (at, at % 8)
    torch.rand(7)  # whatever else happened in between
    run({}, Action(resume=str(parts)))
    assert_same(whole, parts)
    last, best = (store.load(whole / "checkpoints" / name)[0] for name in ("last", "best"))
    assert {"model", "ema", "bank", "training"} <= set(last)  # so that there was something to compare
    assert not torch.equal(last["bank"]["embedding"], best["bank"]["embedding"])
