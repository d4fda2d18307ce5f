"""A run that several processes train: its directory, which the first has locked and writes and the others only read; and what can't be
shared."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from classifiers import HEADS
from config import Config
from inputs.rows import Data
from layers.dropout import drawing
from ranks import here
from run.directory import RunDirectory, look
from utils import BadOption, say, warn, whole_numbers

# ---------------------------------------------------------------- the directory


class Watched(RunDirectory):
    """A run's directory where another process writes it."""

    writes = False

    def claim(self, paths: Iterable[Path]) -> None: ...

    def write(self, name: str, content: str | bytes) -> None: ...

    def add(self, name: str, line: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def delete(self, name: str) -> None: ...

    def sweep(self) -> None: ...

    def _write_marker(self) -> None: ...


@contextlib.contextmanager
def shared(opening: AbstractContextManager[RunDirectory]) -> Iterator[RunDirectory]:
    """A directory that the first process opens, as each has it."""
    with contextlib.ExitStack() as stack:
        own: list[RunDirectory] = []

        def opened() -> tuple[Path, dict[str, Any]]:
            own.append(stack.enter_context(opening))
            return own[0].path, own[0].marker

        path, marker = here().on_first(opened)
        yield own[0] if own else Watched(path, marker)


def look_for_all(folder: Path, overwrite: bool) -> None:
    """May a run begin here? The first process looks, and what it finds ends all."""
    here().on_first(lambda: look(folder, overwrite))


# ---------------------------------------------------------------- what can't be shared


def check_processes(config: Config, device: torch.device) -> None:
    """What several processes can't share."""
    world = here().world
    if world > 1 and config.training.batch_size < 2 * world:
        rule = f"is of all processes together, and must be at least 2 rows for each of the {world}"
        raise BadOption("batch_size", rule, config.training.batch_size)
    if world > 1 and device.type == "mps":
        raise BadOption("device", f"must be cpu or cuda: {world} processes can't share an Apple GPU", "mps")


def check_shards(config: Config, data: Data, typed: frozenset[str]) -> None:
    """What a bank in parts can't do."""
    world, options = here().world, config.head
    if not options.shard_bank or not HEADS[options.head].wants_bank:
        return
    if world == 1:
        if "shard_bank" in typed:
            say("shard_bank: one process, which holds all rows (torchrun starts several)")
        return
    if options.bank_cap:
        raise BadOption("bank_cap", "needs all rows in each process, to tell which leave; without --shard_bank it works", options.bank_cap)
    if config.evaluation.continual:
        raise BadOption("continual", "needs all rows in one process, which others join; without --shard_bank it works", True)
    asked = [k for name in ("k_eval", "k_ensemble") for k in whole_numbers(name, getattr(config.evaluation, name))]
    least, k = len(data.train) // world, max(options.k_train, *asked, 1)
    if least < k:
        raise BadOption("shard_bank", f"leaves a process {least} of {len(data.train)} rows, fewer than the {k} neighbors of a query", True)


def part_of_bank(config: Config, rows: int) -> int:
    """Of so many rows in the bank, those that each process searches."""
    return rows // (here().world if config.head.shard_bank else 1)


def warn_of_own_draws(config: Config, backbone: torch.nn.Module, shape: tuple[int, ...]) -> None:
    """What several processes can't make alike: a model that draws other than by rows (see layers.dropout)."""
    if here().world > 1 and not config.model.freeze_backbone and draws_itself(backbone, shape):
        warn(
            f"processes: {config.model.model} draws random numbers of its own in training, so the losses depend on how many processes train"
        )


@torch.no_grad()
def draws_itself(backbone: torch.nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether one row, twice in a batch, differs from itself in training."""
    backbone = copy.deepcopy(backbone).train()  # statistics of a BatchNorm move
    device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, *shape, generator=random)[[0, 1, 0]].to(device)
    with torch.random.fork_rng(), drawing(0, 0, 0, torch.tensor([0, 1, 0], device=device)):
        first, _, again = backbone(x).float()
    return not torch.allclose(first, again, rtol=1e-3, atol=1e-4)
