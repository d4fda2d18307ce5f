"""What rows are: as a reader found them (Source), as a run has them (Data, in Splits), and as a model gets them (Batch)."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor

from utils import BadOption, shortened

MOST_NAME = 45  # letters of a data set's name in a title


@dataclass(frozen=True)
class Source:
    """What a data set's function returns.

    x: uint8 images (N, H, W) or (N, H, W, C), float rows (N, F), a `Table`, or paths of image files. y: one label a row.
    Without a test set, a fifth of the rows becomes one. `flip`: does a mirror image keep its class?
    """

    x_train: Any
    y_train: Any
    x_test: Any = None
    y_test: Any = None
    x_val: Any = None
    y_val: Any = None
    classes: tuple[str, ...] | None = None
    flip: bool = True
    confusable: dict[int, int] | None = None  # class to the class it is mistaken for, for asymmetric label noise

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """Rows and labels of each split that is there."""
        given = {"train": (self.x_train, self.y_train), "test": (self.x_test, self.y_test), "val": (self.x_val, self.y_val)}
        return {part: (x, y) for part, (x, y) in given.items() if x is not None}


@dataclass(frozen=True)
class Split:
    """x: uint8 images (N, C, H, W), float32 rows (N, F), or paths. y: int64 class numbers.

    copies: for each row the number of the first one that is exactly the same; None where none are.
    """

    x: np.ndarray
    y: np.ndarray
    copies: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Data:
    name: str
    kind: str  # image | files | table
    shape: tuple[int, ...]  # (C, H, W) or (features,)
    classes: tuple[str, ...]
    train: Split
    val: Split | None
    test: Split
    flip: bool
    fitted: dict[str, Any]  # what was fitted on the training split: mean and std, or the table encoder
    summary: dict[str, Any] = field(default_factory=dict)  # counts and a hash of the rows, recorded in the run
    columns: tuple[str, ...] = ()  # of a table: numbers, then categories; empty where they have no names

    @property
    def num_classes(self) -> int:
        return len(self.classes)


@dataclass(frozen=True)
class Batch:
    """x on the device; target class numbers (B,) or soft targets (B, C); index: row numbers in the split (B,), or (B, 2)
    when two rows were mixed into one; embedded: x is the backbone's features already (B, F).

    Of a batch that several processes share: whole, the rows of all of them. counts: False where none is left for this process; x is then
    a row that only stands in, because each must take its part in what all do together."""

    x: Tensor
    target: Tensor
    index: Tensor
    embedded: bool = False
    whole: int = 0
    counts: bool = True

    def __len__(self) -> int:
        """Rows of this process that count."""
        return len(self.x) * self.counts

    @property
    def of(self) -> int:
        """Rows of the batch on all processes."""
        return self.whole or len(self.x)


def checked(source: Any, name: str) -> Source:
    """What a data set's function returned, before it is split: rows would lose their labels, and floats read as pixels become 0, unseen."""
    if not isinstance(source, Source):
        raise BadOption("dataset", f"must be made by a function that returns a Source, and it returned {type(source).__name__}", name)
    for part, (x, y) in source.parts().items():
        if np.shape(y) != (len(x),):
            raise BadOption("dataset", f"needs one label a row ({part}: {len(x)} rows, labels {np.shape(y)})", name)
        if not isinstance(x, np.ndarray):  # a table, or paths in a list
            continue
        axes = {"f": (2,), "U": (1,), "O": (1,)}.get(x.dtype.kind, (3, 4) if x.dtype == np.uint8 else ())
        if x.ndim not in axes:
            rule = "needs uint8 images (N, H, W[, C]), float rows (N, F) or paths of image files"
            raise BadOption("dataset", f"{rule}, x_{part} is {x.dtype} {x.shape}", name)
    return source


def short_name(dataset: str) -> str:
    """What --dataset names, for a title: the last part of a path, without the prefix."""
    prefix, colon, path = dataset.partition(":")
    if not colon:
        return shortened(prefix, MOST_NAME)
    path = path.rpartition(":")[0] if prefix == "csv" else path
    return shortened(PurePath(path).name or path, MOST_NAME)


def left_of(count: int, taken: np.ndarray) -> np.ndarray:
    """Row numbers below `count` that are not taken."""
    left = np.ones(count, bool)
    left[taken] = False
    return np.flatnonzero(left)


# ---------------------------------------------------------------- rows of a mapped file

AT_ONCE = 1 << 22  # bytes


def row_blocks(rows: int, row_bytes: int) -> Iterator[slice]:
    """All rows, a few megabytes at a time."""
    step = max(1, AT_ONCE // max(1, row_bytes))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def release(x: Any) -> None:
    """Gives back the memory of what was read of a mapped file: its pages count as the process's until then."""
    while isinstance(x, np.ndarray) and not isinstance(x.base, mmap.mmap):
        x = x.base
    if isinstance(x, np.ndarray) and isinstance(x.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        x.base.madvise(mmap.MADV_DONTNEED)
