"""Tables that ship with scikit-learn, read without it: importing it takes longer than all else before a small run's first step."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

FILES = {"digits": "digits.csv.gz", "iris": "iris.csv", "wine": "wine_data.csv"}


class Shipped(NamedTuple):
    data: np.ndarray  # (N, columns)
    target: np.ndarray  # (N,)
    names: tuple[str, ...]  # of the classes; none of the digits


def read_shipped(name: str) -> Shipped:
    spec = find_spec("sklearn")
    file = Path(spec.origin).parent / "datasets" / "data" / FILES[name] if spec and spec.origin else None
    if file is None or not file.exists():  # a version that keeps them elsewhere
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")()
        return Shipped(bunch.data, bunch.target, () if name == "digits" else tuple(map(str, bunch.target_names)))
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        names = () if name == "digits" else tuple(next(lines).strip().split(",")[2:])  # rows, columns, classes
        table = np.loadtxt(lines, delimiter=",")
    return Shipped(table[:, :-1], table[:, -1].astype(np.int64), names)
