"""The compiled code of native/, or, where that folder is not there, what stands in for it and computes nothing."""

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


native: Any
try:
    import native
except ModuleNotFoundError:
    say("kernels: torch (native/ is not there)")
    native = Absent()


def differentiable(forward: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with its gradient, called with positions; torch.library's `register_autograd` takes 20 µs more for a call."""

    def known(*inputs: Any) -> Any:
        return forward(*inputs)

    known.__signature__ = inspect.signature(known)  # type: ignore[attr-defined]  # NOTE torch looks it up in each call
    parts = {"forward": staticmethod(known), "setup_context": staticmethod(save), "backward": staticmethod(backward)}
    made: Any = type(torch.autograd.Function)
    function: Callable[..., Any] = made("Compiled", (torch.autograd.Function,), parts).apply
    return function
