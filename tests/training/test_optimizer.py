"""Which weights learn at which rate, and how the rate goes over time."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from classifiers import HEADS
from classifiers.classifier import Classifier
from classifiers.neighbor_heads import NeighborHead
from tests.training.made import CLASSES, batches, classifier, configured, state
from train_eval import step
from training.bank import build_bank
from training.optimizer import Schedule, make_optimizer

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
        inside += [("attention", part) for part in (model.head.vote.weigh, model.head.vote.values) if isinstance(part, nn.Module)]
    known = {id(p): part for part, module in inside if module is not None for p in module.parameters()}
    return {name: known.get(id(p), "head") for name, p in model.named_parameters() if p.requires_grad}


def rates_of_each(model: Classifier, **given: Any) -> dict[str, tuple[str, float]]:
    """By name, the group and its peak rate; fails if a parameter is in two groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(configured(**given).training, model).param_groups
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
    assert {name.rpartition(".")[2] for name in held} == {"log_temperature", "log_vote_temperature", "share_logit", "class_bias"}
    assert not any(name.endswith("prior.share_logit") for name in held)  # the prior learns, the share of the interpolation does not


def test_weights_decay_in_every_part_and_biases_in_none() -> None:
    model = made("linear+attn-knn")
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    decays: dict[bool, set[str]] = {True: set(), False: set()}
    for group in make_optimizer(configured(weight_decay=0.05, **RATES).training, model).param_groups:
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
        step(run, [batch])
    parts = part_of_each(model)
    moved = {parts[name] for name, p in model.named_parameters() if name in parts and not torch.equal(p, before[name])}
    assert moved == set(PARTS) - {still}


# ---------------------------------------------------------------- learning rate


def rates(updates: int, per_epoch: int = 5, **given: Any) -> list[float]:
    config = configured(lr=2.0, **given)
    schedule = Schedule(config.training, make_optimizer(config.training, classifier()), per_epoch)
    found = []
    for update in range(updates):
        schedule.before_update(update)
        found.append(schedule.lr)
    return found


def test_warm_up_is_a_line_to_the_peak():
    found = rates(12, num_epochs=4, warmup_epochs=1.4)  # 7 updates
    assert found == pytest.approx([2 * n / 8 for n in range(1, 8)] + [2.0] * 5)


def test_cosine_goes_from_the_peak_to_zero():
    found = rates(21, num_epochs=4, warmup_epochs=1, scheduler="cosine")  # 5 updates of warm-up, 15 of cosine
    assert found[5] == 2.0
    assert found[5:] == pytest.approx([1 + math.cos(math.pi * n / 15) for n in range(16)], abs=1e-12)
    assert found[20] == pytest.approx(0, abs=1e-15)  # the update after the last
    assert 0 < found[19] < 0.03
    assert found[5:] == sorted(found[5:], reverse=True)


def test_steps():
    found = rates(35, num_epochs=7, scheduler="step", lr_step=3, lr_gamma=0.5)
    assert found == pytest.approx([2.0] * 15 + [1.0] * 15 + [0.5] * 5)


def test_plateau_waits_for_the_loss_to_fall():
    config = configured(lr=2.0, scheduler="plateau", lr_step=1, lr_gamma=0.5)
    schedule = Schedule(config.training, make_optimizer(config.training, classifier()), 5)
    found = []
    #        new  new  stale stale(2 > 1)   new  stale  not lower: stale
    losses = [3.0, 2.0, 2.5, 2.1, 1.9, 1.95, 1.9, 1.0]
    for epoch, loss in enumerate(losses):
        schedule.before_update(5 * epoch)
        found.append(schedule.lr)
        schedule.after_epoch(loss)
    assert found == [2, 2, 2, 2, 1, 1, 1, 0.5]

    again = Schedule(config.training, make_optimizer(config.training, classifier()), 5)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    for loss in (1.5, 1.6, 1.7):
        schedule.after_epoch(loss)
        again.after_epoch(loss)
    assert again.factor(99) == schedule.factor(99) == 0.125


def test_other_schedules_do_not_look_at_the_loss():
    config = configured(lr=2.0, scheduler="none", lr_step=1)
    schedule = Schedule(config.training, make_optimizer(config.training, classifier()), 5)
    for _ in range(5):
        schedule.after_epoch(9.0)
    schedule.before_update(30)
    assert schedule.lr == 2.0


# ---------------------------------------------------------------- optimizer


def test_weight_decay_is_for_matrices_and_the_backbone_may_have_its_own_rate():
    model = classifier()
    optimizer = make_optimizer(configured(optimizer="adamw", lr=0.3, lr_backbone=0.03, weight_decay=0.05).training, model)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (group["peak_lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found == {
        "backbone.fc.weight": (0.03, 0.05),
        "backbone.fc.bias": (0.03, 0),
        "backbone.norm.weight": (0.03, 0),
        "backbone.norm.bias": (0.03, 0),
        "backbone.cls_token": (0.03, 0),
        "head.fc.weight": (0.3, 0.05),
        "head.fc.bias": (0.3, 0),
    }
    config = configured(lr=0.3, lr_backbone=0.03, num_epochs=2, warmup_epochs=1)
    optimizer = make_optimizer(config.training, model)
    Schedule(config.training, optimizer, 4).before_update(0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.03 / 5, 0.03 / 5, 0.3 / 5, 0.3 / 5])


def test_frozen_weights_are_left_out():
    model = classifier()
    model.backbone.requires_grad_(False)
    optimizer = make_optimizer(configured().training, model)
    assert [group["name"] for group in optimizer.param_groups] == ["head", "head"]


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimizers_by_name(name, kind):
    optimizer = make_optimizer(configured(optimizer=name, momentum=0.7).training, classifier())
    assert type(optimizer) is kind
    if name == "sgd":
        assert all(group["momentum"] == 0.7 and group["nesterov"] for group in optimizer.param_groups)
