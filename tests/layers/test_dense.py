"""The dense way or rank by rank: what is chosen on a GPU moves less memory, counted operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layers import dense, kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SECTOR = 8  # numbers that come with one that is jumped to
GATHERS = ("gather", "index_select")  # they read what they give, not the whole table
SCATTERS = ("scatter_add", "index_add")  # they read and write where their source goes


class Traffic(TorchDispatchMode):
    """Bytes that the operations within read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.__name__
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or name.startswith(("new_empty", "arange")) or not out.is_floating_point():
            return out
        read = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_floating_point()]
        if name.startswith("gather"):
            self.bytes += 4 * (SECTOR + 1) * out.numel()
        elif name.startswith(GATHERS):
            self.bytes += 4 * 2 * out.numel()
        elif name.startswith("scatter_add"):
            self.bytes += 4 * 2 * SECTOR * read[-1].numel()
        elif name.startswith(SCATTERS):
            self.bytes += 4 * 3 * read[-1].numel()
        else:
            self.bytes += 4 * (out.numel() + sum(t.numel() for t in read if name != "new_zeros.default"))
        return out


def traffic(operation: str, G: int, N: int, D: int, K: int, monkeypatch: pytest.MonkeyPatch) -> dict[bool, float]:
    """Gigabytes by ranks (False) and densely (True), without a number computed."""
    x, index = torch.empty(G, N, D, device="meta"), torch.empty(G, N, K, device="meta", dtype=torch.long)
    found = {}
    for way in (False, True):
        monkeypatch.setattr(kernels, "densely", lambda *_, way=way: way)
        with Traffic() as counted:
            if operation == "pair_dot":
                kernels._pair_dot(x, x, index)
            else:
                kernels._spread(x, index, torch.empty(G, N, K, device="meta"), N)
        found[way] = counted.bytes / 1e9
    return found


@pytest.mark.parametrize("operation", ["pair_dot", "spread"])
@pytest.mark.parametrize(
    ("N", "D", "K"), [(65, 32, 3), (197, 64, 9), (197, 64, 32), (785, 32, 16), (1025, 64, 9), (3137, 64, 9), (785, 64, 1)]
)
def test_the_choice_on_a_gpu_moves_less(operation: str, N: int, D: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = traffic(operation, 2, N, D, K, monkeypatch)
    if dense.densely(operation, CUDA, N, K):
        assert moved[True] < moved[False]
    else:  # by ranks it may move a little more: it is also a matter of arithmetic
        assert moved[False] < 2.5 * moved[True]


def test_a_backward_of_vit_b(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 images, 12 heads of 64 channels, 197 tokens, K = 9: as the comment beside the table says."""
    moved = traffic("pair_dot", 64 * 12, 197, 64, 9, monkeypatch)
    assert moved[False] == pytest.approx(2.1, rel=0.05)
    assert moved[True] == pytest.approx(0.25, rel=0.05)
    assert dense.densely("pair_dot", CUDA, 197, 9)
    assert dense.densely("spread", CUDA, 197, 9)


def test_a_processor_is_told_from_a_gpu() -> None:
    """197 tokens with K = 9 are 22 columns a neighbor: on a CPU above the limit of pair_dot, and below that of spread."""
    assert not dense.densely("pair_dot", CPU, 197, 9)
    assert dense.densely("pair_dot", CPU, 108, 9)
    assert dense.densely("spread", CPU, 216, 9)
    assert not dense.densely("spread", CPU, 217, 9)
    assert not dense.densely("spread", CUDA, 3137, 9)
    assert dense.densely("pair_dot", torch.device("mps"), 197, 9)
