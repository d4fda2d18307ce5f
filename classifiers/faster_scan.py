"""Whether a bank has a faster scan, and which."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from classifiers.rounded import Rounded
from classifiers.scan import FEW_QUERIES
from classifiers.sketch import Sketch
from layers.compiled import native

ROWS = 8192  # of fewer, a faster scan saves nothing
SKETCHED, ROUNDED = 128, 64  # dimensions: of fewer, neither saves anything
WORTH = 4  # queries for each dimension, whose search takes about as long as to make these scans and try them
NEARLY = 0.9  # the share of queries for which it must be enough


class FasterScan:
    """For rows that stay as they are: a faster scan of them, once it has been worth making one. It needs up to half as much memory as they.

    `ever`: whether there may be one.
    """

    def __init__(self, ever: bool = True) -> None:
        self._ever, self._asked = ever, 0  # queries
        self._scan: Sketch | Rounded | None = None

    def of(
        self, rows: Tensor, inner: bool, queries: int, count: int, enough: Callable[[Sketch | Rounded, int], float]
    ) -> Sketch | Rounded | None:
        """For a search of so many queries, each for `count` rows. `enough`: the share of some queries for which one is enough."""
        few = len(rows) < ROWS or queries < FEW_QUERIES * torch.get_num_threads()
        if not self._ever or few or Sketch.times * count > native.MOST_KEPT:
            return None
        before, self._asked = self._asked, self._asked + queries
        worth = WORTH * rows.shape[1]
        if before < worth <= self._asked and native.available():
            self._scan = chosen(rows, inner, lambda scan: enough(scan, scan.times * count) >= NEARLY)
        return self._scan

    def drop(self) -> None:
        """Until the rows change."""
        self._scan = None


def chosen(rows: Tensor, inner: bool, enough: Callable[[Sketch | Rounded], bool]) -> Sketch | Rounded | None:
    """The narrowest sketch that is enough; else rounded rows, if they are, and the processor is fast with these; else none."""
    found: Sketch | Rounded | None = None
    sketch = Sketch(rows, inner) if rows.shape[1] >= SKETCHED else None
    while sketch is not None and enough(sketch):
        found, sketch = sketch, sketch.narrower()
    if found is None and rows.shape[1] >= ROUNDED and Rounded.fast():
        rounded = Rounded(rows, inner)
        found = rounded if enough(rounded) else None
    return found
