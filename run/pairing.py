"""Equal starts: parts that models of one seed share, by name and shape, begin with the same weights, whatever else the models have.

A model draws its weights one after the other from one generator, so a layer with one parameter more shifts all that come after it.
Here each draw has a seed of its own: it follows from the name and shape of the parameter that it fills. Names are known only when the
model stands, so it is built twice: once to learn which draw fills what, and once with the seeds.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils import fold_in

Modules = TypeVar("Modules", bound=Sequence[nn.Module])


class Draws(TorchDispatchMode):
    """Sees every operation that draws random numbers; `seeds`, if there are any, are set one before each."""

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        super().__init__()
        self.seeds, self.filled = list(seeds), list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and len(self.filled) < len(self.seeds):
            torch.manual_seed(self.seeds[len(self.filled)])
        found = func(*args, **(kwargs or {}))
        if draws and isinstance(found, Tensor):
            self.filled.append(found)
        return found


def paired(seed: int, build: Callable[[], Modules]) -> Modules:
    """The modules that `build` makes, with equal starts."""
    torch.manual_seed(seed)
    with Draws() as first, contextlib.redirect_stderr(io.StringIO()):
        modules = build()
    seeds = seeds_of(seed, first.filled, modules)
    del first, modules
    with Draws(seeds):
        return build()


def seeds_of(seed: int, filled: Sequence[Tensor], modules: Sequence[nn.Module]) -> list[int]:
    """A seed a draw: of the parameter that it fills and how often it was filled before, or, of what became a part of a parameter only
    later, of its shape."""
    names = {
        tensor.untyped_storage().data_ptr(): f"{number}.{part_name(name)}"
        for number, module in enumerate(modules)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    count: dict[str, int] = {}
    seeds = []
    for tensor in filled:
        key = f"{names.get(tensor.untyped_storage().data_ptr(), '')} {tuple(tensor.shape)}"
        count[key] = count.get(key, 0) + 1
        seeds.append(fold_in(seed, int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"), count[key]))
    return seeds


def part_name(name: str) -> str:
    """A linear layer, or a vote, is the same part of a head whether it stands alone or in an interpolation of both."""
    return name.replace("predictor.linear.head.", "").replace("predictor.vote.", "predictor.")
