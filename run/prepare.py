"""Prepares an evaluation: the head's predictor and its baselines are built and fitted, or read from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from classifiers.bank import Bank
from classifiers.calibration import train_attention
from classifiers.classifier import Classifier
from classifiers.embedder import unit
from classifiers.neighbor_attention import NeighborAttention
from classifiers.neighbor_heads import AttnKnnHead, NeighborHead
from config import Config
from evaluation.baselines import alone, baseline_head, beside_features, beside_neighbors
from evaluation.continual import Growth
from evaluation.evaluator import Evaluator, leave_one_out
from inputs.batches import AnyBatches, Sets
from inputs.rows import Data
from run.checks import FEW, warn_of_few_rows
from run.loaded import Loaded
from run.parts import Kept, loaders
from run.saved import saved_config
from training import checkpoint
from training.bank import build_bank
from utils import warn, whole_numbers


def prepare(
    config: Config,
    model: Classifier,
    sets: Sets,
    *,
    mode: str,
    stored: Mapping[str, Tensor] | None = None,
    bank: Bank | None = None,
    foreign: AnyBatches | None = None,
) -> Evaluator:
    """`mode` of calibration; `stored`: predictors that a checkpoint holds, of that mode, and the `bank` of baselines that it holds.

    Without them, an attention that the head does not have is fitted to training rows, and confidence to validation rows.
    """
    head, retriever = model.head, None
    device = sets.test.device
    torch.manual_seed(config.system.seed)
    if isinstance(head, NeighborHead):
        retriever = head
        if head.bank is None:
            build_bank(model, sets.train.plain())
        assert head.bank is not None
        learned = isinstance(head.vote.weigh, NeighborAttention)
        attention = None if learned else attention_over(head.bank, config, model, device, trained=stored is not None).vote
        predictors = beside_neighbors(head, mode, attention)
    elif config.evaluation.baselines:
        bank = bank or bank_of_features(model, sets.train.plain())
        retriever = attention_over(bank, config, model, device, trained=stored is not None)
        predictors = beside_features(head, config.head.head, retriever, mode)
    else:
        predictors = alone(head, model.num_classes, config.head.head, mode)
    predictors.to(device)
    evaluator = Evaluator(
        model,
        predictors,
        retriever,
        sets,
        config.evaluation,
        foreign=foreign,
        growth=growth_of(config) if config.evaluation.continual else None,
    )
    if stored is not None:
        predictors.load_state_dict(dict(stored))
    elif mode != "none" and sets.val is not None:
        warn_of_few_rows(len(sets.val.target))
        predictors.calibrate(evaluator.validation(), sets.val.target, config.system.seed)
    model.calibrated = predictors.of(predictors.own, calibrated=True) if mode != "none" else None
    return evaluator


def calibration_mode(config: Config, data: Data) -> str:
    return config.evaluation.calibrate if data.val is not None else "none"


def prepare_loaded(loaded: Loaded, foreign: AnyBatches | None = None) -> Evaluator:
    """Predictors of a loaded run: as they were saved, or fitted anew where the evaluation differs and the validation rows are the run's."""
    config, facts, data = loaded.config, loaded.facts, loaded.data
    then = saved_config(facts, {}, frozenset(), "checkpoint")
    anew = config.evaluation.recalibrate
    kept = Kept.of(config, loaded.folder if loaded.has_run_rows else None, loaded.typed)
    sets = loaders(config, data, loaded.model, loaded.device, kept, config if anew else then.but(batch_size=config.training.batch_size))
    same_baselines = loaded.model.head.wants_bank or config.evaluation.baselines == (loaded.baseline_bank is not None)
    stored, mode = loaded.predictors, calibration_mode(config, data)
    if stored is not None and (anew or question(config, data) != question(then, data) or not same_baselines):
        stored = None
    if stored is not None:
        mode = facts["calibration"]
        if mode != "none":
            warn_of_few_rows(facts["data"].get("val", FEW))
    elif not loaded.has_run_rows and mode != "none":
        warn("calibrate: not possible (the run fitted none for this evaluation, and these are not its rows)")
        mode = "none"
    return prepare(config, loaded.model, sets, mode=mode, stored=stored, bank=loaded.baseline_bank, foreign=foreign)


def question(config: Config, data: Data) -> tuple[Any, ...]:
    """What the fitted confidence depends on."""
    options = config.evaluation
    ensemble = whole_numbers("k_ensemble", options.k_ensemble)
    ks = whole_numbers("k_eval", options.k_eval)
    k = ks if len(ks) == 1 else (config.head.k_train,)
    return calibration_mode(config, data), ensemble or k, bool(ensemble), options.adaptive_k


def groups_of(evaluator: Evaluator) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What a checkpoint keeps of an evaluation: all that was fitted, and the bank of a head that has none."""
    retriever = evaluator.retriever
    own = retriever is None or retriever is evaluator.classifier.head
    banks, facts = checkpoint.pack_bank(None if own or retriever is None else retriever.bank, "baseline_bank")
    return {"predictors": evaluator.predictors.state_dict(), **banks}, {"calibration": evaluator.predictors.mode, **facts}


# ---------------------------------------------------------------- baselines


def predictor_names(config: Config, model: Classifier) -> list[str]:
    """Of the predictors that an evaluation will have: nothing is fitted for that."""
    head, own = model.head, config.head.head
    if isinstance(head, NeighborHead):
        return list(dict.fromkeys([*beside_neighbors(head, "none").names, "attention"]))
    votes = beside_neighbors(baseline_head(1, model.num_classes, k_train=1), "none").names
    return [own, *votes] if config.evaluation.baselines else [own]


def bank_of_features(model: Classifier, rows: AnyBatches) -> Bank:
    """For the baselines of a head that has no bank."""
    embeddings = unit(model.of_rows(rows))
    bank = Bank(embeddings.shape[1], copies=rows.split.copies)
    bank.add(embeddings, rows.target)
    return bank


def attention_over(bank: Bank, config: Config, model: Classifier, device: torch.device, *, trained: bool) -> AttnKnnHead:
    """An attention over the rows of a bank. Unless it will be read from a checkpoint, it is trained on these rows, each left out."""
    options = config.evaluation
    asked: dict[str, Any] = dict(k_eval=options.k_eval, k_ensemble=options.k_ensemble, adaptive_k=options.adaptive_k)
    head = baseline_head(bank.dim, model.num_classes, k_train=min(config.head.k_train, len(bank)), **asked)
    head.to(device).eval().refresh(bank)
    if not trained:
        train_attention(head.vote, *leave_one_out(head), config.system.seed)
    return head


def growth_of(config: Config) -> Growth:
    return Growth(config.head.bank_cap, None if "bank_evict" in config.ignored else config.head.bank_evict, config.system.seed)
