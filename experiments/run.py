"""One run: from flags to a directory with trustworthy numbers; begun, resumed, or evaluated again."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import config as flags
import dataset
from classifiers import Bank
from config import Config
from experiments import reporting
from experiments.building import (
    batches,
    build,
    check_evaluation,
    check_same,
    choose_device,
    complete,
    load_data,
    merge,
    one_row,
    with_absolute_paths,
    with_published_normalization,
)
from experiments.folder import RESULTS, check_output, check_writable, locked, new_folder
from experiments.measuring import Judge, measure
from experiments.plugin import load_plugin
from experiments.sets import sets_of
from inputs import store
from progress import TRACKERS, Log, check_tracker
from train_eval import Classifier, Diverged, Stopped, remember, train
from training import checkpoint
from utils import BadOption, Halt, keep_memory, say


def run(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """What `python main.py` does: test, resume, or begin. `given` holds what was asked for; the rest follows from the data set."""
    if action.config:
        given = {**flags.read_yaml(action.config), **given}
    flags.check(given, Config)
    flags.check({k: v for k, v in vars(action).items() if v is not None}, flags.Action)
    load_plugin(given.get("plugin"))
    keep_memory()
    if action.test_only:
        return test(given, action)
    if action.checkpoint:
        rule = "goes with --test_only (--resume RUN continues a run, --pretrained FILE starts from weights)"
        raise BadOption("checkpoint", rule, action.checkpoint)
    return resume(given, action) if action.resume else begin(given, action)


# ---------------------------------------------------------------- begin, resume, test


def begin(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    given = with_absolute_paths(given)
    device = choose_device(given.get("device", "auto"))
    check_tracker(given.get("tracker", "none"))
    if given.get("output_dir"):
        check_output(Path(given["output_dir"]), action.overwrite)
    data = load_data(given)
    config = complete(given, data)
    data = with_published_normalization(config, data)
    model = build(config, data, device)
    size = one_row(model, data, config, device)
    check_evaluation(config, data, device)
    with new_folder(config, action.overwrite) as folder:
        (folder / "config.yaml").write_text(flags.to_yaml(config))
        (folder / "args.txt").write_text(shlex.join(["python", *sys.argv]) + "\n")
        (folder / "model.txt").write_text(f"{model}\n")
        say(reporting.describe(config, data, model))
        return finish(config, data, model, folder, device, size, action)


def resume(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    given = with_absolute_paths(given)
    folder = Path(str(action.resume))
    last = folder / "checkpoints" / "last"
    if not (last / store.INDEX).exists():
        raise BadOption("resume", f"must be a run that holds {last.relative_to(folder)}/{store.INDEX}", str(folder))
    try:
        tensors, facts = store.load(last)  # all of it: what is damaged is found before anything is done
    except BadOption as error:
        raise BadOption("resume", error.rule, error.value) from None
    config = merge(facts["config"], given, flags.FREE_IN_RESUME, "resume")
    load_plugin(config.plugin)
    check_tracker(config.tracker)
    done = facts["epoch"]
    more = config.num_epochs > facts["config"]["num_epochs"] or config.patience > facts["config"]["patience"]
    if (folder / RESULTS).exists() and not more:
        raise BadOption("resume", f"names a finished run; to train on, raise --num_epochs above {config.num_epochs}", str(folder))
    if config.num_epochs < done:
        raise BadOption("num_epochs", f"must be at least the {done} epochs that the run has", config.num_epochs)
    device = choose_device(config.device)
    if facts["threads"] != torch.get_num_threads():
        say(f"threads: {torch.get_num_threads()}, the run had {facts['threads']}; the numbers will differ in their last digits")
    data = load_data(dataclasses.asdict(config), facts["fitted"])
    if data.summary != facts["data"]:
        raise BadOption("resume", "needs the rows that the run was trained on, and the data set has changed since", str(folder))
    model = build(config, data, device, trained=True)
    model.load_state_dict(tensors["model"])  # a frozen backbone is asked for its features before the loop loads the rest
    size = one_row(model, data, config, device)
    check_evaluation(config, data, device)
    with locked(folder):
        if (folder / RESULTS).exists():  # a run without results did not finish: it goes on, so the old ones get another name
            os.replace(folder / RESULTS, folder / f"results-epoch{done}.json")
        store.write_atomically(folder / "config.yaml", flags.to_yaml(config).encode())
        with (folder / "args.txt").open("a") as file:
            file.write(shlex.join(["python", *sys.argv]) + "\n")
        say(f"resume: {folder}, {done} of {config.num_epochs} epochs done")
        return finish(config, data, model, folder, device, size, action, start=done)


def test(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """Rebuilds a model from its checkpoint's own configuration, evaluates it, writes results.json beside it."""
    if not action.checkpoint:
        raise BadOption("test_only", "needs --checkpoint RUN")
    given = with_absolute_paths(given)
    source = checkpoint.find(action.checkpoint)
    where = Path(given.get("output_dir") or source)
    if (where / "checkpoints").exists():
        raise BadOption("output_dir", "must not be a run: its results.json is of what it was trained for", str(where))
    check_writable(where)
    again = rebuild(action.checkpoint, given)
    config, facts = again.config, again.facts
    size = one_row(again.model, again.data, config, again.device)
    check_evaluation(config, again.data, again.device)
    say(f"checkpoint: {source}, epoch {facts['epoch']}")
    judge = judge_of(again, source.parent.parent if source.parent.name == "checkpoints" else source)
    results = measure(judge, size, epoch=facts["epoch"], seconds=facts.get("seconds", 0.0), val=judge.validate())
    where.mkdir(parents=True, exist_ok=True)
    store.write_json(where / RESULTS, results)
    print(reporting.table(results, where / RESULTS))
    return results


def judge_of(again: Rebuilt, folder: Path) -> Judge:
    """The panel of a rebuilt run: as it was saved, or fitted anew where the evaluation differs and the validation rows are the run's."""
    config, facts = again.config, again.facts
    same_rows = again.data.summary["sha256"] == facts["data"]["sha256"]
    judge = Judge(config, again.data, again.model, sets_of(config, again.data, again.model, again.device, folder if same_rows else None))
    before = Judge(Config(**facts["config"]), again.data, again.model, judge.sets).evaluation()
    stored, bank = again.votes, again.compared
    if stored is not None and (judge.evaluation() != before or not judge.serves(stored)):
        stored = None
    if stored is None and not same_rows:
        judge.without_calibration("the run fitted none for this evaluation, and these are not its rows")
    judge.prepare(stored, bank, None if stored is None else facts["calibrated"])
    return judge


class Rebuilt(NamedTuple):
    """A finished or stopped run, ready to be looked at."""

    config: Config
    data: dataset.Data
    model: Classifier
    device: torch.device
    facts: dict[str, Any]
    compared: Bank | None  # of a head without one, if votes were compared with it
    votes: dict[str, torch.Tensor] | None  # what its panel of voters had fitted


def rebuild(path: str, given: Mapping[str, Any]) -> Rebuilt:
    """The evaluated model of a run, a checkpoint folder or a file in it; `given` changes only what may change in a test."""
    tensors, facts = store.load(checkpoint.find(path), "model", "ema", "bank", "compared", "votes")
    config = merge(facts["config"], given, flags.free_in_test(facts["config"], given), "checkpoint")
    load_plugin(config.plugin)
    device = choose_device(config.device)
    data = load_data(dataclasses.asdict(config), facts["fitted"])
    check_same(data, facts)
    saved = {name: facts["config"].get(name) for name in ("bank_cap", "bank_evict")}  # another cap is for the bank that grows
    model = build(dataclasses.replace(config, **saved), data, device, trained=True)
    try:
        model.load_state_dict(tensors.get("ema", tensors["model"]))
    except RuntimeError as error:  # a plugin that was edited since
        reason = " ".join(str(error).split())[:120]
        raise BadOption("checkpoint", f"does not fit the model that its configuration builds ({reason})", path) from None
    banks = {name: Bank.unpack(tensors[name], facts[name]) for name in ("bank", "compared") if name in tensors}
    # NOTE: where training stopped, the bank is the one that training voted with, of earlier weights.
    stale = "training" in facts and data.summary["sha256"] == facts["data"]["sha256"]
    if "bank" in banks and not stale:
        model.head.refresh(banks["bank"])
    elif model.head.wants_bank:
        say("bank: the training rows are embedded anew")
        rows = batches(config, data, "train", device)
        assert rows is not None
        remember(model, rows.plain(), config.use_amp)
    return Rebuilt(config, data, model, device, facts, banks.get("compared"), tensors.get("votes"))


def finish(
    config: Config,
    data: dataset.Data,
    model: Classifier,
    folder: Path,
    device: torch.device,
    size: float,
    action: flags.Action,
    start: int = 0,
) -> dict[str, Any]:
    """Trains, tests the best epoch once, writes results.json last."""
    sets = sets_of(config, data, model, device, folder)
    tracker = TRACKERS[config.tracker](folder, dataclasses.asdict(config))
    log = Log(folder, tracker, epochs=config.num_epochs, batches=len(sets.train), start=start)
    until = min(config.num_epochs, action.stop_after or config.num_epochs)
    again = f"resume with: python main.py --resume {shlex.quote(str(folder))}"
    try:
        place = train(config, model, sets.train, sets.val, log=log, run=folder, until=until, resume=action.resume is not None)
    except Stopped as stop:
        raise Stopped(f"{stop}; saved. {again}", stop.exit_code) from None
    except Diverged as error:
        last = folder / "checkpoints" / "last"
        kept = f"the last good checkpoint is {last}" if last.exists() else "no epoch was finished, so there is no checkpoint"
        raise Diverged(f"error: {error}; {kept}", 1) from None
    except OSError as error:  # a full disk, a drive that went away: what was saved before is whole
        raise Halt(f"error: {folder} can't be written ({error.strerror or error}). {again}", 1) from None
    if place.epoch < config.num_epochs:
        say(f"patience: no better validation accuracy in {place.stale} epochs, stopped after epoch {place.epoch}")
    best = folder / "checkpoints" / "best"
    tensors, facts = store.load(best, "model", "bank")
    model.load_state_dict(tensors["model"])
    if "bank" in tensors:
        model.head.refresh(Bank.unpack(tensors["bank"], facts["bank"]))
    try:
        judge = Judge(config, data, model, sets)
        judge.prepare(None, None)
        store.save(best, {**tensors, **judge.groups()}, {**facts, **judge.facts()})
        results = measure(judge, size, epoch=place.best_epoch, seconds=place.seconds, val=place.best)
    except KeyboardInterrupt:
        raise Stopped(f"stopped by Ctrl-C in the final evaluation; training is done and saved. {again}", 130) from None
    table = reporting.table(results, folder)
    reporting.write_epochs(folder, table)
    store.write_json(folder / RESULTS, results)
    print(table)
    return results
