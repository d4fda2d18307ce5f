"""Checkpoints of a run: where they are, how best belongs to last, and how an optimizer becomes tensors and JSON and comes
back."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from classifiers.bank import Bank
from config import FREE_IN_RESUME
from inputs import indexed, store
from inputs.store import INDEX, Owner
from ranks import here
from training import older
from utils import BadOption, say

LINES = 500  # of metrics.jsonl that a checkpoint keeps; those before have long been on disk
# Where an epoch is shorter than writing it, not each is written: writing takes at most a twentieth of the time, unless more than five
# seconds of training would be lost to a kill.
TIMES, SECONDS = 20, 5.0

Content = tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, Any]]  # groups of tensors, and facts


def find(path: str | Path, prefer: str = "best", flag: str = "checkpoint") -> Path:
    """The checkpoint folder that a user means by a run, a checkpoint folder, or a file in one."""
    given = Path(path)
    if not given.exists():
        raise BadOption(flag, "must be a run or a checkpoint that exists", str(path))
    if given.is_file():
        if given.name == INDEX or (given.suffix == ".safetensors" and (given.parent / INDEX).exists()):
            return given.parent
        raise BadOption(flag, f"must be a run, a folder in its checkpoints, or the {INDEX} in one", str(path))
    names = [prefer, *({"best", "last"} - {prefer})]
    for folder in (given, *(given / "checkpoints" / n for n in names), *(given / n for n in names)):
        if (folder / INDEX).exists():
            return folder
        if folder.name == prefer and folder != given and folder.is_dir():  # NOTE: silently, other weights would be taken for these
            raise BadOption(flag, f"lacks {(folder / INDEX).relative_to(given)}", str(path))
    raise BadOption(flag, f"must hold a checkpoint (checkpoints/{prefer}/{INDEX})", str(path))


def load(folder: Path, *groups: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The named groups of tensors (all, if none is named) and the facts, by the names that they have now; every byte is checked."""
    return older.with_new_names(*store.load(folder, *(name for group in groups for name in (group, *older.names_of(group)))))


def load_whole(folder: Path, *groups: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The same, with a bank whole that was kept in pieces."""
    pieces = sorted(name for name in indexed.read_index(folder)["files"] if name.startswith("bank-")) if "bank" in groups else []
    tensors, facts = load(folder, *groups, *pieces)
    if pieces:
        parts = [tensors.pop(name) for name in pieces]
        tensors["bank"] = {name: torch.cat([part[name] for part in parts if name in part]) for name in parts[0]}
    return tensors, facts


# ---------------------------------------------------------------- the two of a run


@dataclass
class Checkpoints:
    """checkpoints/last, to go on from, and checkpoints/best, the epoch that counts. Both carry the run's id.

    They change together: the files of a new best are made, then `last` names them by its own copy of best's index, then best gets that
    index. Wherever that ends, `last` tells which best is its own, and `lacks_best` finishes the work.
    """

    folder: Path  # the run
    run: str = ""
    owner: Owner | None = None
    best_index: dict[str, Any] | None = None  # of the best that `last` belongs to
    lines: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    best_is_lost: bool = False
    unwritten: Content | None = None  # a copy of a best whose epoch was not written
    next_write: float = -math.inf  # of an epoch; by time.monotonic

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last"

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints" / "best"

    def save(self, last: Content, best: Content | None = None, *, now: bool = True) -> None:
        """The last epoch, and the best one if it is a new one. Without `now`, one that came soon after another may stay unwritten."""
        here().on_first(lambda: self._save(last, best, now))

    def _save(self, last: Content, best: Content | None, now: bool) -> None:
        began = time.monotonic()
        if not now and began < self.next_write:
            if best is not None:  # training goes on with these tensors
                groups = {group: {name: value.detach().clone() for name, value in named.items()} for group, named in best[0].items()}
                self.unwritten = groups, best[1]
            return
        best, self.unwritten = best or self.unwritten, None
        self._write(*last, best)
        done = time.monotonic()
        self.next_write = done + min(TIMES * (done - began), SECONDS)

    def _write(self, groups: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any], best: Content | None) -> None:
        if best is not None:
            self.best_index = store.stage(self.best, best[0], {**best[1], "run": self.run}, self.owner)
        kept = {"run": self.run, "best": self.best_index, "lines": self.lines[-LINES:]}
        store.save(self.last, groups, {**facts, **kept}, self.owner)
        if best is not None and self.best_index is not None:
            store.commit(self.best, self.best_index, self.owner)

    def replace_best(self, groups: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:
        """Another best that the same `last` belongs to."""
        self.save(load(self.last), (groups, facts))

    def load_last(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        tensors, facts = load(self.last)
        self.best_index = facts.get("best", self.best_index)
        self.lines = list(facts.get("lines", []))
        return tensors, facts

    def lacks_best(self, facts: Mapping[str, Any]) -> str:
        """Why the best that `last` belongs to is not there, whole; "" if it is, or if `last` (in the first epoch) has none yet.
        What a kill left unfinished between the two is finished."""
        return here().on_first(lambda: self._lacks_best(facts))

    def _lacks_best(self, facts: Mapping[str, Any]) -> str:
        index = facts.get("best")
        if index is None:
            return "" if "best" in facts or not facts["training"]["place"].get("best_epoch") else self._older_best(facts)
        try:
            there = indexed.verify(self.best)
            if indexed.core_of(there) == indexed.core_of(index):
                return ""
            why = "is that of another run" if there["facts"].get("run") != self.run else "is that of another epoch"
        except BadOption as error:
            why = error.rule
        try:
            indexed.verify(self.best, index)
        except BadOption:
            return why
        store.commit(self.best, index, self.owner)
        return ""

    def _older_best(self, facts: Mapping[str, Any]) -> str:
        """Of a run from before `last` named its best: one of the same configuration and rows, of an epoch that may be it."""
        try:
            index = indexed.verify(self.best)
        except BadOption as error:
            return error.rule
        there = index["facts"]
        first, second = ({k: v for k, v in f["config"].items() if k not in FREE_IN_RESUME} for f in (there, facts))
        if first != second or there.get("data") != facts["data"] or there["epoch"] < facts["training"]["place"]["best_epoch"]:
            return "is that of another run"
        self.best_index = index
        return ""

    def give_up_best(self, lost: str) -> None:
        """Training goes on without it. One that is another run's stays, under another name: it may be somebody's only copy."""
        self.best_is_lost = True
        here().on_first(lambda: self._set_aside(lost))

    def _set_aside(self, lost: str) -> None:
        if not self.best.is_dir() or self.best.is_symlink():
            return
        own = {path.name for path in self.owner.owned_in(self.best)} if self.owner is not None else set()
        if "another run" in lost or any(path.name not in own for path in self.best.iterdir()):
            aside = next(p for n in range(1, 1000) if not (p := self.best.with_name(f"best-set-aside-{n}")).exists())
            self.best.rename(aside)
            say(f"best: what was there is now {aside}")


# ---------------------------------------------------------------- what is not a named tensor


def pack_bank(bank: Bank | None, name: str = "bank") -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """A bank as a group of tensors and a fact; nothing for a head without one, or for one in parts, which no process has whole."""
    if bank is None or bank.in_parts:
        return {}, {}
    tensors, facts = bank.pack()
    return {name: tensors}, {name: facts}


def pieces_of(bank: Bank | None) -> tuple[Mapping[str, Mapping[str, Tensor]], dict[str, Any]]:
    """A bank as groups of some of its rows each, and a fact: what a run that has finished keeps of a bank that was in parts."""
    if bank is None:
        return {}, {}
    pieces, facts = bank.in_pieces()
    return pieces, {"bank": facts}


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as named tensors and JSON."""
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for number, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{key}"] = value
            else:
                plain[f"{number}.{key}"] = value
    return tensors, {"plain": plain, "groups": state["param_groups"]}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    named = {k.removeprefix("optimizer."): v for k, v in tensors.items() if k.startswith("optimizer.")}
    for name, value in {**named, **facts["plain"]}.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    # NOTE: what steers the steps (rates, decay, betas) follows from the configuration, which is checked; the file's word is not taken.
    groups = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in facts["groups"]] != [group["params"] for group in groups]:
        raise ValueError("the groups of the optimizer are others")
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for number, entry in state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameters[number].shape:
                raise ValueError(f"{key} of the optimizer is of another shape than its parameter")
            if not isinstance(value, Tensor | int | float | None):
                raise TypeError(f"{key} of the optimizer is no number")
    optimizer.load_state_dict({"state": state, "param_groups": groups})
