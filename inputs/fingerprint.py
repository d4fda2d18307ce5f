"""Hashes of rows: whether a run goes on with the rows that it began with, and whether two runs were tested on the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from inputs.rows import Split
from inputs.tables import Table


def of_splits(*splits: Split | None) -> str:
    """Of all rows, as a model reads them, and labels in their order: a run must not go on with others. Of image files, the names."""
    digest = hashlib.sha256()
    for split in splits:
        if split is not None:
            digest.update(names(split.x) if split.x.dtype.kind == "U" else np.ascontiguousarray(split.x).data)
            digest.update(split.y.tobytes())
    return digest.hexdigest()[:16]


def as_read(x: Any, y: np.ndarray) -> str:
    """Of rows as they were read and their labels: the same whatever training rows they are encoded by. Of image files, the names."""
    digest = hashlib.sha256(y.tobytes())
    files = not isinstance(x, Table) and np.asarray(x).dtype.kind in "UO"
    for part in (x.numbers, x.categories) if isinstance(x, Table) else (np.asarray(x),):
        digest.update(f"{part.dtype.kind} {part.shape}".encode())
        if files:
            digest.update(names(part))
        elif part.dtype.kind in "UO":  # with what ends a value: "ab", "c" is not "a", "bc"
            digest.update("".join(f"{value}\0" for value in part.ravel().tolist()).encode())
        else:
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def names(paths: Iterable[Any]) -> bytes:
    """Of image files: folder and file."""
    return "\n".join("/".join(Path(path).parts[-2:]) for path in paths).encode()
