"""The loop: train, evaluate, checkpoint, resume. It reads from top to bottom.

A classifier is a backbone (images or rows to features) and a head (features to a loss, or to log-probabilities); the loop knows
neither what attention is nor which head it trains. Everything random follows from the seed, the epoch and the row (order, augmentation,
noise, dropout) or the batch (MixUp, random candidates of a layer, `--neighbor_sample`); so a run that goes on needs no generator's state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from classifiers.classifier import Classifier
from classifiers.metrics import standard_metrics
from config import Config
from inputs.augmentation import mixup
from inputs.batches import MIXUP, AnyBatches
from inputs.rows import Batch
from layers.dropout import drawing
from layers.functional import full_precision
from ranks import here
from training.bank import BankRefresher
from training.checkpoint import Checkpoints
from training.progress import Log, Stop
from training.state import Place, TrainingState
from utils import Stopped, fold_in


def train(
    config: Config,
    model: Classifier,
    train_set: AnyBatches,
    val_set: AnyBatches | None,
    *,
    log: Log,
    checkpoints: Checkpoints,
    until: int,
    resume: bool = False,
) -> Place:
    """Trains up to epoch `until`, keeping checkpoints/last (to resume from) and checkpoints/best (by validation)."""
    state = begun(config, model, train_set)
    if resume:
        state.load(checkpoints)
    place, patience = state.place, config.training.patience
    refresher = BankRefresher(state, train_set.plain(), config.head.memory_update_freq)
    if checkpoints.best_is_lost:
        take_for_best(state, refresher, val_set, checkpoints)
    with Stop() as stop, log:
        log.start(checkpoints.lines, place.epoch)
        while place.epoch < until and not out_of_patience(place, patience):
            started, rows = time.perf_counter(), place.rows
            if state.ramp is not None:
                state.ramp.before_epoch(place.epoch)
            for group in grouped(train_set, place, config.training.accumulate):
                refresher.for_training()
                step(state, group)
                log.step(place.epoch, place.batch, place.mean_losses(), (place.rows - rows) / (time.perf_counter() - started))
                if stop.agreed() and place.batch < len(train_set):
                    place.seconds += time.perf_counter() - started
                    state.save(checkpoints)
                    where = f"epoch {place.epoch + 1}, batch {place.batch} of {len(train_set)}"
                    raise Stopped(f"stopped by {stop.name} in {where}", stop.exit_code)
            speed = (place.rows - rows) / (time.perf_counter() - started)
            line = {"epoch": place.epoch + 1, "lr": state.schedule.lr, "train": place.mean_losses(), "grad_norm": place.grad_norm}

            # Validation picks the epoch; without a validation split the last epoch is the one.
            refresher.for_evaluation()
            line |= {"embeddings": spread} if (spread := refresher.spread()) else {}
            scores = evaluate(state.averaged, val_set) if val_set else None
            state.schedule.after_epoch(scores["nll"] if scores else None)
            better = scores is None or better_epoch(scores, place, config.training.select, len(val_set.target) if val_set else 0)
            place.next_epoch(scores, better)
            place.seconds += time.perf_counter() - started
            line |= {"val": scores, "images_per_second": round(speed, 1), "seconds": round(place.seconds, 3)}
            checkpoints.lines.append(line)  # the checkpoint has it first: what is missing on disk is written again from there
            ended = place.epoch >= until or out_of_patience(place, patience)
            state.save(checkpoints, state.as_best(scores) if better else None, now=ended)
            log.epoch(line, better)
            if stop.agreed():
                state.save(checkpoints)
                raise Stopped(f"stopped by {stop.name} after epoch {place.epoch}", stop.exit_code)
    if place.epoch < config.training.num_epochs and not out_of_patience(place, patience):
        raise Stopped(f"stopped after epoch {place.epoch} of {config.training.num_epochs}, as asked", 0)
    return place


def train_head(config: Config, model: Classifier, train_set: AnyBatches) -> None:
    """`head_epochs` more for the head alone, over features of all rows as evaluation sees them.

    Nothing is saved in between: over features, an epoch takes about as long as a checkpoint.
    """
    epochs = config.training.head_epochs
    alone = {"scheduler": "cosine", "warmup_epochs": epochs / 5, "mixup_alpha": 0.0, "cutmix_alpha": 0.0, "ema_decay": 0.0}
    alone |= {"num_epochs": epochs, "dropout_ramp": False, "use_compiled": False, "accumulate": 1}
    moving = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
    for parameter in moving:
        parameter.requires_grad_(False)
    state = begun(config.but(**alone), model, train_set)
    refresher = BankRefresher(state, train_set.plain(), config.head.memory_update_freq)
    for _ in range(epochs):
        for group in grouped(train_set, state.place, 1):
            refresher.for_training()
            step(state, group)
        state.place.next_epoch(None, False)
    refresher.for_evaluation()
    for parameter in moving:
        parameter.requires_grad_(True)


def begun(config: Config, model: Classifier, train_set: AnyBatches) -> TrainingState:
    """Where a training begins; of several processes, the same in each, and the gradients of their losses will be averaged."""
    state = TrainingState(config, model, len(train_set), train_set.device)
    state.loss = here().wrapped(state.loss)
    return state


def step(state: TrainingState, group: list[Batch]) -> None:
    """One optimizer step on a group of batches: a single one, unless --accumulate asks for more."""
    options, model, place, optimizer, scaler = state.options, state.model, state.place, state.optimizer, state.scaler
    if not model.training:
        model.train()
    state.schedule.before_update(place.updates)
    rows, sums = sum(batch.of for batch in group), dict[str, float]()
    for number, batch in enumerate(group, 1):
        # Forward, on rows that were mixed with others of their batch.
        draw = fold_in(state.seed, MIXUP, place.epoch, place.batch)
        batch = mixup(batch, model.num_classes, options.mixup_alpha, options.cutmix_alpha, draw)
        drawn = drawing(state.seed, place.epoch, place.batch, batch.index)
        with here().during(state.loss, counts=batch.counts, last=number == len(group)), drawn:
            terms = state.loss(batch)
            losses = torch.stack(list(terms.values()))
            # Backward. A row counts the same in a small last batch, and on each of several processes, whose gradients are averaged.
            scaler.scale(losses.sum() * (here().world * len(batch) / rows)).backward()
        place.batch += 1
        for name, value in zip(terms, losses.tolist(), strict=True):
            sums[name] = sums.get(name, 0.0) + value * len(batch)
    for name, value in (sums := here().summed(sums)).items():
        place.losses[name] = place.losses.get(name, 0.0) + value
    # Guard: no step on what is not finite.
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in state.parameters.values() if p.grad is not None])
    place.grad_norm = norm.item()
    state.require_finite(sum(sums.values()) / rows)
    # Clip, step, average.
    if options.clip_grad_norm and not place.grad_norm + 1e-6 <= options.clip_grad_norm:  # else it would multiply all by 1
        torch.nn.utils.clip_grads_with_norm_(list(state.parameters.values()), options.clip_grad_norm, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    place.updates, place.rows, place.loss_rows = place.updates + 1, place.rows + rows, place.loss_rows + rows
    if state.average is not None:
        state.average.update(min(options.ema_decay, (1 + place.updates) / (10 + place.updates)))  # early on, little to average


def grouped(batches: AnyBatches, place: Place, accumulate: int) -> Iterator[list[Batch]]:
    """What is left of the epoch, `accumulate` batches at a time."""
    group: list[Batch] = []
    for batch in batches.epoch(place.epoch, place.batch):
        group.append(batch)
        if len(group) == accumulate:
            yield group
            group = []
    if group:
        yield group


def better_epoch(scores: dict[str, float], place: Place, select: str, rows: int) -> bool:
    """Whether an epoch's validation scores, over so many rows, are better than those of the best epoch so far.

    By accuracy: epochs within one standard error of the highest accuracy so far count as equal, and the lowest NLL among them wins.
    A few hundred rows can't tell them apart, and the NLL of an early epoch may be twice that of a later one.
    """
    best, top = place.best, max(place.top_accuracy, scores["accuracy"])
    place.top_accuracy = top
    if best is None or select == "last":
        return True
    lower = scores["nll"] < best["nll"]
    if select == "nll":
        return lower
    # NOTE: with two right and two wrong rows more (Agresti and Coull, 1998): rows that are all right would have no error at all.
    likely = (top * rows + 2) / (rows + 4)
    least = top - math.sqrt(likely * (1 - likely) / (rows + 4))
    return scores["accuracy"] >= least and (lower or best["accuracy"] < least)


def better_head(after: Judged, before: Judged, select: str) -> bool:
    """Whether a head that learned on alone is better than it was, on the same validation rows.

    By accuracy: the lower NLL wins, unless chance explains no more that rows changed one way (sign test, one-sided 5 %, in its normal
    approximation). NOTE: not as better_epoch: that epoch was the highest of many, and whoever tries once lies under it by chance alone.
    """
    if select == "last":
        return True
    lost, gained = (int((one.right & ~other.right).sum()) for one, other in ((before, after), (after, before)))
    if select == "accuracy" and abs(lost - gained) - 1 > 1.645 * math.sqrt(lost + gained):
        return gained > lost
    return after.scores["nll"] < before.scores["nll"]


def take_for_best(state: TrainingState, refresher: BankRefresher, val_set: AnyBatches | None, checkpoints: Checkpoints) -> None:
    """Where the best epoch so far is lost: the last one is the best that is known. In the middle of an epoch, the next will be."""
    place = state.place
    place.best, place.best_epoch, place.top_accuracy, place.stale = None, 0, 0.0, 0
    if place.batch == 0:
        refresher.for_evaluation()
        place.best = evaluate(state.averaged, val_set) if val_set else None
        place.best_epoch, place.top_accuracy = place.epoch, place.best["accuracy"] if place.best else 0.0
        state.save(checkpoints, state.as_best(place.best))


def out_of_patience(place: Place, patience: int) -> bool:
    return patience > 0 and place.stale >= patience


class Judged(NamedTuple):
    """A model as trained: its scores, and which rows it has right."""

    scores: dict[str, float]
    right: Tensor


def judged(model: Classifier, rows: AnyBatches) -> Judged:
    """Over all rows: predictions are collected, then counted once."""
    log_probs, target = model.of_rows(rows, lambda features: full_precision(model.head(features))).cpu(), rows.target.cpu()
    # NOTE: what follows from them must be the same everywhere, and processors may differ in the last digit.
    return here().on_first(lambda: Judged(standard_metrics(log_probs, target), log_probs.argmax(1) == target))


def evaluate(model: Classifier, rows: AnyBatches) -> dict[str, float]:
    return judged(model, rows).scores
