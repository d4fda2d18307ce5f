"""One run: from flags to a directory with trustworthy numbers; begun, resumed, or evaluated again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import config as flags
from config import Config
from evaluation import tables
from inputs.indexed import INDEX, read_index
from inputs.memory import keep_memory
from inputs.yaml_file import read_yaml
from ranks import together
from run.checks import check_evaluation, check_neighbors, check_validation, warn_of_copies
from run.complete import complete
from run.directory import ERROR, FLAT, RESULTS, RunDirectory, adopt, again, check_writable, default_name, files_of, new, opened
from run.finish import Parts, finish, finish_test, rows_for_ood, tracker_of, watched
from run.loaded import load
from run.parts import choose_device, dry_run, load_data, with_published_normalization
from run.plugin import digest_of, load_plugin, load_plugin_of
from run.prepare import prepare_loaded
from run.saved import own_checkpoint, require_facts, saved_config, tell_paths, with_absolute_paths
from run.shared import look_for_all, shared
from train_eval import evaluate
from training import checkpoint
from training.checkpoint import Checkpoints
from training.progress import check_tracker
from utils import WARNINGS, BadOption, Interrupted, Stopped, doing, interruptible, say, understood, warn


def run(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """What `python main.py` does: test, resume, or begin. `given` holds what was asked for; the rest follows from the data set."""
    flags.check({k: v for k, v in vars(action).items() if v is not None}, flags.Action)
    with interruptible():
        try:
            with together(action.timeout):
                return _run(given, action)
        except KeyboardInterrupt as stop:
            how = stop if isinstance(stop, Interrupted) else Interrupted()
            where = getattr(stop, "doing", "reading the options")
            what = "the run is as it was. " + again(str(action.resume), given) if action.resume else "no run was begun"
            raise Stopped(f"stopped by {how.name} in {where}; {what}", how.exit_code) from None


def _run(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    if action.config:
        in_file = read_yaml(action.config)
        if in_file.get("plugin") and not given.get("plugin"):
            raise BadOption("plugin", f"must be typed: {action.config} names {in_file['plugin']}, and no code runs because a file names it")
        given = {**in_file, **given}
    WARNINGS.clear()
    flags.check(given)
    keep_memory()
    if action.test_only:
        return test(given, action)
    if action.checkpoint:
        rule = "goes with --test_only (--resume RUN continues a run, --pretrained FILE starts from weights)"
        raise BadOption("checkpoint", rule, action.checkpoint)
    return resume(given, action) if action.resume else begin(given, action)


# ---------------------------------------------------------------- begin


def begin(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    load_plugin(given.get("plugin"))
    given = with_absolute_paths(given)
    folder = Path(given["output_dir"]) if given.get("output_dir") else None
    if folder is not None:
        look_for_all(folder, action.overwrite)  # and again once it is locked; this one spares loading the data in vain
    parts = parts_of(given, frozenset({*given, "data_path"}))  # whose default is ours
    with shared(new(folder, default_name(parts.config), marker_of(parts.config), action.overwrite)) as directory:
        return start(parts, directory, action)


def parts_of(values: Mapping[str, Any], typed: frozenset[str]) -> Parts:
    """Of a run that begins. `typed`: options of this command. NOTE: folders that only a marker names are read, and neither written nor
    downloaded to."""
    device = choose_device(values.get("device", "auto"))
    check_tracker(tracker_of(values.get("tracker", "none"), typed))
    with doing("loading the data"):
        data = load_data(values, typed=typed)
        config = complete(values, data)
    parts = Parts.of(config, with_published_normalization(config, data), device, typed)
    warn_of_copies(config, data)
    return parts


def marker_of(config: Config) -> dict[str, Any]:
    """What run.json keeps to begin a run anew."""
    plugin = config.system.plugin
    return {"config": flags.effective(config), **({"plugin_sha256": digest_of(plugin)} if plugin else {})}


def start(parts: Parts, directory: RunDirectory, action: flags.Action) -> dict[str, Any]:
    """`action` may be to resume a run that was stopped before its first checkpoint."""
    with watched(directory):
        directory.delete(ERROR)
        directory.write("config.yaml", flags.to_yaml(parts.config))
        write_command(directory)
        directory.write("model.txt", f"{parts.model}\n")
        say(tables.description(parts.config, parts.data.summary, parts.data.shape, parts.model))
        return finish(parts, directory, action, Checkpoints(directory.path, directory.id, directory), resume=False)


def write_command(directory: RunDirectory) -> None:
    """The command in args.txt, below those before."""
    path = directory.path / "args.txt"
    before = path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else ""
    directory.write("args.txt", before + shlex.join(["python", *sys.argv]) + "\n")


# ---------------------------------------------------------------- resume


def resume(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    given = with_absolute_paths(given)
    folder = Path(str(action.resume))
    last = folder / "checkpoints" / "last"
    if files_of(folder) is None and not (last / INDEX).exists():
        raise BadOption("resume", f"must be a run that holds {last.relative_to(folder)}/{INDEX}", str(folder))
    with shared(opened(folder)) as directory:
        if not (last / INDEX).exists():
            return begin_anew(given, directory, action)
        return go_on(given, directory, action)


def begin_anew(given: Mapping[str, Any], directory: RunDirectory, action: flags.Action) -> dict[str, Any]:
    """A run that was stopped before its first checkpoint."""
    folder = directory.path
    best = folder / "checkpoints" / "best"
    if (best / INDEX).exists() and read_index(best)["facts"].get("epoch", 0) != 1:
        rule = "lacks checkpoints/last, from which it would go on; --test_only evaluates its checkpoints/best, --overwrite replaces the run"
        raise BadOption("resume", rule, str(folder))
    if (folder / RESULTS).exists():
        raise BadOption("resume", "lacks checkpoints/last, and has results: there is nothing to go on from", str(folder))
    then = directory.marker["config"] or read_yaml(str(folder / "config.yaml"))
    with understood("resume", str(folder)):
        flags.check(then)
    load_plugin_of({**directory.marker, "config": then}, given.get("plugin"))
    for name, value in given.items():
        if name not in flags.FREE_IN_RESUME and value != then.get(name):
            raise BadOption(name, f"contradicts --resume, which has {then.get(name)}", value)
    tell_paths(then, given)
    parts = parts_of({**then, **given}, frozenset(given))
    adopt(directory, flags.effective(parts.config), None)
    directory.sweep()
    say(f"resume: {folder} has no checkpoint yet, so the run begins anew")
    return start(parts, directory, action)


def go_on(given: Mapping[str, Any], directory: RunDirectory, action: flags.Action) -> dict[str, Any]:
    folder = directory.path
    checkpoints = Checkpoints(folder, directory.id, directory)
    try:
        tensors, facts = checkpoint.load(checkpoints.last)  # all of it: what is damaged is found before anything is done
        require_facts(facts)
    except BadOption as error:
        raise BadOption("resume", error.rule, error.value) from None
    load_plugin_of(facts, given.get("plugin"))  # its head may be the run's
    with understood("resume", str(folder)):
        config = saved_config(facts, given, flags.FREE_IN_RESUME, "resume")
        check_tracker(tracker_of(config.output.tracker, frozenset(given)))
        check_goes_on(config, facts, folder)
        device = choose_device(config.system.device)
        WARNINGS.extend(w for w in facts.get("warnings", []) if w not in WARNINGS)
        tell_paths(facts["config"], given)
        with doing("loading the data"):
            data = load_data(config.flat(), facts["fitted"], frozenset(given))
        if any(data.summary.get(name) != value for name, value in facts["data"].items()):
            raise BadOption("resume", "needs the rows that the run was trained on, and the data set has changed since", str(folder))
        check_neighbors(config, data)
        check_validation(config, data, told=False)
        parts = Parts.of(config, data, device, frozenset(given), tensors["model"])
        adopt(directory, flags.effective(config), facts.get("run"))
        checkpoints.run = directory.id
        if facts.get("run", directory.id) != directory.id:
            raise BadOption("resume", "has a checkpoints/last that is another run's", str(folder))
        lost = checkpoints.lacks_best(facts)
    warn_of_copies(config, data)
    if lost:
        warn(f"best: checkpoints/best {lost}, so the best epoch so far is lost; training goes on from checkpoints/last")
        checkpoints.give_up_best(lost)
    with watched(directory):
        directory.sweep()
        directory.forget_digests()
        if (folder / RESULTS).exists():  # a run without results did not finish: it goes on, so the old ones get another name
            directory.rename(RESULTS, f"results-epoch{facts['epoch']}.json")
        directory.delete(FLAT)
        directory.delete(ERROR)
        directory.write("config.yaml", flags.to_yaml(config))
        write_command(directory)
        say(f"resume: {folder}, {facts['epoch']} of {config.training.num_epochs} epochs done")
        return finish(parts, directory, action, checkpoints, resume=True)


def check_goes_on(config: Config, facts: Mapping[str, Any], folder: Path) -> None:
    done, then, options = facts["epoch"], facts["config"], config.training
    more = options.num_epochs > then["num_epochs"] or options.patience > then["patience"]
    if (folder / RESULTS).exists() and not more:
        raise BadOption("resume", f"names a finished run; to train on, raise --num_epochs above {options.num_epochs}", str(folder))
    if options.num_epochs < done:
        raise BadOption("num_epochs", f"must be at least the {done} epochs that the run has", options.num_epochs)
    if facts["threads"] != torch.get_num_threads():
        warn(f"threads: {torch.get_num_threads()}, the run had {facts['threads']}; the numbers differ in their last digits")


# ---------------------------------------------------------------- test


def test(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """Loads a model by its checkpoint's own configuration, evaluates it, writes results.json and results.csv beside it."""
    if not action.checkpoint:
        raise BadOption("test_only", "needs --checkpoint RUN")
    given = with_absolute_paths(given)
    source = own_checkpoint(action.checkpoint)
    where = Path(given.get("output_dir") or source)
    if (where / "checkpoints").exists():
        raise BadOption("output_dir", "must not be a run: its results.json is of what it was trained for", str(where))
    check_writable(where)
    loaded = load(action.checkpoint, given)
    config, data, facts = loaded.config, loaded.data, loaded.facts
    warn_of_copies(config, data)
    with understood("checkpoint", str(source)):
        gflops = dry_run(loaded.model, data, config, loaded.device)
        calibrates = "calibrate" in given or loaded.has_run_rows
        check_evaluation(config if calibrates else config.but(calibrate="none"), data, loaded.typed)
        parts = Parts(config, data, loaded.model, loaded.device, gflops, rows_for_ood(config, data, loaded.device), loaded.typed)
        say(f"checkpoint: {source}, epoch {facts['epoch']}")
        evaluator = prepare_loaded(loaded, parts.foreign)
    with doing("the evaluation"):
        val = evaluate(loaded.model, evaluator.sets.val) if evaluator.sets.val is not None else None
        return finish_test(evaluator, parts, where, facts, val)
