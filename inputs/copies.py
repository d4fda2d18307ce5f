"""Rows that are exact copies of each other, within and between splits."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK = 1 << 20  # bytes of rows that are hashed at once
MOST_FILES = 100_000  # image files that are compared


def first_copies(*parts: np.ndarray) -> list[np.ndarray] | None:
    """For each row of each part the number of the first row that is the same, counted through all parts. None: too many files."""
    if parts[0].dtype.kind == "U":
        paths = [str(path) for part in parts for path in part]
        if len(paths) > MOST_FILES:
            return None
        first = _first(_digests(paths))
    else:
        first = _checked(_first(np.concatenate([_hashes(part) for part in parts])), parts)
    return np.split(first, np.cumsum([len(part) for part in parts])[:-1])


def _first(keys: np.ndarray) -> np.ndarray:
    """For each key the place of the first one that equals it."""
    found = np.arange(len(keys))
    ordered = np.sort(keys)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if len(several):
        rows = np.flatnonzero(several[np.searchsorted(several, keys).clip(max=len(several) - 1)] == keys)
        _, first, group = np.unique(keys[rows], return_index=True, return_inverse=True)
        found[rows] = rows[first[group]]
    return found


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    """The bytes of the rows, some rows at a time (n, width)."""
    if not len(rows):
        return
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    step = max(1, BLOCK // max(1, flat.shape[1]))
    for start in range(0, len(flat), step):
        yield flat[start : start + step]


def _hashes(rows: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each row: 32-bit words by random weights, summed. The same bytes give the same number, and others
    another one but in one of 2^32 pairs, which `_checked` finds."""
    found = []
    for block in _blocks(rows):
        padded = np.pad(block, ((0, 0), (0, -block.shape[1] % 4)))
        words = padded.view(np.uint32).astype(np.uint64)
        weights = np.random.default_rng(0).integers(0, 2**64, words.shape[1], np.uint64, endpoint=False) | np.uint64(1)
        found.append(words @ weights)
    return np.concatenate([np.empty(0, np.uint64), *found])


def _checked(first: np.ndarray, parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Pairs whose bytes differ are no copies."""
    starts = np.cumsum([0, *map(len, parts)])
    copies = np.flatnonzero(first != np.arange(len(first)))
    for i, j in itertools.combinations_with_replacement(range(len(parts)), 2):  # the first one is in part i, its copy in part j
        here = (starts[j] <= copies) & (copies < starts[j + 1]) & (starts[i] <= first[copies]) & (first[copies] < starts[i + 1])
        pairs, step = copies[here], max(1, BLOCK // max(1, parts[i][:1].nbytes))
        for rows in (pairs[at : at + step] for at in range(0, len(pairs), step)):
            a, b = np.ascontiguousarray(parts[i][first[rows] - starts[i]]), np.ascontiguousarray(parts[j][rows - starts[j]])
            same = (a.reshape(len(rows), -1).view(np.uint8) == b.reshape(len(rows), -1).view(np.uint8)).all(1)  # bytes: NaN is NaN
            first[rows[~same]] = rows[~same]
    return first


def _digests(paths: list[str]) -> np.ndarray:
    """Of the content, read only where another file has the same size."""
    sizes = [Path(path).stat().st_size for path in paths]
    shared = {size for size, count in Counter(sizes).items() if count > 1}
    digest = {p: hashlib.sha256(Path(p).read_bytes()).hexdigest() for p, size in zip(paths, sizes, strict=True) if size in shared}
    return np.array([digest.get(p, f"{size} {p}") for p, size in zip(paths, sizes, strict=True)])
