"""Our training loop against a bare one, on the same model and the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import dataset
from benchmarks.timing import Ask, Group, Side, Watch
from config import Config
from inputs.rows import Batch, Data
from run.complete import complete
from run.parts import build_model, loader
from train_eval import step
from training.state import TrainingState

PART = "loop"
TINY = dict(resize=224, patch_size=16, num_layers=12, num_heads=3, d_hidden=192, d_mlp=768)  # ViT-Tiny


@dataclass(frozen=True)
class Sizes:
    """Data set and options of each comparison, by what it is called."""

    settings: dict[str, tuple[str, dict[str, Any]]]
    batches: int  # of an epoch, at most
    rounds: int = 15
    seconds: float = 60


DIGITS: dict[str, tuple[str, dict[str, Any]]] = {"the default run on digits": ("digits", {})}
FULL = Sizes(DIGITS | {"ViT-Tiny at 224": ("fake(train=200, test=10, size=32)", {**TINY, "batch_size": 8})}, 4)
QUICK = Sizes(DIGITS, 8)


def groups(ask: Ask, sizes: Sizes | None = None) -> Iterator[Group]:
    sizes = sizes or (QUICK if ask.quick else FULL)
    for title, (name, given) in sizes.settings.items():
        prepared = Prepared(name, sizes.batches, ask.device, **given)
        sides = {"bare loop": prepared.bare_loop(), "our loop": prepared.our_loop()}
        rows, training = sum(map(len, prepared.batches)), prepared.config.training
        extras = {"MixUp": training.mixup_alpha, "an average of the weights": training.ema_decay}
        notes = {"our loop": f"with {' and '.join(extra for extra, value in extras.items() if value)}"} if any(extras.values()) else {}
        setting = f"{title}, {rows} rows in {len(prepared.batches)} batches"
        effort = ask.effort(sizes.rounds, sizes.seconds)
        yield Group(PART, setting, ("steps",), ("bare loop",), sides, effort, ask.device, {"rows": rows}, notes=notes)


class Prepared:
    """A configuration, and batches that wait in memory: the pipeline has a measurement of its own."""

    def __init__(self, name: str, most: int, device: torch.device, **given: Any) -> None:
        self.device = device
        self.data: Data = dataset.load(name)
        self.config: Config = complete({"dataset": name, **given}, self.data)
        train_set = loader(self.config, self.data, "train", device)
        assert train_set is not None
        self.length = len(train_set)
        self.batches: list[Batch] = list(train_set.epoch(0))[:most]

    def our_loop(self) -> Side:
        """Schedule, clipping, guards, losses, averages, place: all that the loop does to a batch."""
        state = TrainingState(self.config, build_model(self.config, self.data, self.device), self.length, self.device)

        def run(watch: Watch) -> None:
            state.place.batch = 0
            watch.lap()
            for batch in self.batches:
                step(state, [batch])
            watch.lap()

        return run

    def bare_loop(self) -> Side:
        model, options = build_model(self.config, self.data, self.device), self.config.training
        head: Any = model.head
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)  # as ours is

        def run(watch: Watch) -> None:
            model.train()
            watch.lap()
            for batch in self.batches:
                loss = F.cross_entropy(head.fc(model.backbone(batch.x)), batch.target)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            watch.lap()

        return run
