"""What moves the weights: optimizer with its groups, learning rate over time, and the average of the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainingOptions


def make_optimizer(options: TrainingOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Backbone, projection, attention and the rest of the head as groups of their own learning rate; weight decay on matrices
    only, as in timm."""
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    head: Any = model.head
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith(("cls_token", "pos_embed", "reg_token"))
            owner, _, rest = name.partition(".")
            groups.setdefault((owner if owner == "backbone" else head.part_of(rest), decays), []).append(parameter)
    rates = {"backbone": options.lr_backbone, "projection": options.lr_projection, "attention": options.lr_attention}
    listed: list[dict[str, Any]] = [
        {
            "params": parameters,
            "name": part,
            "peak_lr": options.lr if rates.get(part) is None else rates[part],
            "weight_decay": options.weight_decay if decays else 0.0,
        }
        for (part, decays), parameters in groups.items()
    ]
    fused = next(model.parameters()).device.type in ("cpu", "cuda")  # one call for all tensors: small models live on it
    if options.optimizer == "sgd":
        return torch.optim.SGD(listed, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0, fused=fused)
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(listed, lr=options.lr, fused=fused)


class Schedule:
    """Learning rate at each update: linear warm-up times cosine, step or plateau. A function of the update, but for plateau's memory."""

    def __init__(self, options: TrainingOptions, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> None:
        self.options, self.optimizer, self.updates_per_epoch = options, optimizer, updates_per_epoch
        self.plateau = {"factor": 1.0, "best": math.inf, "stale": 0}

    def factor(self, update: int) -> float:
        """Share of the peak learning rate."""
        options = self.options
        warmup, total = options.warmup_epochs * self.updates_per_epoch, options.num_epochs * self.updates_per_epoch
        if update < warmup:
            return (update + 1) / (warmup + 1)
        if options.scheduler == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - warmup) / max(1, total - warmup))))
        if options.scheduler == "step":
            return options.lr_gamma ** (update // self.updates_per_epoch // options.lr_step)
        return self.plateau["factor"]

    def before_update(self, update: int) -> None:
        factor = self.factor(update)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor

    def after_epoch(self, val_loss: float | None) -> None:
        """Plateau: after more than `lr_step` epochs without a lower validation loss, the rate is multiplied by `lr_gamma`."""
        if self.options.scheduler != "plateau" or val_loss is None:
            return
        memory = self.plateau
        memory["best"], memory["stale"] = (val_loss, 0) if val_loss < memory["best"] else (memory["best"], memory["stale"] + 1)
        if memory["stale"] > self.options.lr_step:
            memory["factor"], memory["stale"] = memory["factor"] * self.options.lr_gamma, 0

    @property
    def lr(self) -> float:
        """The highest of the groups'."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.plateau)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plateau = {"factor": float(state["factor"]), "best": float(state["best"]), "stale": int(state["stale"])}


class DropoutRamp:
    """Dropout of the backbone grows over the epochs, from 0 to 7/8 of its value (arXiv 1703.06229).

    NOTE: the bank is embedded without dropout. In the first epochs dropout moves a query farther than its class does: its nearest rows
    are any rows, and the loss of a vote then falls fastest by making all rows equal.
    In eight steps: a compiled backbone is compiled anew for each, and torch gives up after eight times.
    """

    STEPS = 8

    def __init__(self, backbone: nn.Module, epochs: int) -> None:
        self.drops = [(module, module.p) for module in backbone.modules() if isinstance(module, nn.Dropout)]
        self.epochs = epochs

    def before_epoch(self, epoch: int) -> None:
        for module, full in self.drops:
            module.p = full * (min(epoch, self.epochs) * self.STEPS // self.epochs) / self.STEPS


class Average:
    """Moves an average of the weights after them; buffers (BatchNorm's statistics) are taken as they are."""

    def __init__(self, ema: nn.Module, model: nn.Module) -> None:
        pairs = [(old, new) for old, new in zip(ema.parameters(), model.parameters(), strict=True) if new.requires_grad]
        self.old: list[Tensor] = [old for old, _ in pairs]
        self.new: list[Tensor] = [new for _, new in pairs]
        self.buffers = list(zip(ema.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, decay: float) -> None:
        torch._foreach_lerp_(self.old, self.new, 1 - decay)
        for old, new in self.buffers:
            old.copy_(new)
