"""One run: from flags to a directory with trustworthy numbers; begun, resumed, or evaluated again."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import config as flags
from classifiers.bank import Bank
from classifiers.classifier import Classifier
from config import Config
from evaluation import curves, predictions, tables
from evaluation.cost import cost_of
from evaluation.evaluator import Evaluator
from inputs import store
from inputs.batches import AnyBatches
from inputs.rows import Data
from run.checks import check_evaluation, warn_of_copies, warn_of_known_rows
from run.complete import complete
from run.directory import RESULTS, check_output, check_writable, locked, new_folder
from run.load import load
from run.parts import build_model, choose_device, dry_run, foreign_rows, load_data, loader, loaders, with_published_normalization
from run.plugin import load_plugin, load_plugin_of
from run.prepare import calibration_mode, groups_of, prepare, prepare_loaded
from run.provenance import git_state, versions
from run.saved import saved_config, with_absolute_paths
from train_eval import evaluate, train
from training import checkpoint
from training.bank import collapse, spread_of
from training.progress import TRACKERS, Log, check_tracker
from utils import WARNINGS, BadOption, Diverged, Halt, Stopped, keep_memory, say, warn


def run(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """What `python main.py` does: test, resume, or begin. `given` holds what was asked for; the rest follows from the data set."""
    if action.config:
        in_file = flags.read_yaml(action.config)
        if in_file.get("plugin") and not given.get("plugin"):
            raise BadOption("plugin", f"must be typed: {action.config} names {in_file['plugin']}, and no code runs because a file names it")
        given = {**in_file, **given}
    WARNINGS.clear()
    flags.check(given)
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


@dataclass(frozen=True)
class Parts:
    """A run that is ready to train."""

    config: Config
    data: Data
    model: Classifier
    device: torch.device
    gflops: float
    foreign: AnyBatches | None

    @staticmethod
    def of(config: Config, data: Data, device: torch.device, weights: Mapping[str, torch.Tensor] | None = None) -> Parts:
        """Built, and tried with one row. `weights` of a run that goes on."""
        model = build_model(config, data, device, trained=weights is not None)
        if weights is not None:
            model.load_state_dict(weights)  # a frozen backbone is asked for its features before the loop loads the rest
        gflops = dry_run(model, data, config, device)
        check_evaluation(config, data)
        return Parts(config, data, model, device, gflops, rows_for_ood(config, data, device))


def begin(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    given = with_absolute_paths(given)
    device = choose_device(given.get("device", "auto"))
    check_tracker(given.get("tracker", "none"))
    if given.get("output_dir"):
        check_output(Path(given["output_dir"]), action.overwrite)
    data = load_data(given)
    config = complete(given, data)
    parts = Parts.of(config, with_published_normalization(config, data), device)
    warn_of_copies(config, data)
    with new_folder(config, action.overwrite) as folder:
        (folder / "config.yaml").write_text(flags.to_yaml(config))
        (folder / "args.txt").write_text(shlex.join(["python", *sys.argv]) + "\n")
        (folder / "model.txt").write_text(f"{parts.model}\n")
        say(tables.description(config, data.summary, data.shape, parts.model))
        return finish(parts, folder, action)


def resume(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    given = with_absolute_paths(given)
    folder = Path(str(action.resume))
    last = folder / "checkpoints" / "last"
    if not (last / store.INDEX).exists():
        raise BadOption("resume", f"must be a run that holds {last.relative_to(folder)}/{store.INDEX}", str(folder))
    try:
        tensors, facts = checkpoint.load(last)  # all of it: what is damaged is found before anything is done
    except BadOption as error:
        raise BadOption("resume", error.rule, error.value) from None
    load_plugin_of(facts, given.get("plugin"))  # its head may be the run's
    config = saved_config(facts, given, flags.FREE_IN_RESUME, "resume")
    check_tracker(config.output.tracker)
    done, then = facts["epoch"], facts["config"]
    options = config.training
    more = options.num_epochs > then["num_epochs"] or options.patience > then["patience"]
    if (folder / RESULTS).exists() and not more:
        raise BadOption("resume", f"names a finished run; to train on, raise --num_epochs above {options.num_epochs}", str(folder))
    if options.num_epochs < done:
        raise BadOption("num_epochs", f"must be at least the {done} epochs that the run has", options.num_epochs)
    device = choose_device(config.system.device)
    if facts["threads"] != torch.get_num_threads():
        warn(f"threads: {torch.get_num_threads()}, the run had {facts['threads']}; the numbers differ in their last digits")
    WARNINGS.extend(w for w in facts.get("warnings", []) if w not in WARNINGS)
    data = load_data(config.flat(), facts["fitted"])
    if any(data.summary.get(name) != value for name, value in facts["data"].items()):
        raise BadOption("resume", "needs the rows that the run was trained on, and the data set has changed since", str(folder))
    parts = Parts.of(config, data, device, tensors["model"])
    warn_of_copies(config, data)
    with locked(folder):
        if (folder / RESULTS).exists():  # a run without results did not finish: it goes on, so the old ones get another name
            os.replace(folder / RESULTS, folder / f"results-epoch{done}.json")
        store.write_atomically(folder / "config.yaml", flags.to_yaml(config).encode())
        with (folder / "args.txt").open("a") as file:
            file.write(shlex.join(["python", *sys.argv]) + "\n")
        say(f"resume: {folder}, {done} of {options.num_epochs} epochs done")
        return finish(parts, folder, action, start=done)


def test(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """Loads a model by its checkpoint's own configuration, evaluates it, writes results.json beside it."""
    if not action.checkpoint:
        raise BadOption("test_only", "needs --checkpoint RUN")
    given = with_absolute_paths(given)
    source = checkpoint.find(action.checkpoint)
    where = Path(given.get("output_dir") or source)
    if (where / "checkpoints").exists():
        raise BadOption("output_dir", "must not be a run: its results.json is of what it was trained for", str(where))
    check_writable(where)
    loaded = load(action.checkpoint, given)
    config, data, facts = loaded.config, loaded.data, loaded.facts
    warn_of_copies(config, data)
    gflops = dry_run(loaded.model, data, config, loaded.device)
    check_evaluation(config if "calibrate" in given or loaded.has_run_rows else config.but(calibrate="none"), data)
    parts = Parts(config, data, loaded.model, loaded.device, gflops, rows_for_ood(config, data, loaded.device))
    say(f"checkpoint: {source}, epoch {facts['epoch']}")
    evaluator = prepare_loaded(loaded, parts.foreign)
    val = evaluate(loaded.model, evaluator.sets.val) if evaluator.sets.val is not None else None
    results = measure(evaluator, parts, where, epoch=facts["epoch"], seconds=facts.get("seconds", 0.0), val=val)
    store.write_json(where / RESULTS, results)
    print(tables.table(results, where / RESULTS))
    return results


def rows_for_ood(config: Config, data: Data, device: torch.device) -> AnyBatches | None:
    name = config.evaluation.ood
    if name == config.data.dataset:
        say("ood: these are the run's own rows")
    return foreign_rows(config, data, name, device) if name else None


# ---------------------------------------------------------------- to the end


def finish(parts: Parts, folder: Path, action: flags.Action, start: int = 0) -> dict[str, Any]:
    """Trains, tests the best epoch once, writes results.json last."""
    config, data, model = parts.config, parts.data, parts.model
    epochs = config.training.num_epochs
    sets = loaders(config, data, model, parts.device, folder)
    tracker = TRACKERS[config.output.tracker](folder, config.flat())
    log = Log(folder, tracker, epochs=epochs, batches=len(sets.train), start=start)
    until = min(epochs, action.stop_after or epochs)
    typed = f" --plugin {shlex.quote(config.system.plugin)}" if config.system.plugin else ""
    again = f"resume with: python main.py --resume {shlex.quote(str(folder))}{typed}"
    try:
        place = train(config, model, sets.train, sets.val, log=log, folder=folder, until=until, resume=action.resume is not None)
    except Stopped as stop:
        raise Stopped(f"{stop}; saved. {again}", stop.exit_code) from None
    except Diverged as error:
        last = folder / "checkpoints" / "last"
        kept = f"the last good checkpoint is {last}" if last.exists() else "no epoch was finished, so there is no checkpoint"
        raise Diverged(f"error: {error}; {kept}", 1) from None
    except OSError as error:  # a full disk, a drive that went away: what was saved before is whole
        raise Halt(f"error: {folder} can't be written ({error.strerror or error}). {again}", 1) from None
    if place.epoch < epochs:
        say(f"patience: no better validation accuracy in {place.stale} epochs, stopped after epoch {place.epoch}")
    best = folder / "checkpoints" / "best"
    tensors, facts = checkpoint.load(best, "model", "bank")
    model.load_state_dict(tensors["model"])
    if "bank" in tensors:
        bank = Bank.unpack(tensors["bank"], facts["bank"])
        model.head.refresh(bank)
        if line := collapse(spread_of(bank)):
            warn(line)
    try:
        evaluator = prepare(config, model, sets, mode=calibration_mode(config, data), foreign=parts.foreign)
        groups, fitted = groups_of(evaluator)
        store.save(best, {**tensors, **groups}, {**facts, **fitted})
        results = measure(evaluator, parts, folder, epoch=place.best_epoch, seconds=place.seconds, val=place.best)
    except KeyboardInterrupt:
        raise Stopped(f"stopped by Ctrl-C in the final evaluation; training is done and saved. {again}", 130) from None
    table = tables.table(results, folder)
    curves.write_epochs(folder, table, place.best_epoch)
    store.write_json(folder / RESULTS, results)
    print(table)
    return results


def measure(evaluator: Evaluator, parts: Parts, where: Path, *, epoch: int, seconds: float, val: dict[str, float] | None) -> dict[str, Any]:
    """What results.json holds; predictions are kept in `where`."""
    found, variants = evaluator.evaluate()
    where.mkdir(parents=True, exist_ok=True)
    own, test_rows = evaluator.predictors.own, parts.data.summary["test_sha256"]
    predictions.keep(where, variants, evaluator.sets.test.target, own=own, test_rows=test_rows)
    calibrated = evaluator.validate_calibrated()
    warn_of_known_rows(parts.config, parts.data, found, val)
    rows = loader(parts.config, parts.data, "test", parts.device)
    assert rows is not None
    x = next(iter(rows.epoch())).x  # real rows: what a search costs depends on them
    return {
        **found,
        "val": val,
        **({"val_calibrated": calibrated} if calibrated else {}),
        "epoch": epoch,
        "gflops": parts.gflops,
        **cost_of(parts.model, x),
        "seconds": seconds,
        "data": parts.data.summary,
        "warnings": list(dict.fromkeys([*parts.model.facts.get("warnings", []), *WARNINGS])),
        "config": parts.config.flat(),
        "ignored": dict(parts.config.ignored),
        "versions": versions(),
        "git": git_state(),
        "threads": torch.get_num_threads(),
    }
