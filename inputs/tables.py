"""Data sets from tables: columns of numbers and categories, encoded with what the training split alone knows."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils import BadOption, did_you_mean

MISSING = frozenset({"", "?", "na", "nan", "null", "none"})


@dataclass(frozen=True)
class Table:
    """Columns of numbers (N, a), NaN where missing, and of categories (N, b) as text."""

    numbers: np.ndarray
    categories: np.ndarray

    @staticmethod
    def of(x: Table | np.ndarray) -> Table:
        return x if isinstance(x, Table) else Table(np.asarray(x, np.float64), np.empty((len(x), 0), "U1"))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: Any) -> Table:
        return Table(self.numbers[rows], self.categories[rows])


@dataclass(frozen=True)
class Encoder:
    """Numbers are standardized (missing ones become the mean), categories one-hot (one never seen in training is all zeros)."""

    mean: list[float]
    std: list[float]
    levels: list[list[str]]

    @classmethod
    def fit(cls, table: Table) -> Encoder:
        present = np.isfinite(table.numbers)
        counts = np.maximum(present.sum(0), 1)
        mean = np.where(present, table.numbers, 0).sum(0) / counts
        std = np.sqrt(np.where(present, (table.numbers - mean) ** 2, 0).sum(0) / counts)
        std = np.where(std > 1e-12 * np.maximum(np.abs(mean), 1), std, 1)  # a constant column stays 0
        return cls(mean.tolist(), std.tolist(), [np.unique(column).tolist() for column in table.categories.T])

    @classmethod
    def from_json(cls, fitted: dict[str, Any]) -> Encoder:
        if "levels" not in fitted:
            raise BadOption("dataset", "has the rows of a table, and the model reads images")
        return cls(fitted["mean"], fitted["std"], fitted["levels"])

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "levels": self.levels}

    def encode(self, table: Table) -> np.ndarray:
        """(N, features) float32."""
        numbers, categories = table.numbers.shape[1], table.categories.shape[1]
        if (numbers, categories) != (len(self.mean), len(self.levels)):
            fitted = f"{len(self.mean)} of numbers and {len(self.levels)} of categories"
            raise BadOption("dataset", f"must have the columns that the model was trained on, {fitted}, not {numbers} and {categories}")
        units = (np.where(np.isfinite(table.numbers), table.numbers, self.mean) - self.mean) / self.std
        onehots = [column[:, None] == np.array(seen)[None] for column, seen in zip(table.categories.T, self.levels, strict=True)]
        return np.concatenate([units, *onehots], axis=1, dtype=np.float32)


# ---------------------------------------------------------------- files


def read_csv(path: Path, target: str) -> tuple[Table, np.ndarray]:
    """A CSV file with a header; a column is numeric if every value in it is a number or missing."""
    header, rows = _rows(path)
    if target not in header:
        raise BadOption("dataset", f"has no column {target!r}{did_you_mean(target, header)}; it has {', '.join(header[:20])}", str(path))
    if len(header) < 2:
        raise BadOption("dataset", f"must have columns besides {target!r}", str(path))
    columns = list(zip(*rows, strict=True))  # by place: two of one name are two columns
    labels = np.array(columns.pop(header.index(target)))
    if any(v.strip().lower() in MISSING for v in labels):
        raise BadOption("dataset", f"has rows without a {target!r}", str(path))
    return typed_columns(columns, len(rows)), labels


def _rows(path: Path, delimiters: str = ",;\t") -> tuple[list[str], list[list[str]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadOption("dataset", f"must be a file that can be read ({reason})", str(path)) from None
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        raise BadOption("dataset", "must be a CSV file with a header and rows", str(path))
    delimiter = max(delimiters, key=lines[0].count)
    try:
        table = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True)]
    except csv.Error as error:
        raise BadOption("dataset", f"must be a CSV file ({error})", str(path)) from None
    for number, row in enumerate(table):
        if len(row) != len(table[0]):
            raise BadOption("dataset", f"has {len(table[0])} columns, and {len(row)} in line {number + 1}", str(path))
    return table[0], table[1:]


def typed_columns(columns: list[Any], rows: int) -> Table:
    """Each column as numbers where all of it can be read so, as categories otherwise."""
    numbers, categories = [np.empty((rows, 0))], [np.empty((rows, 0), "U1")]
    for column in columns:
        text = np.array([("" if str(v).lower() in MISSING else str(v)) for v in column])
        try:
            numbers.append(np.where(text == "", "nan", text).astype(np.float64)[:, None])
        except ValueError:
            categories.append(text[:, None])
    return Table(np.concatenate(numbers, axis=1), np.concatenate(categories, axis=1))
