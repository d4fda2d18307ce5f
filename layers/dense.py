"""Two ways to a sum over neighbor lists: densely over all columns, or a rank at a time. Which one is taken, by device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Limits(NamedTuple):
    """Columns for each neighbor of a list up to which the dense way is taken."""

    spread: int
    pair_dot: int


# On a CPU: measured. A row of M dense weights costs one multiplication a column but no jumps; past these ratios of M to K jumping wins.
#
# On a GPU: counted, as memory traffic is what such small sums wait for. Numbers read and written for each row, with M columns, N = M rows,
# D channels and K neighbors, where a number that is jumped to takes a sector of 8:
#
#   pair_dot, dense      write M scores, read x and y, gather K of the scores, write them        M + 2 D + 8 K + K
#             by ranks   K times: gather a row of y (read, write), multiply (2 D, D), sum (D)    6 K D
#   spread,   dense      zero M weights, scatter K, read M in the product, read x, write out     2 M + 2 D + 16 K
#             by ranks   K times: weigh a row of x (read, write), add it to its column (3 D)     5 K D
#
# With 32 channels and K = 9 the dense way moves less up to M = 175 K (pair_dot) and M = 68 K (spread), with more channels further. Its
# 2 M D operations a row set another limit: where 12 of them (float32, no tensor cores) take as long as a byte, they take as long as the
# bytes of the other way from M = 144 K and M = 120 K on. The limits lie below all of these. In a backward of ViT-B/16 (64 images, 12 heads
# of 64 channels, 197 tokens, K = 9) pair_dot moves 0.25 GB densely, and 2.1 GB by ranks.
LIMITS = {"cpu": Limits(spread=24, pair_dot=12), "cuda": Limits(spread=64, pair_dot=128)}


def densely(operation: str, device: torch.device, columns: int, K: int) -> bool:
    """Whether "spread" or "pair_dot" with lists of K out of so many columns is computed over all of them."""
    limits = LIMITS.get(device.type, LIMITS["cuda"])
    most: int = getattr(limits, operation)
    return columns <= most * K
