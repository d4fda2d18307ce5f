"""Options that a run would not use: which they are, and what makes them idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import config as flags
import dataset
from classifiers import HEADS
from config import Config
from utils import options_of, say

SIZES = ("patch_size", "num_layers", "num_heads", "d_hidden", "d_mlp")  # a timm model has its own
CONTRASTIVE = ("contrastive_form", "contrastive_temperature", "contrastive_margin", "hard_negatives")


def without_unused(config: Config, given: Mapping[str, Any], data: dataset.Data) -> Config:
    """Options without effect are unset, so that no record claims them; if they were asked for, it is said what makes them so."""
    off: dict[str, Any] = {}
    for owner, unset in unused(config, data):
        if named := [f"--{name}" for name in unset if name not in off and name in given and given[name] != unset[name]]:
            say(f"unused by {owner}: {', '.join(named)}")
        off = unset | off
    return dataclasses.replace(config, **off)


def unused(config: Config, data: dataset.Data) -> list[tuple[str, dict[str, Any]]]:
    """What makes which options idle, and their values then."""
    head, none = HEADS[config.head], dict.fromkeys
    known = options_of(head)
    of_model: dict[str, Any] = none(SIZES) if config.model.startswith("timm/") else {}
    if data.kind == "table":
        of_model |= {"noise": 0.0, "augment": False, "resize": 0, "cutmix_alpha": 0.0, "views": None}
    if config.model in ("mlp", "identity"):
        of_model |= none(("layer", "patch_size", "num_heads", "attention_dropout", *flags.LAYER_OPTIONS))
    if config.model == "identity":
        of_model |= none(("num_layers", "d_hidden", "d_mlp", "lr_backbone"))
    found: list[tuple[str, dict[str, Any]]] = [(f"{config.model} on {data.kind} rows", of_model)]
    if config.freeze_backbone:
        found += [("--freeze_backbone", {"lr_backbone": None, "cutmix_alpha": 0.0, "use_compiled": False})]
        found += [("--no-augment", none(["views"]))] if not config.augment else []
    else:
        found += [("a backbone in training (no --freeze_backbone)", none(("views", "feature_cache")))]
    elsewhere = {"views", "memory_update_freq"} if head.wants_bank else {"views"}
    if config.continual and not head.wants_bank:
        elsewhere |= {"bank_cap", "bank_evict"}  # of the bank that grows
    of_head = none(name for name in (*flags.NEIGHBOR_OPTIONS, "criterion") if name not in known and name not in elsewhere)
    of_head |= none(["compare_votes"] if head.wants_bank else ["lr_projection"])
    found += [(f"--head {config.head}", of_head | none([] if head.learned else ["lr_attention"]))]
    found += [("--embed_dim 0", none(["lr_projection"]))] if not projects(config) else []
    found += [("a bank without --bank_cap", none(["bank_evict"]))] if not config.bank_cap else []
    if frozen(config) and not projects(config):  # a contrastive loss could move nothing
        found += [("a frozen backbone with --embed_dim 0", {"contrastive_weight": 0.0, **none(CONTRASTIVE)})]
    elif not config.contrastive_weight:
        found += [("--contrastive_weight 0", none(CONTRASTIVE))]
    other = "contrastive_temperature" if config.contrastive_form == "margin" else "contrastive_margin"
    return [*found, (f"--contrastive_form {config.contrastive_form}", none([other]))]


def frozen(config: Config) -> bool:
    return config.freeze_backbone or config.model == "identity"


def projects(config: Config) -> bool:
    """Whether the head has a projection to embeddings; unset, one that learns to attend has."""
    return HEADS[config.head].learned if config.embed_dim is None else config.embed_dim > 0


def votes_only(config: Config) -> bool:
    """Whether the head is a vote that learns nothing, with no linear layer beside it."""
    known = options_of(HEADS[config.head])
    return "vote" in known and "criterion" not in known


def vote_name(config: Config) -> str:
    """Without its options: "softmax-cosine(temperature=0.1)"."""
    return (config.vote or "").partition("(")[0].strip()
