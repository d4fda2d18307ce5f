"""Rows in a few numbers each, of which follows how near two of them can be at most.

Embeddings of a trained model differ in few directions: a quarter of these may hold all but 0.2 % of their squared deviation from the mean.
A sketch of a row is its coordinates in such directions, the axes, and the length of what lies beside these. The product of two rows is that
of their coordinates and that of the parts beside the axes; the second is at most the product of their lengths. So the product of two
sketches is never too small, and where it is below the k-th best product of rows, the rows themselves need not be multiplied.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from classifiers.index import BLOCK, ROUNDING, blocks
from classifiers.scan import rounding_of_distances, rounding_of_products
from layers.compiled import native

LEARNED = 4096  # rows that the axes are found of
FEWEST = 8  # axes


class Sketch:
    """A scan of all rows (see scan.py), of which each takes as long as a row of as many numbers as there are axes, and one."""

    times = 3  # a list is so much longer than that of a scan of whole rows

    def __init__(self, rows: Tensor, inner: bool) -> None:
        """With a quarter as many axes as the rows have numbers; see `narrower`."""
        self.inner = inner
        self.center, self.axes = principal(rows, rows.shape[1] // 4)
        self.sketches, length, _ = self._of(rows, True)
        self.longest, self.offset = float(length.max()), float(self.center.norm())
        self.more = None if inner else (length.square() / -2).float()

    def narrower(self) -> Sketch | None:
        """With half as many axes, if that leaves enough."""
        few = self.axes.shape[1] // 2
        if few < FEWEST:
            return None
        half = copy.copy(self)
        half.axes = self.axes[:, :few].contiguous()
        beside = torch.linalg.vector_norm(self.sketches[:, few:], dim=1, keepdim=True, dtype=torch.float64) * (1 + 1e-6)
        half.sketches = torch.cat([self.sketches[:, :few], beside.float()], 1)
        return half

    def _of(self, rows: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Sketches (B, axes + 1) of rows that are `centered` first, their lengths and their products with the center (B,), in float64."""
        sketches = torch.empty(len(rows), self.axes.shape[1] + 1)
        length, product = (torch.empty(len(rows), dtype=torch.float64) for _ in range(2))
        for at in blocks(len(rows), BLOCK // rows.shape[1]):
            x = rows[at].double() - self.center if centered else rows[at].double()
            coordinates, squared = x @ self.axes, x.square().sum(1)
            # The axes are at right angles but for 1e-13.
            beside = (squared - coordinates.square().sum(1)).clamp_min(0) + 1e-12 * squared
            sketches[at, :-1], sketches[at, -1] = coordinates, beside.sqrt()
            length[at], product[at] = squared.sqrt(), x @ self.center
        return sketches, length, product

    def __call__(self, queries: Tensor, squared: Tensor, count: int) -> tuple[Tensor, Tensor]:
        asked, length, product = self._of(queries, not self.inner)
        score, slots = native.scan(asked, self.sketches, self.more, count)  # q x, less |x|^2 / 2 where distances are asked for
        # Sums of so many terms, each of which was rounded before; the last is for numbers too small to be kept.
        terms = length * self.longest + (0 if self.inner else self.longest**2)
        most = score[:, -1].double() + (asked.shape[1] + 32) * ROUNDING * terms + 1e-30 * (1 + length + self.longest)
        if self.inner:
            return slots, -(most + product + rounding_of_products(queries.shape[1], length, self.longest + self.offset))
        return slots, (length.square() - 2 * most) / (1 + rounding_of_distances(queries.shape[1]))


def principal(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean of some of the rows, and `count` directions in which they differ most (D, count), in float64."""
    some = rows[:: math.ceil(len(rows) / LEARNED)].double()
    center = some.mean(0)
    some -= center
    return center, torch.linalg.eigh(some.T @ some).eigenvectors.flip(1)[:, :count].contiguous()
