"""Hashes of rows: whether a run goes on with the rows that it began with, and whether two runs were tested on the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from inputs.rows import Split, release, row_blocks
from inputs.tables import Table

LETTERS = 1 << 10  # bytes that a value of text may take, several times


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
    if isinstance(x, Table):
        numbers, categories = x.widths
        digest.update(f"{x[:0].numbers.dtype.kind} {(len(x), numbers)}".encode())
        for _, part in x.blocks(None):
            digest.update(part.data)
        digest.update(f"U {(len(x), categories)}".encode())
        for at in row_blocks(len(x), LETTERS * categories):  # with what ends a value: "ab", "c" is not "a", "bc"
            digest.update("".join(f"{value}\0" for value in x.text(at).ravel().tolist()).encode())
        return digest.hexdigest()
    rows = np.asarray(x)
    digest.update(f"{rows.dtype.kind} {rows.shape}".encode())
    if rows.dtype.kind in "UO":
        digest.update(names(rows))
        return digest.hexdigest()
    for at in row_blocks(len(rows), rows[:1].nbytes):  # of a file that may be mapped
        digest.update(np.ascontiguousarray(rows[at]).data)
        release(rows)
    return digest.hexdigest()


def names(paths: Iterable[Any]) -> bytes:
    """Of image files: folder and file."""
    return "\n".join("/".join(Path(path).parts[-2:]) for path in paths).encode()
