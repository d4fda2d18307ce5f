"""A finished or stopped run, loaded to be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import config as flags
from classifiers import HEADS
from classifiers.bank import Bank
from classifiers.classifier import Classifier
from classifiers.predictors import Predictor
from classifiers.sharded_bank import in_parts
from config import Config
from evaluation.baselines import calibrated_form, own_name
from inputs.rows import Data
from run.parts import build_model, choose_device, load_data, loader
from run.plugin import load_plugin_of
from run.saved import check_same, own_checkpoint, require_facts, run_of, saved_config, tell_paths
from training import checkpoint
from training.bank import build_bank
from utils import BadOption, doing, say, shortened, understood


class Loaded(NamedTuple):
    """Everything that a run's checkpoint holds."""

    config: Config
    data: Data
    model: Classifier
    device: torch.device
    facts: dict[str, Any]
    baseline_bank: Bank | None  # of a head without one, if it was saved with baselines
    predictors: dict[str, torch.Tensor] | None  # fitted ones, the head's own and its baselines
    folder: Path  # the run
    typed: frozenset[str] = frozenset()  # options of this command; the others are the checkpoint's

    @property
    def has_run_rows(self) -> bool:
        """Whether these are the rows that the run was trained on."""
        same: bool = self.data.summary["sha256"] == self.facts["data"]["sha256"]
        return same


def calibrated_predictor(
    model: Classifier, config: Config, stored: Mapping[str, torch.Tensor] | None, facts: Mapping[str, Any]
) -> Predictor | None:
    """The head's own predictor as it was calibrated; None where that was not done."""
    if stored is None or facts["calibration"] == "none":
        return None
    found = calibrated_form(model.head, model.num_classes, facts["calibration"])
    start = f"calibrated.{own_name(model.head, config.head.head)}."
    found.load_state_dict({name.removeprefix(start): value for name, value in stored.items() if name.startswith(start)})
    return found


def load(path: str, given: Mapping[str, Any]) -> Loaded:
    """The evaluated model of a run, a checkpoint folder or a file in it; `given` changes only what may change in a test."""
    source = own_checkpoint(path)
    tensors, facts = checkpoint.load(source, "model", "ema", "baseline_bank", "predictors")
    require_facts(facts)
    load_plugin_of(facts, given.get("plugin"))  # its head may be the run's
    with understood("checkpoint", path):
        return _loaded(source, tensors, facts, given, path)


def _loaded(source: Path, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any], given: Mapping[str, Any], path: str) -> Loaded:
    config = saved_config(facts, given, flags.free_in_test(facts["config"], given), "checkpoint")
    if "predictors" in tensors and "baselines" not in given and not HEADS[config.head.head].wants_bank:
        config = config.but(baselines="baseline_bank" in tensors)
    device = choose_device(config.system.device)
    tell_paths(facts["config"], given)
    typed = frozenset(given)
    with doing("loading the data"):
        data = load_data(config.flat(), facts["fitted"], typed)
    check_same(data, facts)
    saved = {name: facts["config"].get(name) for name in ("bank_cap", "bank_evict")}  # another cap is for the bank that grows
    model = build_model(config.but(**{k: v for k, v in saved.items() if v or k == "bank_cap"}), data, device, trained=True)
    try:
        model.load_state_dict(tensors.get("ema", tensors["model"]))
    except RuntimeError as error:  # a plugin that was edited since
        rule = f"does not fit the model that its configuration builds ({shortened(error, 120)})"
        raise BadOption("checkpoint", rule, path) from None
    baseline_bank = Bank.unpack(tensors["baseline_bank"], facts["baseline_bank"]) if "baseline_bank" in tensors else None
    model.calibrated = calibrated_predictor(model, config, tensors.get("predictors"), facts)
    loaded = Loaded(config, data, model, device, facts, baseline_bank, tensors.get("predictors"), run_of(source), typed)
    if model.head.wants_bank:
        give_bank(loaded, source)
    return loaded


def give_bank(loaded: Loaded, source: Path) -> None:
    """The bank that the checkpoint has. From the rows that it was made of it is made anew where each process keeps its part only, and where
    training stopped: the one that is saved there is of earlier weights."""
    config, facts, model = loaded.config, loaded.facts, loaded.model
    tensors: Mapping[str, Any] = {}
    if not (loaded.has_run_rows and ("training" in facts or in_parts(model.head))):
        tensors = checkpoint.load_whole(source, "bank")[0]
    if "bank" in tensors:
        model.head.refresh(Bank.unpack(tensors["bank"], facts["bank"]))
        return
    if not loaded.has_run_rows:
        rule = "lacks the bank that its head votes with (a run with --shard_bank keeps it at its end), and these are not the rows it is of"
        raise BadOption("checkpoint", rule, str(source))
    say("bank: the training rows are embedded anew")
    rows = loader(config.but(noise=facts["config"]["noise"]), loaded.data, "train", loaded.device)
    assert rows is not None
    build_bank(model, rows.plain())
