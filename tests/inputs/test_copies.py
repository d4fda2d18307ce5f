"""Exact copies of rows: found as brute force finds them, told between splits, and kept out of what they would make too easy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import inputs.copies
from dataset import load
from inputs.copies import first_copies
from tests.inputs.files import npz


def brute_force(*parts: np.ndarray) -> list[int]:
    rows = [row.tobytes() for part in parts for row in part]
    return [rows.index(row) for row in rows]


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1, 7, 11)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_first_copies_as_brute_force_finds_them(shape, dtype, monkeypatch):
    monkeypatch.setattr(inputs.copies, "BLOCK", 50)  # many blocks
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 256, (23, *shape)).astype(dtype)
    parts = [kinds[rng.integers(0, 23, n)] for n in (31, 0, 13, 17)]
    found = first_copies(*parts)
    assert found is not None
    assert [len(part) for part in found] == [31, 0, 13, 17]
    assert np.concatenate(found).tolist() == brute_force(*parts)


def test_rows_of_the_same_hash_are_compared(monkeypatch):
    monkeypatch.setattr(inputs.copies, "_hashes", lambda rows: np.zeros(len(rows), np.uint64))
    a, b = np.array([[1], [2], [1]], np.uint8), np.array([[3], [1]], np.uint8)
    first, second = first_copies(a, b) or ([], [])
    assert list(first) == [0, 1, 0]
    assert list(second) == [3, 0]


def test_nan_equals_itself_and_signed_zeros_differ():
    (found,) = first_copies(np.array([[np.nan], [0.0], [-0.0], [np.nan]], np.float32)) or ([],)
    assert list(found) == [0, 1, 2, 0]


def test_image_files_are_compared_by_content(tmp_path: Path, monkeypatch):
    for name, content in {"a": b"one", "b": b"two", "c": b"one", "d": b"three"}.items():
        (tmp_path / name).write_bytes(content)
    paths = np.array([str(tmp_path / name) for name in "abcd"])
    found, others = first_copies(paths, paths[:1]) or ([], [])
    assert list(found) == [0, 1, 0, 3]
    assert list(others) == [0]
    monkeypatch.setattr(inputs.copies, "MOST_FILES", 3)
    assert first_copies(paths) is None


# ---------------------------------------------------------------- in a data set


def crowded(folder: Path) -> str:
    """60 training rows, the last 20 copies of the first 20; validation rows of their own, 3 of them training rows; 10 test rows, of
    which 2 are training rows, 1 is a validation row and 1 another test row."""
    rng = np.random.default_rng(0)
    new = rng.normal(size=(60, 3))
    x_train = np.concatenate([new[:40], new[:20]])
    x_val = np.concatenate([new[40:47], new[[0, 5, 30]]])
    x_test = np.concatenate([new[50:56], new[[1, 2]], new[40:41], new[50:51]])
    y = np.arange(60) % 2
    return npz(folder, x_train=x_train, y_train=y, x_val=x_val, y_val=y[:10], x_test=x_test, y_test=y[:10])


def test_copies_are_counted_where_the_first_of_their_kind_is(tmp_path: Path):
    data = load(crowded(tmp_path))
    assert data.summary["duplicates"] == {
        "train": 20,
        "val_in_train": 3,
        "val": 0,
        "test_in_train": 2,
        "test_in_val": 1,
        "test": 1,
    }
    assert data.train.copies is not None
    assert data.train.copies.tolist() == [*range(40), *range(20)]
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == (60, 7, 10)
    assert data.val.y.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_copies_can_be_kept(tmp_path: Path):
    data = load(crowded(tmp_path), keep_duplicates=True)
    assert data.train.copies is None
    assert data.val is not None
    assert len(data.val) == 10
    assert data.summary["duplicates"]["val_in_train"] == 3


def test_a_validation_split_of_copies_alone_is_none(tmp_path: Path):
    rows = np.random.default_rng(0).normal(size=(40, 3))
    name = npz(
        tmp_path, x_train=rows, y_train=np.arange(40) % 2, x_val=rows[:5], y_val=np.arange(5) % 2, x_test=rows + 1, y_test=np.arange(40) % 2
    )
    assert load(name).val is None


def test_rows_that_all_differ_change_nothing():
    data = load("digits")
    assert data.train.copies is None
    assert set(data.summary["duplicates"].values()) == {0}
