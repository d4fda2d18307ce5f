"""The compiled code of native/, or, where that folder is not there, what stands in for it and computes nothing; and what makes operators
differentiable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from utils import say


class Absent:
    """Never available, so that nothing else of it is called."""

    MOST_RANKS = MOST_KEPT = WIDEST = 0

    def available(self) -> bool:
        return False

    def takes(self, *_: Any) -> bool:
        return False

    def processor(self) -> str:
        return ""

    def distance(self) -> None:
        return None


native: Any
try:
    import native
except ModuleNotFoundError:
    say("kernels: torch (native/ is not there)")
    native = Absent()


def differentiable(operator: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """An operator with its gradient, called with positional arguments alone. In a graph, torch.library's `register_autograd` has to do
    that; elsewhere this does the same and takes 20 µs less for a call.
    """

    def forward(*inputs: Any) -> Any:
        return operator(*inputs)

    # NOTE each call asks `inspect.signature(forward)`, which takes as long as all the rest unless it is found here
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    parts = {"forward": forward, "setup_context": save, "backward": backward}
    made: Any = type(torch.autograd.Function)
    body = {name: staticmethod(part) for name, part in parts.items()} | {"generate_vmap_rule": True}
    function: Callable[..., Any] = made("Compiled", (torch.autograd.Function,), body).apply
    return function
