"""Published data sets: from their authors' files if those are there, else downloaded."""

from __future__ import annotations

import contextlib
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from inputs.columns import coded
from inputs.rows import Source
from inputs.tables import Table, read_csv, typed_columns
from utils import BadOption, shortened

ADULT_COLUMNS = 15  # the last is the target
ADULT_NAMES = [  # UCI's files have no header
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race", "sex"),
    *("capital-gain", "capital-loss", "hours-per-week", "native-country"),
]


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


_FORBIDDEN: list[bool] = []


@contextlib.contextmanager
def no_downloads() -> Iterator[None]:
    """Data are read, and nothing is downloaded: nobody has typed the folder that it would go to."""
    _FORBIDDEN.append(True)
    try:
        yield
    finally:
        _FORBIDDEN.pop()


def require_allowed(files: str, root: Path) -> None:
    if _FORBIDDEN:
        raise BadOption("data_path", f"must hold {files}, or be typed: nothing is downloaded to where only a checkpoint says", str(root))


# ---------------------------------------------------------------- torchvision


def read_torchvision(root: Path, dataset: str, files: str, **options: Any) -> Source:
    """A torchvision set; `options` are those of Source."""
    import torchvision.datasets as tv

    def fetch(train: bool) -> Any:
        try:
            return getattr(tv, dataset)(root, train=train, download=False)
        except RuntimeError:  # torchvision's word for "not found or corrupted"
            require_allowed(files, root)
            return getattr(tv, dataset)(root, train=train, download=True)

    try:
        with no_empty_folders(root / dataset):
            train, test = fetch(True), fetch(False)
    except BadOption:
        raise
    except (RuntimeError, OSError, ValueError, AssertionError) as error:  # the last two: a file cut short
        reason = shortened(error, 80) or "damaged"
        rule = f"must hold {files}, and they could not be downloaded ({reason}); arrays of your own do as well: --dataset npz:FILE"
        raise BadOption("data_path", rule, str(root)) from None
    x_train, y_train, x_test, y_test = (np.asarray(a) for a in (train.data, train.targets, test.data, test.targets))
    return Source(x_train, y_train, x_test, y_test, classes=tuple(train.classes), **options)


# ---------------------------------------------------------------- UCI and OpenML


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
    # Columns are typed over both files, fitted on the training split.
    table = typed_columns(list(zip(*both, strict=True))[:-1], ADULT_NAMES, str(root))
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
    return Table(numbers, [coded(color)], columns=[*parts[0][0].columns, "color"]), np.concatenate([labels for _, labels in parts])


def _openml(name: str, version: int, files: str, root: Path) -> tuple[Table, np.ndarray]:
    from sklearn.datasets import fetch_openml

    if not (root / "openml").is_dir():
        require_allowed(files, root)
    try:
        with no_empty_folders(root / "openml"), warnings.catch_warnings(action="ignore"):  # the error below says it
            bunch = fetch_openml(name, version=version, data_home=str(root), as_frame=False, parser="liac-arff", n_retries=1)
    except Exception as error:  # urllib, socket and HTTP errors share no base; the advice is one
        rule = f"must hold {files}, and OpenML could not be reached ({shortened(error, 80)})"
        raise BadOption("data_path", rule, str(root)) from None
    levels = bunch.categories or {}
    columns = [
        [levels[name][int(v)] if v == v else "" for v in column] if name in levels else column
        for name, column in zip(bunch.feature_names, np.asarray(bunch.data, np.float64).T, strict=True)
    ]
    return typed_columns(columns, bunch.feature_names, name), np.asarray(bunch.target).astype(str)
