"""What the tests of the compiled code compare with, and sizes that no vector or tile divides."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = [  # B, H, N, M, D, K
    (2, 3, 1, 1, 8, 1), (2, 3, 5, 5, 20, 5), (1, 2, 17, 17, 1, 3), (3, 1, 65, 65, 32, 9), (1, 3, 197, 197, 64, 9),
    (2, 1, 33, 197, 80, 16), (1, 1, 197, 33, 8, 33), (1, 1, 1025, 1025, 20, 33), (5, 3, 7, 65, 64, 1), (1, 2, 3, 101, 13, 64),
]  # fmt: skip


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(B: int, H: int, N: int, D: int, seed: int) -> Tensor:
    """(B, H, N, D) as a projection leaves it: heads side by side, among those of queries and keys."""
    return random(B, N, 3, H, D, seed=seed).permute(2, 0, 3, 1, 4)[seed % 3]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    scale = float(wanted.detach().abs().max()) + 1
    torch.testing.assert_close(found.double(), wanted, atol=2e-5 * scale, rtol=0)
