"""Rows in bfloat16, of which some processors multiply twice as many as of float32, or more.

The product of rounded rows is not that of the rows, but how far it can be from it is known: by how much rounding moved each of them. To
the coordinates come four more, so that the product of a query and a row is q x - |x|^2 / 2 - t, by which nearest rows are found; t is a
guess at what the nearest have, so that what is left is small, and rounding it to bfloat16 takes little from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from classifiers.index import BLOCK, ROUNDING, blocks
from classifiers.scan import rounding_of_distances, rounding_of_products
from layers.compiled import native

SCORES = 1 << 19  # in a temporary: 1 MB
QUERIES = 512  # that these are of, at most
GUESSED = 512  # rows that the guess is made of
ROUNDING_16 = 1.01 * 2.0**-8  # of a number to bfloat16, in parts of what it is after that


class Rounded:
    """A scan of all rows (see scan.py) by torch's products of bfloat16."""

    times = 2  # a list is so much longer than that of a scan in float32

    def __init__(self, rows: Tensor, inner: bool) -> None:
        self.inner, (count, dim) = inner, rows.shape
        self.center = rows.mean(0)
        self.rows, length, moved, _ = self._of(rows, True)
        half = torch.zeros_like(length) if inner else length.square() / -2
        for column in (1, 2, 3):  # three numbers of 8 bits
            self.rows[:, dim + column] = half
            half -= self.rows[:, dim + column]
        self.longest, self.moved, self.offset = float(length.max()), float(moved.max()), float(self.center.double().norm())
        self.some = self.rows[:: max(1, count // GUESSED)].contiguous()

    @staticmethod
    def fast() -> bool:
        """Whether this processor, and torch on it, are faster in bfloat16."""
        onednn = torch.backends.mkldnn
        return bool({"avx512_bf16", "amx_bf16"} & set(native.processor().split())) and onednn.is_available() and bool(onednn.enabled)

    def _of(self, rows: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows, `centered` first, in bfloat16 with four ones after them; their lengths before, by how much rounding moved them, and their
        products with the center (B,), in float64."""
        count, dim = rows.shape
        rounded = torch.ones(count, dim + 4, dtype=torch.bfloat16)
        length, moved, product = (torch.empty(count, dtype=torch.float64) for _ in range(3))
        for at in blocks(count, BLOCK // dim):
            x = rows[at].double() - self.center if centered else rows[at].double()
            rounded[at, :dim] = x
            length[at], product[at] = torch.linalg.vector_norm(x, dim=1), x @ self.center.double()
            moved[at] = torch.linalg.vector_norm(x - rounded[at, :dim], dim=1)
        return rounded, length, moved, product

    def __call__(self, queries: Tensor, squared: Tensor, count: int) -> tuple[Tensor, Tensor]:
        asked, length, moved, product = self._of(queries, not self.inner)
        best, slots = torch.full((len(asked), count), -torch.inf), torch.full((len(asked), count), -1)
        guess = torch.empty(len(asked), dtype=torch.float64)
        with torch.autocast("cpu", enabled=False):
            for some in blocks(len(asked), QUERIES):
                asked[some, -4] = 0
                guess[some] = (asked[some] @ self.some.T).topk(2, 1).values[:, 1].double()  # the best may be the query itself
                asked[some, -4] = -guess[some].bfloat16()
                for at in blocks(len(self.rows), SCORES // (some.stop - some.start)):
                    native.keep(asked[some] @ self.rows[at].T, at.start, best[some], slots[some])
        worst = best[:, -1].double()
        most = worst + guess + self._error(worst, guess, length, moved)
        if self.inner:
            return slots, -(most + product + rounding_of_products(queries.shape[1], length, self.longest + self.offset))
        return slots, (length.square() - 2 * most) / (1 + rounding_of_distances(queries.shape[1]))

    def _error(self, worst: Tensor, guess: Tensor, length: Tensor, moved: Tensor) -> Tensor:
        """How far above `worst` the true score of a row can be that got no better one."""
        of_rows = moved * self.longest + (length + moved) * self.moved
        # NOTE: torch sums products of bfloat16 in float32, and rounds the sums to bfloat16.
        terms = (length + moved) * (self.longest + self.moved) + self.longest**2 + guess.abs()
        of_sums = (2 * self.rows.shape[1] + 32) * ROUNDING * terms
        return of_rows + of_sums + ROUNDING_16 * worst.abs() + 1e-30 * (1 + length + self.longest)  # the last: numbers too small to be kept
