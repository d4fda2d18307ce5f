"""What a data set is read from: arrays, image folders and tables; tables are encoded with what the training split alone knows."""

from __future__ import annotations

import contextlib
import csv
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils import BadOption, did_you_mean, say

IMAGE_FILES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
MISSING = frozenset({"", "?", "na", "nan", "null", "none"})
ADULT_COLUMNS = 15  # the last is the target


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
    def from_json(cls, facts: dict[str, Any]) -> Encoder:
        if "levels" not in facts:
            raise BadOption("dataset", "has the rows of a table, and the model reads images")
        return cls(facts["mean"], facts["std"], facts["levels"])

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


# ---------------------------------------------------------------- arrays and image folders


def read_npz(path: str) -> Source:
    """x_train, y_train, x_test, y_test: uint8 images, or float rows."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [k for k in ("x_train", "y_train", "x_test", "y_test") if k not in archive]
            if missing:
                raise BadOption("dataset", f"needs {', '.join(missing)} in the npz", path)
            arrays = {k: archive[k] for k in ("x_train", "y_train", "x_test", "y_test", "x_val", "y_val") if k in archive}
    except BadOption:
        raise
    except OSError as error:
        raise BadOption("dataset", f"must be a file that can be read ({error.strerror or error})", path) from None
    except ValueError as error:
        rule = "must hold plain arrays, no object arrays" if "Object arrays" in str(error) else "must be an npz file"
        raise BadOption("dataset", rule, path) from None
    except Exception as error:  # zipfile and zlib raise a dozen kinds for a damaged archive
        raise BadOption("dataset", f"must be an undamaged npz file ({type(error).__name__})", path) from None
    for part in ("train", "test", "val"):
        if f"x_{part}" in arrays:
            _check_arrays(arrays[f"x_{part}"], arrays.get(f"y_{part}"), part, path)
    shapes = {k: v.shape for k, v in arrays.items() if k.startswith("x_")}
    if len({shape[1:] for shape in shapes.values()}) > 1:
        raise BadOption("dataset", "needs rows of one shape", ", ".join(f"{k} {shape}" for k, shape in shapes.items()))
    return Source(**arrays)


def _check_arrays(x: np.ndarray, y: np.ndarray | None, part: str, path: str) -> None:
    if y is None or y.ndim != 1 or len(x) != len(y):
        raise BadOption("dataset", f"needs one label a row: x_{part} {x.shape}, y_{part} {None if y is None else y.shape}", path)
    if y.dtype.kind not in "iubU":
        raise BadOption("dataset", f"needs whole numbers or text as labels, y_{part} is {y.dtype}", path)
    if y.dtype.kind == "i" and len(y) and y.min() < 0:  # often the mark of a row without a label
        say(f"dataset: y_{part} has labels from {y.min()}; every value is a class of its own, {y.min()} too ({path})")
    image = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 2, 3, 4)))
    if not image and not (x.dtype.kind == "f" and x.ndim == 2):
        raise BadOption("dataset", f"needs uint8 images (N, H, W[, C]) or float rows (N, F), x_{part} is {x.dtype} {x.shape}", path)
    if not image and not np.isfinite(x).all():
        raise BadOption("dataset", f"needs finite numbers, x_{part} has NaN or infinity", path)


def read_folder(path: str, option: str = "dataset") -> Source:
    """ImageFolder layout: PATH/CLASS/*.jpg, or PATH/train, PATH/val and PATH/test with classes in them."""
    root = Path(path)
    parts = [p for p in ("train", "val", "test") if (root / p).is_dir()]
    x, y, classes = _list_images(root / "train" if "train" in parts else root, option)
    held = {p: _list_images(root / p, option, classes) for p in parts if p != "train"} if "train" in parts else {}
    x_test, y_test, _ = held.pop("test", None) or held.pop("val", None) or (None, None, ())
    x_val, y_val, _ = held.pop("val", None) or (None, None, ())
    return Source(x, y, x_test, y_test, x_val, y_val, classes)


def _list_images(root: Path, option: str, classes: tuple[str, ...] | None = None) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    found = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    files = [(str(f), c) for c in found for f in sorted((root / c).rglob("*")) if f.suffix.lower() in IMAGE_FILES]
    if not files:
        raise BadOption(option, f"must hold CLASS/*{{{', '.join(IMAGE_FILES)}}} or train/CLASS/ and val/CLASS/", str(root))
    names = classes or tuple(sorted({c for _, c in files}))
    if strangers := sorted({c for _, c in files} - set(names)):
        raise BadOption(option, f"has classes that its train folder lacks: {', '.join(strangers[:5])}", str(root))
    number = {c: i for i, c in enumerate(names)}
    return np.array([f for f, _ in files]), np.array([number[c] for _, c in files]), names


# ---------------------------------------------------------------- tables


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
    return _columns(columns, len(rows)), labels


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


def _columns(columns: list[Any], rows: int) -> Table:
    """Each column as numbers where all of it can be read so, as categories otherwise."""
    numbers, categories = [np.empty((rows, 0))], [np.empty((rows, 0), "U1")]
    for column in columns:
        text = np.array([("" if str(v).lower() in MISSING else str(v)) for v in column])
        try:
            numbers.append(np.where(text == "", "nan", text).astype(np.float64)[:, None])
        except ValueError:
            categories.append(text[:, None])
    return Table(np.concatenate(numbers, axis=1), np.concatenate(categories, axis=1))


def _find(root: Path, folder: str, names: tuple[str, ...]) -> dict[str, Path]:
    places = [(name, base / name) for base in (root, root / folder) for name in names]
    return {name: path for name, path in places if path.is_file()}


def read_adult(root: Path) -> tuple[Table, np.ndarray, Table, np.ndarray] | tuple[Table, np.ndarray]:
    files = _find(root, "adult", ("adult.data", "adult.test"))
    if len(files) < 2:
        return _openml("adult", 2, "adult.data and adult.test (here or in adult/)", root)
    parts = []
    for name in ("adult.data", "adult.test"):
        lines = [line.rstrip(" .") for line in files[name].read_text().splitlines() if line.strip() and not line.startswith("|")]
        rows = list(csv.reader(lines, skipinitialspace=True))
        if any(len(row) != ADULT_COLUMNS for row in rows):
            raise BadOption("data_path", f"must hold the UCI file {name} with {ADULT_COLUMNS} columns", str(files[name]))
        parts.append(rows)
    both = [*parts[0], *parts[1]]
    table = _columns(list(zip(*both, strict=True))[:-1], len(both))  # columns are typed over both files, fitted on the training split
    labels = np.array([row[-1] for row in both])
    n = len(parts[0])
    return table[:n], labels[:n], table[n:], labels[n:]


def read_wine_quality(root: Path) -> tuple[Table, np.ndarray]:
    names = ("winequality-red.csv", "winequality-white.csv")
    files = _find(root, "wine-quality", names)
    if len(files) == 2:
        parts = [read_csv(files[name], "quality") for name in names]
    else:
        where = "winequality-red.csv and winequality-white.csv (here or in wine-quality/)"
        parts = [_openml(f"wine-quality-{color}", 1, where, root) for color in ("red", "white")]
    color = np.repeat(["red", "white"], [len(labels) for _, labels in parts])
    numbers = np.concatenate([table.numbers for table, _ in parts])
    return Table(numbers, color[:, None]), np.concatenate([labels for _, labels in parts])


@contextlib.contextmanager
def no_empty_folders(folder: Path) -> Iterator[None]:
    """Libraries make folders before they download; when that fails, no empty ones stay in `folder` or above that were not there."""
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        yield
    except BaseException:
        for made in (*sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True), *new):
            with contextlib.suppress(OSError):  # not empty, or never made
                made.rmdir()
        raise


def _openml(name: str, version: int, files: str, root: Path) -> tuple[Table, np.ndarray]:
    from sklearn.datasets import fetch_openml

    try:
        with no_empty_folders(root / "openml"), warnings.catch_warnings(action="ignore"):  # the error below says it
            bunch = fetch_openml(name, version=version, data_home=str(root), as_frame=False, parser="liac-arff", n_retries=1)
    except Exception as error:  # urllib, socket and HTTP errors share no base; the advice is one
        reason = str(error).replace("\n", " ")[:80]
        raise BadOption("data_path", f"must hold {files}, and OpenML could not be reached ({reason})", str(root)) from None
    levels = bunch.categories or {}
    columns = [
        [levels[name][int(v)] if v == v else "" for v in column] if name in levels else column
        for name, column in zip(bunch.feature_names, np.asarray(bunch.data, np.float64).T, strict=True)
    ]
    return _columns(columns, len(bunch.target)), np.asarray(bunch.target).astype(str)
