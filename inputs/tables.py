"""Data sets from tables: columns of numbers and categories, encoded with what the training split alone knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inputs.columns import MISSING, Categories, categories_of, check_size, numbers_of, read_columns, text_of
from inputs.memory import Room, require_room
from inputs.rows import release, row_blocks
from utils import BadOption, say

UNLABELED = ("", "?")  # a class may well be named none
FARTHEST = 1e18  # of a standardized number: models square it, and add the squares
AT_ONCE = 1 << 18  # numbers that are standardized at once


class Table:
    """Columns of numbers (N, a), NaN where missing, and of categories, empty where missing. Some rows of a table share its memory.

    `columns`: what they are called, numbers first; empty where they have no names.
    """

    def __init__(
        self, numbers: np.ndarray, categories: Sequence[Categories] = (), rows: np.ndarray | None = None, *, columns: Sequence[str] = ()
    ) -> None:
        self._numbers, self._categories, self._rows, self.columns = numbers, categories, rows, tuple(columns)

    @staticmethod
    def of(x: Table | np.ndarray) -> Table:
        return x if isinstance(x, Table) else Table(np.asanyarray(x))

    @property
    def numbers(self) -> np.ndarray:
        return self._numbers if self._rows is None else self._numbers[self._rows]

    @property
    def categories(self) -> np.ndarray:
        """(N, b) as text."""
        return self.text(slice(None))

    @property
    def widths(self) -> tuple[int, int]:
        """How many columns of numbers, and of categories."""
        return self._numbers.shape[1], len(self._categories)

    def category(self, column: int) -> Categories:
        levels, codes = self._categories[column]
        return Categories(levels, codes if self._rows is None else codes[self._rows])

    def text(self, at: slice) -> np.ndarray:
        """Categories of some rows (n, b)."""
        columns = [np.array(levels, str)[codes[at if self._rows is None else self._rows[at]]] for levels, codes in self._categories]
        return np.stack(columns, axis=1) if columns else np.empty((len(range(len(self))[at]), 0), "U1")

    def blocks(self, kind: type[np.floating] | None = np.float64) -> Iterator[tuple[slice, np.ndarray]]:
        """The numbers, as float64 or as they are, some rows at a time: a table may fill half of the memory."""
        step = max(1, AT_ONCE // max(1, self.widths[0]))
        for start in range(0, len(self), step):
            at = slice(start, min(start + step, len(self)))
            yield at, np.ascontiguousarray(self._numbers[at if self._rows is None else self._rows[at]], kind)
            release(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers) if self._rows is None else len(self._rows)

    def __getitem__(self, rows: Any) -> Table:
        chosen = np.arange(len(self._numbers)) if self._rows is None else self._rows
        return Table(self._numbers, self._categories, chosen[rows], columns=self.columns)


@dataclass(frozen=True)
class Encoder:
    """Numbers are standardized (missing ones become the mean), categories one-hot (one never seen in training is all zeros)."""

    mean: list[float]
    std: list[float]
    levels: list[list[str]]

    @classmethod
    def fit(cls, table: Table) -> Encoder:
        total, squares, counts = np.zeros(table.widths[0]), np.zeros(table.widths[0]), np.zeros(table.widths[0])
        for _, numbers in table.blocks():
            present = np.isfinite(numbers)
            counts += present.sum(0)
            total += np.where(present, numbers, 0).sum(0)
        counts = np.maximum(counts, 1)
        mean = total / counts
        for _, numbers in table.blocks():
            squares += np.where(np.isfinite(numbers), (numbers - mean) ** 2, 0).sum(0)
        std = np.sqrt(squares / counts)
        std = np.where(std > 1e-12 * np.maximum(np.abs(mean), 1), std, 1)  # a constant column stays 0
        return cls(mean.tolist(), std.tolist(), [levels_in(table.category(i)) for i in range(table.widths[1])])

    @classmethod
    def from_json(cls, fitted: dict[str, Any]) -> Encoder:
        if "levels" not in fitted:
            raise BadOption("dataset", "has the rows of a table, and the model reads images")
        return cls(fitted["mean"], fitted["std"], fitted["levels"])

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "levels": self.levels}

    def encode(self, table: Table) -> np.ndarray:
        """(N, features) float32."""
        numbers, categories = table.widths
        if (numbers, categories) != (len(self.mean), len(self.levels)):
            fitted = f"{len(self.mean)} of numbers and {len(self.levels)} of categories"
            raise BadOption("dataset", f"must have the columns that the model was trained on, {fitted}, not {numbers} and {categories}")
        most = max(map(len, self.levels), default=0)
        width = numbers + sum(map(len, self.levels))
        what = f"a table of {width:,} columns" + (f" (one of categories has {most:,} of them)" if most > 1 else "")
        require_room(Room("dataset", f"{len(table):,} rows", what, 4.0 * len(table) * width))
        rows = np.zeros((len(table), width), np.float32)
        for at, found in table.blocks():
            with np.errstate(over="ignore"):
                rows[at, :numbers] = (np.where(np.isfinite(found), found, self.mean) - self.mean) / self.std
            if (far := ~(np.abs(rows[at, :numbers]) <= FARTHEST)).any():
                column = 1 + int(far.any(0).argmax())
                rule = f"has numbers that overflow float32 when standardized and squared, in column {column} of numbers"
                raise BadOption("dataset", rule)
        for place, seen in enumerate(self.levels):
            known, (levels, codes) = {str(level): n for n, level in enumerate(seen)}, table.category(place)
            number = np.array([known.get(level, -1) for level in levels], np.int64)
            for at in row_blocks(len(rows), number.itemsize):
                level = number[codes[at]]
                has = np.flatnonzero(level >= 0)
                rows[at.start + has, numbers + level[has]] = 1
            numbers += len(known)
        return rows


def levels_in(column: Categories) -> list[str]:
    """Those that some row has, in order."""
    return sorted(column.levels[code] for code in np.flatnonzero(np.bincount(column.codes)))


# ---------------------------------------------------------------- files


def read_csv(path: Path, target: str) -> tuple[Table, np.ndarray]:
    """A CSV file with a header; a column is numeric if every value in it is a number or missing."""
    found = read_columns(path, target)
    levels = found.target.levels
    if any(level in UNLABELED for level in levels):
        raise BadOption("dataset", f"has rows without a {target!r}", str(path))
    if odd := sorted({level for level in levels if level.lower() in MISSING}):
        say(f"dataset: {target!r} is {' or '.join(map(repr, odd))} in some rows; that is a class like the others ({path})")
    table = Table(found.numbers, [without_missing(column) for column in found.categories], columns=[*found.numeric, *found.textual])
    return table, np.array(levels)[found.target.codes]


def typed_columns(columns: Sequence[Any], names: Sequence[str], source: str) -> Table:
    """Each column as numbers where all of it can be read so, as categories otherwise."""
    numbers, categories, numeric, textual = [np.empty((len(columns[0]), 0))], [], list[str](), list[str]()
    for name, column in zip(names, columns, strict=True):
        text = text_of(column)
        found = numbers_of(text)
        if found is None:
            categories.append(without_missing(categories_of(text)))
            textual.append(name)
        else:
            check_size(found, name, source)
            numbers.append(found[:, None])
            numeric.append(name)
    return Table(np.concatenate(numbers, axis=1), categories, columns=[*numeric, *textual])


def without_missing(column: Categories) -> Categories:
    """All that stands for a missing value is one level; zero bytes at an end, which NumPy's text lacks, tell no levels apart."""
    named: dict[str, int] = {}
    of = [named.setdefault("" if level.lower() in MISSING else level.rstrip("\0"), len(named)) for level in column.levels]
    return Categories(list(named), np.array(of, np.min_scalar_type(len(named)))[column.codes])
