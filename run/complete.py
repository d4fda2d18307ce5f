"""A configuration completed: what was typed, presets and defaults, less what has no effect in this run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import config as flags
import layers
from classifiers import HEADS
from config import Config
from inputs.rows import Data
from run.checks import absent_classes, check_neighbors, check_validation
from run.presets import with_presets
from utils import options_of, parse_parts, say

DEFAULT_K, DINO_K = 16, 20  # neighbors in training, and of the baselines of a head without a bank
MOST_ROWS = 100_000  # of a training split that gets baselines and epochs of the head alone unasked
# NOTE: a projection learns from features that move under it until the rate has fallen to nothing, by augmented and mixed rows that the bank
# does not hold. Over those of the finished backbone (docs/results.md): a ResNet 42.8 to 44.7 % in 4 epochs and 45.2 in 12, digits 97.8 to
# 98.3 % with an NLL of .098 in the place of .179.
HEAD_EPOCHS = 10
# NOTE: attention over neighbors starts as a good vote, by cosine. At --lr 2e-3 with MixUp it grew sure of itself faster than the embedding
# grew better, and the embedding then shrank to few directions: 91.9 % on digits after 15 epochs; at 5e-4 96.9 % (linear head: 96.1 %).
ATTENTION_LR = 5e-4
# NOTE: measured on a ResNet from random weights, 284 steps (docs/results.md): votes taught it too slowly, and its features, standardized,
# found worse neighbors. A small ViT learns more from votes alone.
PROXIES = 3.0
DEFAULTS = {name: f.default for name, f in flags.FIELDS.items() if name in flags.TOPIC_OF and f.default is not dataclasses.MISSING}

SIZES = ("patch_size", "num_layers", "num_heads", "d_hidden", "d_mlp")  # a timm model has its own
CONTRASTIVE = ("contrastive_form", "contrastive_temperature", "contrastive_margin", "hard_negatives")
DEFAULT = object()  # the value that an option has when nobody gives one


def complete(given: Mapping[str, Any], data: Data) -> Config:
    """The configuration with nothing left open, and checked across options."""
    values = with_defaults(given, data.shape, data.summary)
    idle: dict[str, tuple[str, Any]] = {}
    for reason, names in without_effect(values, data):
        idle |= {name: (reason, value) for name, value in names.items() if name not in idle}
    neutral = {name: value for name, (_, value) in idle.items() if value is not DEFAULT}
    effective = {name: value for name, value in given.items() if name not in idle} | neutral
    config = Config.of(with_defaults(effective, data.shape, data.summary), {name: reason for name, (reason, _) in idle.items()})
    tell_ignored(config, given)
    if votes_only(values) and frozen(values) and not projects(values) and "num_epochs" not in given:
        config = config.but(num_epochs=1, warmup_epochs=0.0)
        say("num_epochs: 1 (a plain vote over a frozen backbone has only its prior to learn)")
    if config.evaluation.baselines and not HEADS[config.head.head].wants_bank and (absent := absent_classes(data)):
        config = config.but(baselines=False)
        say(f"baselines: none; there is no training row of {', '.join(absent[:10])}")
    if data.val is None and "calibrate" not in given:
        config = config.but(calibrate="none")
    check_neighbors(config, data)
    check_validation(config, data)
    return config


def with_defaults(given: Mapping[str, Any], shape: tuple[int, ...], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with a value, whether it has an effect or not."""
    values = {**DEFAULTS, **with_presets(given, shape)}
    head = HEADS[values["head"]]
    known, wants_bank = options_of(head), head.wants_bank
    values.setdefault("k_train", DINO_K if "vote" in known and weights_name(values) == "softmax-cosine" else DEFAULT_K)
    if head.learned and values["lr_attention"] is None and values["optimizer"] != "sgd":
        values["lr_attention"] = min(values["lr"], ATTENTION_LR)
    fresh = values["model"].startswith("timm/") and not (values["pretrained"] or frozen(values))
    values.setdefault("proxy_weight", PROXIES if wants_bank and fresh else 0.0)
    learns = not (frozen(values) or values["proxy_weight"])
    values.setdefault("standardize", wants_bank and (projects(values) or learns))
    values.setdefault("dropout_ramp", wants_bank)
    learned = wants_bank and (head.learned or projects(values))
    values.setdefault("head_epochs", HEAD_EPOCHS if learned and not frozen(values) and summary["train"] <= MOST_ROWS else 0)
    values.setdefault("baselines", summary["train"] <= MOST_ROWS)
    return values


def tell_ignored(config: Config, given: Mapping[str, Any]) -> None:
    """Names the options that were given a value and have no effect, by what makes it so."""
    now = config.flat()
    typed = {name: reason for name, reason in config.ignored.items() if name in given and given[name] != now[name]}
    for reason, names in flags.by_reason(typed).items():
        say(f"ignored because of {reason}: {', '.join(f'--{name}' for name in names)}")


# ---------------------------------------------------------------- what has no effect


def without_effect(values: Mapping[str, Any], data: Data) -> list[tuple[str, dict[str, Any]]]:
    """What makes which options idle, and the values that they have then."""
    model, head = values["model"], HEADS[values["head"]]
    of_model: dict[str, Any] = default(SIZES) if model.startswith("timm/") else {}
    if data.kind == "table":
        of_model |= {"noise": 0.0, "augment": False, "resize": 0, "cutmix_alpha": 0.0, **default(["views"])}
    if model in ("mlp", "identity"):
        of_model |= default(("layer", "patch_size", "num_heads", "attention_dropout", "token_dropout", *flags.LAYER_OPTIONS))
    if model == "identity":
        of_model |= default(("num_layers", "d_hidden", "d_mlp", "lr_backbone")) | {"proxy_weight": 0.0, "head_epochs": 0}
    if data.kind != "files":
        of_model |= {"skip_broken": False}
    found: list[tuple[str, dict[str, Any]]] = [(f"--model {model} on {data.kind} rows", of_model)]
    if model not in ("mlp", "identity"):
        found += [(f"--layer {values['layer']}", default(idle_layer_options(values["layer"])))]
    if values["freeze_backbone"]:
        unmoved = {
            **default(["lr_backbone", "token_dropout"]),
            "cutmix_alpha": 0.0,
            "proxy_weight": 0.0,
            "use_compiled": False,
            "dropout_ramp": False,
            "head_epochs": 0,
        }
        found += [("--freeze_backbone", unmoved)]
        found += [("--no-augment", default(["views"]))] if not values["augment"] else []
    else:
        found += [("a backbone in training (no --freeze_backbone)", default(("views", "feature_cache")))]
    found += [("training (it goes with --test_only)", default(["recalibrate"]))]
    known, elsewhere = options_of(head), {"views", "memory_update_freq"} if head.wants_bank else {"views"}
    if values["continual"] and not head.wants_bank:
        elsewhere |= {"bank_cap", "bank_evict"}  # of the bank that grows
    of_head = default(name for name in (*flags.HEAD_OPTIONS, "criterion") if name not in known and name not in elsewhere)
    of_head |= default(["baselines"] if head.wants_bank else ["lr_projection"])
    found += [(f"--head {values['head']}", of_head | default([] if head.learned else ["lr_attention"]))]
    found += [("--embed_dim 0", default(["lr_projection"]))] if not projects(values) else []
    found += [(f"--index {values['index']}", default(["recall"]))] if values["index"] in ("flat", "ip") else []
    found += [("a bank without --bank_cap", default(["bank_evict"]))] if not values["bank_cap"] else []
    if frozen(values) and not projects(values):  # a contrastive loss could move nothing
        found += [("a frozen backbone with --embed_dim 0", {"contrastive_weight": 0.0, **default(CONTRASTIVE)})]
    elif not values["contrastive_weight"]:
        found += [("--contrastive_weight 0", default(CONTRASTIVE))]
    other = "contrastive_temperature" if values["contrastive_form"] == "margin" else "contrastive_margin"
    return [*found, (f"--contrastive_form {values['contrastive_form']}", default([other]))]


def idle_layer_options(pattern: str) -> list[str]:
    """Options that no layer takes, or that every layer which has them sets in its call; given or not, so that they are the same of
    all configurations that mean the same."""
    return layers.unused_options([call for call, _ in parse_parts(pattern, "layer")], flags.LAYER_OPTIONS)


def default(names: Iterable[str]) -> dict[str, Any]:
    return dict.fromkeys(names, DEFAULT)


def frozen(values: Mapping[str, Any]) -> bool:
    return values["freeze_backbone"] or values["model"] == "identity"


def projects(values: Mapping[str, Any]) -> bool:
    """Whether the head has a projection to embeddings; unset, one that learns to attend has."""
    return HEADS[values["head"]].learned if values["embed_dim"] is None else values["embed_dim"] > 0


def votes_only(values: Mapping[str, Any]) -> bool:
    """Whether the head is a vote that learns nothing, with no linear layer beside it."""
    known = options_of(HEADS[values["head"]])
    return "vote" in known and "criterion" not in known


def weights_name(values: Mapping[str, Any]) -> str:
    """Of the vote, without its options: "softmax-cosine(temperature=0.1)"."""
    return values["vote"].partition("(")[0].strip()
