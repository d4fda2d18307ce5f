"""From a run that is ready to train to its results: train, test the best epoch once, write; whatever ends it is said in one line."""

from __future__ import annotations

import contextlib
import traceback
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import config as flags
from classifiers.classifier import Classifier
from classifiers.metrics import standard_metrics
from config import Config
from evaluation import curves, predictions, tables
from evaluation.cost import cost_of
from evaluation.evaluator import Evaluator
from evaluation.flat import as_csv, flat_results, scores_of
from evaluation.results import grouped
from inputs import files, store
from inputs.batches import AnyBatches
from inputs.rows import Data
from ranks import here
from run.checks import check_evaluation, check_learns, warn_of_known_rows, warn_of_mixed_rows
from run.directory import ERROR, FLAT, RESULTS, RunDirectory, files_of, list_files
from run.head_alone import FACT, finish_head, load_best
from run.parts import Kept, build_model, dry_run, foreign_rows, input_shape, loader, loaders
from run.prepare import calibration_mode, groups_of, prepare
from run.provenance import git_state, versions
from run.saved import run_of
from run.shared import check_processes, warn_of_own_draws
from train_eval import train
from training import checkpoint
from training.bank import collapse, spread_of
from training.checkpoint import Checkpoints
from training.progress import Log, Results, Silent, Tracker, tell_results, tracked
from training.state import Place
from utils import WARNINGS, BadOption, Diverged, Halt, Interrupted, Stopped, doing, say, warn


@dataclass(frozen=True)
class Parts:
    """A run that is ready to train."""

    config: Config
    data: Data
    model: Classifier
    device: torch.device
    gflops: float
    foreign: AnyBatches | None
    typed: frozenset[str] = field(default_factory=frozenset)  # options of this command; the others may be a checkpoint's

    @staticmethod
    def of(
        config: Config, data: Data, device: torch.device, typed: frozenset[str], weights: Mapping[str, torch.Tensor] | None = None
    ) -> Parts:
        """Built, and tried with one row. `weights` of a run that goes on."""
        check_processes(config, device)
        with doing("building the model"):
            model = build_model(config, data, device, trained=weights is not None)
            check_learns(config, model.head)
            if weights is not None:
                model.load_state_dict(weights)  # a frozen backbone is asked for its features before the loop loads the rest
            gflops = dry_run(model, data, config, device)
            warn_of_mixed_rows(config, model.backbone, input_shape(config, data), device)
            warn_of_own_draws(config, model.backbone, input_shape(config, data))
        check_evaluation(config, data, typed)
        return Parts(config, data, model, device, gflops, rows_for_ood(config, data, device), typed)


def rows_for_ood(config: Config, data: Data, device: torch.device) -> AnyBatches | None:
    name = config.evaluation.ood
    if name == config.data.dataset:
        say("ood: these are the run's own rows")
    return foreign_rows(config, data, name, device) if name else None


def tracker_of(name: str, typed: frozenset[str]) -> str:
    """The tracker that is told. NOTE: a run that goes on may be a stranger's; nothing is sent because its checkpoint says so."""
    return "none" if name in flags.SENDING and "tracker" not in typed else name


def finish(parts: Parts, directory: RunDirectory, action: flags.Action, checkpoints: Checkpoints, *, resume: bool) -> dict[str, Any]:
    """Trains, tests the best epoch once, writes results.json last."""
    config = parts.config
    named = config.output.tracker
    told = tracker_of(named, parts.typed)
    if told != named:
        say(f"tracker: none; the run had {named}, which gets numbers only where --tracker {named} is typed")
    with tracked(told if directory.writes else "none", directory.path, flags.effective(config), directory) as tracker:
        return _finish(parts, directory, action, checkpoints, tracker=tracker, resume=resume)


def _finish(
    parts: Parts, directory: RunDirectory, action: flags.Action, checkpoints: Checkpoints, *, tracker: Tracker, resume: bool
) -> dict[str, Any]:
    config, data, model, folder = parts.config, parts.data, parts.model, directory.path
    epochs = config.training.num_epochs
    with doing("preparing the rows"):
        sets = loaders(config, data, model, parts.device, Kept.of(config, folder, parts.typed, directory))
    log = (Log if directory.writes else Silent)(folder, tracker, epochs=epochs, batches=len(sets.train), owner=directory)
    until = min(epochs, action.stop_after or epochs)
    with doing("training"):
        place = train(config, model, sets.train, sets.val, log=log, checkpoints=checkpoints, until=until, resume=resume)
    if place.epoch < epochs:
        say(f"patience: no better validation accuracy in {place.stale} epochs, stopped after epoch {place.epoch}")
    if config.training.head_epochs:
        with doing("the epochs of the head alone; training is done and saved"):
            finish_head(config, data, model, parts.device, checkpoints, place, sets.train.plain())
    with doing("the final evaluation; training is done and saved"):
        tensors, facts = load_best(model, checkpoints, sets.train.plain())
        if (bank := model.head.bank) is not None and (line := collapse(spread_of(bank))):
            warn(line)
        pieces: Any  # read one after the other
        pieces, bank_facts = checkpoint.pieces_of(None if "bank" in tensors else bank)
        evaluator = prepare(config, model, sets, mode=calibration_mode(config, data), foreign=parts.foreign)
        evaluator.look()

        def write() -> dict[str, Any]:
            groups, fitted = groups_of(evaluator)
            whole = {**facts, "seconds": place.seconds, **bank_facts, **fitted}  # all of training, as in results.json: a test repeats it
            store.save(checkpoints.best, ChainMap({**tensors, **groups}, pieces), whole, directory)
            return _written(evaluator, parts, directory, tracker, place, facts.get(FACT))

        def hand_over() -> dict[str, Any]:
            for _ in pieces.values():  # each is made of the rows of all
                pass
            return {}

        return here().only_first(write, hand_over)


def _written(evaluator: Evaluator, parts: Parts, directory: RunDirectory, tracker: Tracker, place: Place, alone: Any) -> dict[str, Any]:
    """All that stays of a run, in its directory; the final table, printed."""
    config, folder = parts.config, directory.path
    directory.claim([folder / predictions.FILE])
    results = measure(evaluator, parts, folder, epoch=place.best_epoch, seconds=place.seconds, val=place.best, alone=alone)
    table = tables.table(results, folder)
    title, rule = curves.title_of(flags.effective(config)), tables.chosen_by(results, full=True)
    epochs_text, picture = curves.epochs_of(folder, table, place.best_epoch, title=title, rule=rule)
    directory.write("train_eval_results.txt", epochs_text)
    directory.write("curves.png", picture)
    row = flat_results(results)
    if FLAT in directory.files or not (folder / FLAT).exists():
        directory.write(FLAT, as_csv(row))
    directory.finish(results, growing=tracker.files())  # which is told of the results below
    tell_results(tracker, Results(scores_of(row), flags.effective(config), {"curves": picture}, table))
    print(table)
    return results


def finish_test(evaluator: Evaluator, parts: Parts, where: Path, facts: Mapping[str, Any], val: dict[str, float] | None) -> dict[str, Any]:
    """What a test finds, in `where`; the table, printed. `facts` of its checkpoint."""
    evaluator.look()

    def write() -> dict[str, Any]:
        results = measure(evaluator, parts, where, epoch=facts["epoch"], seconds=facts.get("seconds", 0.0), val=val, alone=facts.get(FACT))
        store.write_json(where / RESULTS, results)
        write_row(where, results)
        print(tables.table(results, where / RESULTS))
        return results

    return here().only_first(write, dict)


def write_row(where: Path, results: Mapping[str, Any]) -> None:
    """results.csv of a test. NOTE: inside a run, only where it is or becomes the run's own: another file of this name is somebody's."""
    run = run_of(where)
    name = (where / FLAT).relative_to(run).as_posix()
    own = files_of(run)
    if own is not None and name not in own and not (where / FLAT).exists():
        list_files(run, [name])
        own = files_of(run)
    if own is None or name in own:
        files.write_atomically(where / FLAT, as_csv(flat_results(results)).encode())


@contextlib.contextmanager
def watched(directory: RunDirectory) -> Iterator[None]:
    """However a run ends, one line says it, and how to go on; the traceback of what nobody expected stays in a file of the run."""
    try:
        yield
    except KeyboardInterrupt as stop:
        how = stop if isinstance(stop, Interrupted) else Interrupted()
        raise Stopped(f"stopped by {how.name} in {getattr(stop, 'doing', 'preparing the run')}. {directory.again}", how.exit_code) from None
    except Stopped as stop:
        raise Stopped(f"{stop}; saved. {directory.again}", stop.exit_code) from None
    except Diverged as error:
        last = directory.path / "checkpoints" / "last"
        kept = f"the last good checkpoint is {last}" if last.exists() else "no epoch was finished, so there is no checkpoint"
        _note(directory, f"error: {error}; {kept}")
        raise Diverged(f"error: {error}; {kept}", 1) from None
    except OSError as error:  # a full disk, a drive that went away: what was saved before is whole
        raise Halt(f"error: {directory.path} can't be written ({error.strerror or error}). {directory.again}", 1) from None
    except Halt:
        raise
    except Exception as error:
        text = f"error: {error}\n" if isinstance(error, BadOption) else "".join(traceback.format_exception(error))
        if _note(directory, text):
            error.traceback_in = str(directory.path / ERROR)  # type: ignore[attr-defined]
        raise


def _note(directory: RunDirectory, text: str) -> bool:
    """Keeps what ended a run; False where that can't be written either."""
    try:
        directory.write(ERROR, text)
        return directory.writes
    except (OSError, Halt, BadOption):
        return False


def cost_by_itself(model: Classifier, x: torch.Tensor) -> dict[str, Any]:
    """Of a bank in parts, this process searches its own: the others are gone, and how long they take to answer is no speed of a model."""
    bank = model.head.bank
    try:
        model.head.bank = None if bank is None else bank.own
        return cost_of(model, x)
    finally:
        model.head.bank = bank


def measure(
    evaluator: Evaluator, parts: Parts, where: Path, *, epoch: int, seconds: float, val: dict[str, float] | None, alone: Any = None
) -> dict[str, Any]:
    """What results.json holds; predictions are kept in `where`. `alone`: what the head's own epochs came to."""
    found, variants = evaluator.evaluate()
    where.mkdir(parents=True, exist_ok=True)
    own, test_rows, sets = evaluator.predictors.own, parts.data.summary["test_sha256"], evaluator.sets
    validated, elsewhere = evaluator.validate(), evaluator.elsewhere()
    others = predictions.of_other_rows(validated, sets.val.target if sets.val else None, elsewhere.validation, elsewhere.left_out)
    predictions.keep(where, variants, sets.test.target, own=own, test_rows=test_rows, others=others)
    calibrated = standard_metrics(validated["calibrated"], sets.val.target) if sets.val and "calibrated" in validated else None
    warn_of_known_rows(parts.config, parts.data, found, val)
    rows = loader(parts.config, parts.data, "test", parts.device)
    assert rows is not None
    x = next(iter(rows.epoch())).x  # real rows: what a search costs depends on them
    measured = {
        **found,
        "val": val,
        **({"val_calibrated": calibrated} if calibrated else {}),
        **({FACT: alone} if alone else {}),
        "epoch": epoch,
        "gflops": parts.gflops,
        **cost_by_itself(parts.model, x),
        "seconds": seconds,
        "data": parts.data.summary,
        "warnings": list(dict.fromkeys([*parts.model.facts.get("warnings", []), *WARNINGS])),
        "config": parts.config.flat(),
        "ignored": dict(parts.config.ignored),
        "versions": versions(),
        "git": git_state(),
        "threads": torch.get_num_threads(),
    }
    return grouped(measured)
