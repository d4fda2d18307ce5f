"""Where training stands: everything that it changes, to disk and back."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from classifiers.bank import Bank
from classifiers.classifier import Classifier, amp_dtype
from config import Config
from inputs.rows import Batch
from training import checkpoint
from training.checkpoint import Checkpoints, Content
from training.optimizer import Average, DropoutRamp, Schedule, make_optimizer
from utils import Diverged, understood


@dataclass
class Place:
    """How far a run has come. All of it is saved, so that a stop anywhere leaves no trace."""

    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    updates: int = 0
    rows: int = 0
    losses: dict[str, float] = field(default_factory=dict)  # sums over the rows of this epoch
    loss_rows: int = 0
    grad_norm: float = 0.0
    best: dict[str, float] | None = None  # validation scores of the best epoch
    top_accuracy: float = 0.0  # the highest on validation rows so far, of the best epoch or of another
    best_epoch: int = 0
    stale: int = 0  # epochs since
    seconds: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Place:
        """As a checkpoint says it; a value of another kind is refused."""
        place = cls(**values)
        counts = (place.epoch, place.batch, place.updates, place.rows, place.loss_rows, place.best_epoch, place.stale)
        numbers = (place.grad_norm, place.top_accuracy, place.seconds, *place.losses.values())
        if not all(type(count) is int and count >= 0 for count in counts) or not all(_is_number(number) for number in numbers):
            raise TypeError("the place has counts or numbers that are none")
        if place.best is not None and not (all(map(_is_number, place.best.values())) and {"accuracy", "nll"} <= set(place.best)):
            raise TypeError("the scores of the best epoch are none")
        if (place.loss_rows > 0) != bool(place.losses):
            raise ValueError("the losses are of no rows")
        return place

    def mean_losses(self) -> dict[str, float]:
        return {name: total / self.loss_rows for name, total in self.losses.items()}

    def next_epoch(self, scores: dict[str, float] | None, better: bool) -> None:
        self.epoch, self.batch, self.losses, self.loss_rows = self.epoch + 1, 0, {}, 0
        self.best_epoch, self.best, self.stale = (self.epoch, scores, 0) if better else (self.best_epoch, self.best, self.stale + 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Loss(nn.Module):
    """A batch to its loss terms, as a module: what averages gradients sees only `forward`."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.model.loss(batch)


class TrainingState:
    """Everything that training changes: weights, their average, optimizer, schedule, loss scale, bank, place."""

    def __init__(self, config: Config, model: Classifier, batches_per_epoch: int, device: torch.device) -> None:
        self.options, self.seed, self.model = config.training, config.system.seed, model
        self.place, self.batches = Place(), batches_per_epoch
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.options, model)
        self.schedule = Schedule(self.options, self.optimizer, math.ceil(batches_per_epoch / self.options.accumulate))
        self.ramp = DropoutRamp(model.backbone, self.options.num_epochs) if self.options.dropout_ramp else None
        self.ema = copy.deepcopy(model).requires_grad_(False) if self.options.ema_decay else None
        self.average = Average(self.ema, model) if self.ema is not None else None
        self.bank: Bank | None = None  # that training votes with
        self.bank_weights: dict[str, Tensor] | None = None  # that it was made of, if it is in parts: a checkpoint has these instead
        self.loss: nn.Module = Loss(model)
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.use_amp and amp_dtype(device) is torch.float16)
        if config.system.use_compiled:
            model.backbone.compile(mode=config.system.compile_mode)

    @property
    def averaged(self) -> Classifier:
        """The weights that are evaluated."""
        return self.ema or self.model

    def take_bank(self) -> None:
        """Training votes with the bank of the averaged weights, as they are now."""
        self.bank = self.averaged.head.bank
        self.bank_weights = weights_of(self.averaged) if self.bank is not None and self.bank.in_parts else None

    def require_finite(self, loss: float) -> None:
        """NOTE: one step on a NaN gradient poisons AdamW's averages for good. With loss scaling an infinite norm is the scaler's
        business: it skips the step and lowers the scale."""
        place = self.place
        if math.isfinite(loss) and (math.isfinite(place.grad_norm) or self.scaler.is_enabled()):
            return
        worst, name = 0.0, "none"
        for key, parameter in self.parameters.items():
            largest = parameter.grad.abs().nan_to_num(math.inf).max().item() if parameter.grad is not None else 0.0
            if largest > worst:
                worst, name = largest, key
        size = "not finite" if math.isinf(worst) else f"{worst:.3g}"
        raise Diverged(
            f"training diverged in epoch {place.epoch + 1}, step {place.updates + 1}: loss {loss:.4g}, "
            f"gradient norm {place.grad_norm:.4g}, learning rate {self.schedule.lr:.3g}, largest gradient {name} ({size})",
            1,
        )

    # ------------------------------------------------ to disk and back

    def save(self, checkpoints: Checkpoints, best: Content | None = None, *, now: bool = True) -> None:
        """Everything needed to go on as if never stopped, and `best` if this epoch is. `now`: see Checkpoints."""
        tensors, optimizer = checkpoint.pack_optimizer(self.optimizer)
        groups = {"model": self.model.state_dict(), "training": tensors}
        if self.ema is not None:
            groups["ema"] = self.ema.state_dict()
        banks, bank_facts = checkpoint.pack_bank(self.bank)
        if self.bank_weights is not None:
            groups["bank_weights"] = self.bank_weights
        training = {
            "place": dataclasses.asdict(self.place),
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        facts = {**self.model.facts, "epoch": self.place.epoch, "seconds": self.place.seconds, "training": training}
        checkpoints.save((groups | banks, facts | bank_facts), best, now=now)

    def as_best(self, scores: dict[str, float] | None) -> Content:
        """The weights that were evaluated, and how they did."""
        banks, bank_facts = checkpoint.pack_bank(self.averaged.head.bank)
        facts = {**self.model.facts, "epoch": self.place.epoch, "val": scores, "seconds": self.place.seconds}
        return {"model": self.averaged.state_dict()} | banks, facts | bank_facts

    def load(self, checkpoints: Checkpoints) -> None:
        with understood("checkpoint", str(checkpoints.last)):
            self._load(checkpoints)

    def _load(self, checkpoints: Checkpoints) -> None:
        tensors, facts = checkpoints.load_last()
        training: dict[str, Any] = facts["training"]
        place = Place.of(training["place"])
        if place.epoch != facts["epoch"] or not 0 <= place.batch <= self.batches:
            raise ValueError("the place is in no epoch of this run")
        self.model.load_state_dict(tensors["model"])
        if self.ema is not None:
            self.ema.load_state_dict(tensors["ema"])
        checkpoint.unpack_optimizer(self.optimizer, tensors["training"], training["optimizer"])
        self.schedule.load_state_dict(training["schedule"])
        self.scaler.load_state_dict(training["scaler"])
        vars(self.place).update(vars(place))
        self.bank_weights = tensors.get("bank_weights")
        self.bank = Bank.unpack(tensors["bank"], facts["bank"]) if "bank" in tensors else None  # whole, until it is built again
