"""The loop: train, evaluate, checkpoint, resume. It reads from top to bottom.

A model is a backbone (images or rows to features) and a head (features to a loss, or to log-probabilities); the loop knows
neither what attention is nor which head it trains. Everything random follows from the seed, the epoch and the row.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import checkpoint
from batches import BANK, MIX, AnyBatches, Batch, mixed
from classifiers import Bank, Head, metrics
from config import Config
from optimization import Average, Schedule, make_optimizer
from progress import Log, Stop
from utils import Halt, fold_in


class Classifier(nn.Module):
    """Backbone and head: inputs to log-probabilities. `facts` go into its checkpoints: all it takes to rebuild it."""

    def __init__(self, backbone: nn.Module, head: Head, num_classes: int, facts: dict[str, Any]) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.num_classes, self.facts = num_classes, facts

    def features(self, batch: Batch) -> Tensor:
        """Of a frozen backbone they may have been computed before."""
        return batch.x if batch.embedded else self.backbone(batch.x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Diverged(Halt):
    """The loss or the gradient is not finite, and the optimizer has not stepped on it; or the model's outputs are NaN."""


class Stopped(Halt):
    """Ended before its last epoch, on a signal or on request; saved, to be resumed."""


# ---------------------------------------------------------------- the loop


def train(
    config: Config,
    model: Classifier,
    train_set: AnyBatches,
    val_set: AnyBatches | None,
    *,
    log: Log,
    run: Path,
    until: int,
    resume: bool = False,
) -> Place:
    """Trains up to epoch `until`, keeping run/checkpoints/last (to resume from) and run/checkpoints/best (by validation)."""
    last, best = run / "checkpoints" / "last", run / "checkpoints" / "best"
    state = State(config, model, len(train_set), train_set.device)
    if resume:
        state.load(last)
    place = state.place
    memory = Memory(state, train_set.plain(), config.memory_update_freq or 1.0)
    with Stop() as stop, log:
        while place.epoch < until and not out_of_patience(place, config):
            started, rows = time.perf_counter(), place.rows
            for batch in grouped(train_set, place, config.accumulate):
                memory.for_training()
                state.update(batch)
                log.step(place.epoch, place.batch, place.mean_losses(), (place.rows - rows) / (time.perf_counter() - started))
                if stop.signal and place.batch < len(train_set):
                    place.seconds += time.perf_counter() - started
                    state.save(last)
                    where = f"epoch {place.epoch + 1}, batch {place.batch} of {len(train_set)}"
                    raise Stopped(f"stopped by {stop.name} in {where}", stop.exit_code)
            speed = (place.rows - rows) / (time.perf_counter() - started)
            line = {"epoch": place.epoch + 1, "lr": state.schedule.lr, "train": place.mean_losses(), "grad_norm": place.grad_norm}

            # Validation picks the epoch; without a validation split the last epoch is the one.
            memory.for_evaluation()
            scores = evaluate(state.averaged, val_set, config.use_amp) if val_set else None
            state.schedule.after_epoch(scores["nll"] if scores else None)
            better = scores is None or place.best is None or better_than(scores, place.best)
            place.next_epoch(scores, better)
            place.seconds += time.perf_counter() - started
            if better:
                state.save_weights(best, scores)
            state.save(last)
            log.epoch({**line, "val": scores, "images_per_second": round(speed, 1), "seconds": round(place.seconds, 3)}, better)
            if stop.signal and place.epoch < until:
                raise Stopped(f"stopped by {stop.name} after epoch {place.epoch}", stop.exit_code)
    if place.epoch < config.num_epochs and not out_of_patience(place, config):
        raise Stopped(f"stopped after epoch {place.epoch} of {config.num_epochs}, as asked", 0)
    return place


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


def better_than(scores: dict[str, float], best: dict[str, float]) -> bool:
    """More accurate on validation; at equal accuracy, the lower NLL."""
    return (scores["accuracy"], -scores["nll"]) > (best["accuracy"], -best["nll"])


def out_of_patience(place: Place, config: Config) -> bool:
    return config.patience > 0 and place.stale >= config.patience


@torch.no_grad()  # not inference_mode: what a layer caches here must stay usable in training
def evaluate(model: Classifier, batches: AnyBatches, use_amp: bool = False) -> dict[str, float]:
    """Metrics over all rows: predictions are collected, then counted once."""
    model.eval()
    rows, targets = [], []
    for batch in batches.epoch():
        with autocast(batches.device, use_amp):
            features = model.features(batch)
        rows.append(model.head(features.float()).float().cpu())
        targets.append(batch.target.cpu())
    return metrics(without_nan(torch.cat(rows)), torch.cat(targets))


def without_nan(outputs: Tensor) -> Tensor:
    if lost := int(outputs.isnan().any(1).sum()):  # metrics of these would look like numbers
        raise Diverged(f"the model gives NaN for {lost} of {len(outputs)} rows", 1)
    return outputs


@torch.no_grad()
def features_of(model: Classifier, batches: AnyBatches, use_amp: bool = False) -> Tensor:
    """What the backbone makes of all rows, (N, F), in their order."""
    model.eval()
    rows = []
    for batch in batches.epoch():
        with autocast(batches.device, use_amp):
            rows.append(model.features(batch).float())
    return without_nan(torch.cat(rows))


# ---------------------------------------------------------------- the bank


@torch.no_grad()
def remember(model: Classifier, rows: AnyBatches, use_amp: bool = False) -> None:
    """Hands a head that looks at neighbors a bank of the embeddings of all training rows, as evaluation sees them."""
    if not model.head.wants_bank:
        return
    model.eval()
    blocks = embedded(model, rows, use_amp)
    first = next(blocks)  # tells the dimension
    bank = Bank(first[1].shape[1], **model.head.bank_options)
    ids = torch.arange(len(rows.target)) if bank.cap is None else order_in_bank(len(rows.target), rows.seed)
    bank.refresh(rows.target.cpu()[ids], ids, itertools.chain([first], blocks))
    model.head.refresh(bank)


def embedded(model: Classifier, rows: AnyBatches, use_amp: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers (B,) and embeddings (B, D), a batch at a time."""
    for batch in rows.epoch():
        with autocast(rows.device, use_amp):
            features = model.features(batch)
        yield batch.index, without_nan(model.head.embed(features.float())).float()


def order_in_bank(rows: int, seed: int) -> Tensor:
    """Of a bank with a cap, where who comes last stays: that must not depend on the order of a file."""
    return torch.from_numpy(np.random.default_rng(fold_in(seed, BANK)).permutation(rows))


class Memory:
    """Keeps the banks near the weights: of the averaged weights for each evaluation, and every so often the same for training.

    With weight averaging, a row in training is thus compared with what the averaged weights made of the others.
    """

    def __init__(self, state: State, rows: AnyBatches, every: float) -> None:
        self.state, self.rows = state, rows
        self.every = max(1, round(every * state.schedule.updates_per_epoch))
        self.made_at = -1  # update whose weights made the averaged model's bank

    def for_training(self) -> None:
        state = self.state
        if state.bank is None or state.place.updates % self.every == 0:
            self.for_evaluation()
            state.bank = state.averaged.head.bank
        if state.bank is not None and state.model.head.bank is not state.bank:  # evaluation has put a newer one there
            state.model.head.refresh(state.bank)

    def for_evaluation(self) -> None:
        if self.made_at != self.state.place.updates:
            remember(self.state.averaged, self.rows, self.state.config.use_amp)
            self.made_at = self.state.place.updates


# ---------------------------------------------------------------- where training stands


@dataclass
class Place:
    """Where a run stands. All of it is saved, so that a stop anywhere leaves no trace."""

    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    updates: int = 0
    rows: int = 0
    losses: dict[str, float] = field(default_factory=dict)  # sums over the rows of this epoch
    loss_rows: int = 0
    grad_norm: float = 0.0
    best: dict[str, float] | None = None  # validation scores of the best epoch
    best_epoch: int = 0
    stale: int = 0  # epochs since
    seconds: float = 0.0

    def mean_losses(self) -> dict[str, float]:
        return {name: total / self.loss_rows for name, total in self.losses.items()}

    def next_epoch(self, scores: dict[str, float] | None, better: bool) -> None:
        self.epoch, self.batch, self.losses, self.loss_rows = self.epoch + 1, 0, {}, 0
        self.best_epoch, self.best, self.stale = (self.epoch, scores, 0) if better else (self.best_epoch, self.best, self.stale + 1)


class State:
    """Everything that training changes: weights, their average, optimizer, schedule, loss scale, place."""

    def __init__(self, config: Config, model: Classifier, batches_per_epoch: int, device: torch.device) -> None:
        self.config, self.model, self.device = config, model, device
        self.place = Place()
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(config, model)
        self.schedule = Schedule(config, self.optimizer, math.ceil(batches_per_epoch / config.accumulate))
        self.ema = copy.deepcopy(model).requires_grad_(False) if config.ema_decay else None
        self.average = Average(self.ema, model) if self.ema is not None else None
        self.bank: Bank | None = None  # that training votes with
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.use_amp and amp_dtype(device) is torch.float16)
        if config.use_compiled:
            model.backbone.compile(mode=config.compile_mode)

    @property
    def averaged(self) -> Classifier:
        """The weights that are evaluated."""
        return self.ema or self.model

    def update(self, group: list[Batch]) -> None:
        """One optimizer step on a group of batches."""
        config, place = self.config, self.place
        if not self.model.training:
            self.model.train()
        self.schedule.before_update(place.updates)
        rows = sum(len(batch) for batch in group)
        loss_of_group = 0.0
        for batch in group:
            draw = fold_in(config.seed, MIX, place.epoch, place.batch)
            batch = mixed(batch, self.model.num_classes, config.mixup_alpha, config.cutmix_alpha, draw)
            with autocast(self.device, config.use_amp):
                terms = self.model.head.loss(self.model.features(batch), batch.target, batch.index)
                losses = torch.stack([term.float() for term in terms.values()])
            self.scaler.scale(losses.sum() * (len(batch) / rows)).backward()
            place.batch += 1
            for name, value in zip(terms, losses.tolist(), strict=True):
                place.losses[name] = place.losses.get(name, 0.0) + value * len(batch)
                loss_of_group += value * len(batch) / rows
        self._step(loss_of_group)
        place.updates, place.rows, place.loss_rows = place.updates + 1, place.rows + rows, place.loss_rows + rows
        if self.average is not None:
            self.average.update(min(config.ema_decay, (1 + place.updates) / (10 + place.updates)))  # early on, little to average

    def _step(self, loss: float) -> None:
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.place.grad_norm = norm.item()
        # NOTE: one step on a NaN gradient poisons AdamW's averages for good. With loss scaling an infinite norm is
        # the scaler's business: it skips the step and lowers the scale.
        if not math.isfinite(loss) or not (math.isfinite(self.place.grad_norm) or self.scaler.is_enabled()):
            raise Diverged(self._diverged(loss), 1)
        if self.config.clip_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.config.clip_grad_norm, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _diverged(self, loss: float) -> str:
        worst, name = 0.0, "none"
        for key, parameter in self.parameters.items():
            largest = parameter.grad.abs().nan_to_num(math.inf).max().item() if parameter.grad is not None else 0.0
            if largest > worst:
                worst, name = largest, key
        size = "not finite" if math.isinf(worst) else f"{worst:.3g}"
        return (
            f"training diverged in epoch {self.place.epoch + 1}, step {self.place.updates + 1}: loss {loss:.4g}, "
            f"gradient norm {self.place.grad_norm:.4g}, learning rate {self.schedule.lr:.3g}, largest gradient {name} ({size})"
        )

    # ------------------------------------------------ to disk and back

    def save(self, folder: Path) -> None:
        """Everything needed to go on as if never stopped."""
        tensors, facts = checkpoint.pack_optimizer(self.optimizer)
        random_tensors, random_facts = checkpoint.pack_rng()
        groups = {"model": self.model.state_dict(), "training": {**tensors, **random_tensors}}
        if self.ema is not None:
            groups["ema"] = self.ema.state_dict()
        banks, bank_facts = packed(self.bank)
        training = {
            "place": dataclasses.asdict(self.place),
            "optimizer": facts,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": random_facts,
        }
        facts = {**self.model.facts, "epoch": self.place.epoch, "seconds": self.place.seconds, "training": training}
        checkpoint.save(folder, groups | banks, facts | bank_facts)

    def save_weights(self, folder: Path, scores: dict[str, float] | None) -> None:
        """The weights that were evaluated, and how they did."""
        banks, bank_facts = packed(self.averaged.head.bank)
        facts = {**self.model.facts, "epoch": self.place.epoch, "val": scores, "seconds": self.place.seconds}
        checkpoint.save(folder, {"model": self.averaged.state_dict()} | banks, facts | bank_facts)

    def load(self, folder: Path) -> None:
        tensors, facts = checkpoint.load(folder)
        training = facts["training"]
        self.model.load_state_dict(tensors["model"])
        if self.ema is not None:
            self.ema.load_state_dict(tensors["ema"])
        checkpoint.unpack_optimizer(self.optimizer, tensors["training"], training["optimizer"])
        self.schedule.load_state_dict(training["schedule"])
        self.scaler.load_state_dict(training["scaler"])
        vars(self.place).update(training["place"])
        self.bank = Bank.unpack(tensors["bank"], facts["bank"]) if "bank" in tensors else None
        checkpoint.unpack_rng(tensors["training"], training["random"])  # last: nothing after it draws


def packed(bank: Bank | None, name: str = "bank") -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """A bank as a group of tensors of a checkpoint and what is written beside them; nothing for a head without one."""
    if bank is None:
        return {}, {}
    tensors, rest = bank.pack()
    return {name: tensors}, {name: rest}


# ---------------------------------------------------------------- precision


def amp_dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16


def autocast(device: torch.device, enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, amp_dtype(device)) if enabled else nullcontext()
