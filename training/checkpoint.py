"""Checkpoints of a run: where they are, and how an optimizer and the random generators become tensors and JSON and come back."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classifiers.bank import Bank
from inputs import store
from inputs.store import INDEX
from training import older
from utils import BadOption


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


# ---------------------------------------------------------------- what is not a named tensor


def pack_bank(bank: Bank | None, name: str = "bank") -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """A bank as a group of tensors and a fact; nothing for a head without one."""
    if bank is None:
        return {}, {}
    tensors, facts = bank.pack()
    return {name: tensors}, {name: facts}


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
    groups = [{k: tuple(v) if isinstance(v, list) and k == "betas" else v for k, v in g.items()} for g in facts["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def pack_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every random generator."""
    tensors = {"rng.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        tensors["rng.mps"] = torch.mps.get_rng_state()
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = [name, base64.b64encode(np.asarray(keys, np.uint32).tobytes()).decode(), position, has_gauss, cached]
    return tensors, {"python": [version, list(words), gauss], "numpy": numpy}


def unpack_rng(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["rng.torch"])
    cuda = [v for k, v in sorted(tensors.items()) if k.startswith("rng.cuda.")]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    if "rng.mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["rng.mps"])
    version, words, gauss = facts["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = facts["numpy"]
    np.random.set_state((name, np.frombuffer(base64.b64decode(keys), np.uint32), *rest))
