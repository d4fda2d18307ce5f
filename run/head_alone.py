"""After training, the head alone learns a little longer, over the features of the finished backbone (`--head_epochs`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from classifiers.bank import Bank
from classifiers.classifier import Classifier
from config import Config
from inputs.batches import AnyBatches
from inputs.rows import Data
from run.parts import features_at_rest
from train_eval import better_head, judged, train_head
from training import checkpoint
from training.bank import build_bank
from training.checkpoint import Checkpoints
from training.state import Place
from utils import Diverged, say

FACT = "head_alone"  # in the best checkpoint and results.json: what it came to


def load_best(model: Classifier, checkpoints: Checkpoints, rows: AnyBatches) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of the best epoch, with their bank, into the model; what was read. One that was in parts is made anew of the `rows`."""
    tensors, facts = checkpoint.load(checkpoints.best, "model", "bank")
    model.load_state_dict(tensors["model"])
    if "bank" in tensors:
        model.head.refresh(Bank.unpack(tensors["bank"], facts["bank"]))
    else:
        build_bank(model, rows)
    return tensors, facts


def finish_head(
    config: Config, data: Data, model: Classifier, device: torch.device, checkpoints: Checkpoints, place: Place, rows: AnyBatches
) -> None:
    """Puts the better head into checkpoints/best, and its scores into the place. A run that was stopped here does it anew, to the same
    end; one that was stopped later has it done."""
    _, facts = load_best(model, checkpoints, rows)
    if FACT not in facts:
        facts = _learned(config, data, model, device, checkpoints, facts, place, rows)
    place.best, place.seconds = facts["val"], place.seconds + facts[FACT]["seconds"]


def _learned(
    config: Config,
    data: Data,
    model: Classifier,
    device: torch.device,
    checkpoints: Checkpoints,
    facts: Mapping[str, Any],
    place: Place,
    train_rows: AnyBatches,
) -> dict[str, Any]:
    begun, before, after, kept = time.perf_counter(), place.best, None, True
    train_set, val_set = features_at_rest(config, data, model, device)
    then = judged(model, val_set) if val_set else None
    try:
        train_head(config, model, train_set)
        if val_set and then:
            now = judged(model, val_set)
            after, kept = now.scores, better_head(now, then, config.training.select)
    except Diverged as error:
        say(f"head alone: {error}")
        kept = False
    if not kept:
        load_best(model, checkpoints, train_rows)
    found = {"epochs": config.training.head_epochs, "kept": kept, "before": before, "seconds": time.perf_counter() - begun}
    banks, bank_facts = checkpoint.pack_bank(model.head.bank)
    facts = {**facts, **bank_facts, "val": after if kept else before, FACT: found}
    checkpoints.replace_best({"model": model.state_dict()} | banks, facts)
    say(f"head alone: {told(found, after)}")
    return facts


def told(found: Mapping[str, Any], after: Mapping[str, float] | None) -> str:
    """In words."""
    before, words = found["before"], f"{found['epochs']} epochs over the features of the finished backbone"
    if before is not None and after is not None:
        words += f": val accuracy {before['accuracy']:.2%} to {after['accuracy']:.2%}, nll {before['nll']:.4f} to {after['nll']:.4f}"
    return words if found["kept"] else f"{words}; no better, so the head stays as it was"
