"""What holds of readers and encoders for any table and any array: found by hypothesis, from small ones."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset import load
from inputs.augmentation import border_of, cropped
from inputs.columns import coded
from inputs.copies import first_copies
from inputs.tables import Encoder, Table, read_csv

quick = settings(max_examples=25, deadline=None, derandomize=True)
CELL = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=6)
ROW = st.tuples(CELL, st.integers(-(10**6), 10**6), st.sampled_from("pq"))


@quick
@given(rows=st.lists(ROW, min_size=1, max_size=9), mark=st.sampled_from(",;\t"))
def test_what_was_written_as_csv_is_read(rows: list[tuple[str, int, str]], mark: str):
    """Quotes, ends of lines within a cell, delimiters, blanks and any letter."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=mark, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([("text!", "n", "y"), *((f"={c}=", n, y) for c, n, y in rows)])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.csv"
        file.write_text(text.getvalue(), encoding="utf-8", newline="")
        table, labels = read_csv(file, "y")
    assert table.categories[:, 0].tolist() == [f"={c}=" for c, _, _ in rows]
    assert table.numbers[:, 0].tolist() == [n for _, n, _ in rows]
    assert labels.tolist() == [y for _, _, y in rows]


@quick
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=9), st.text("abc", min_size=9, max_size=9))
def test_encoded_columns_have_mean_0_and_one_level_each(values: list[float | None], levels: str):
    numbers = np.array([[np.nan if v is None else v] for v in values])
    table = Table(numbers, [coded(levels[: len(values)])])
    encoded = Encoder.fit(table).encode(table)
    assert np.isfinite(encoded).all()
    present = np.isfinite(numbers[:, 0])
    assert (encoded[~present, 0] == 0).all()
    if present.any():
        assert abs(encoded[present, 0].astype(float).mean()) < 1e-5
        assert encoded[present, 0].astype(float).std() < 1 + 1e-5
    assert (encoded[:, 1:].sum(1) == 1).all()


@quick
@given(st.tuples(st.integers(4, 9), st.integers(1, 4), st.integers(1, 5)), st.sampled_from([0, 1, 3]), st.integers(0, 99))
def test_images_of_an_npz_are_read_pixel_by_pixel(shape: tuple[int, ...], channels: int, seed: int):
    shape = (*shape, *([channels] if channels else []))
    x: np.ndarray = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    y = np.arange(len(x)) % 2
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        data = load(f"npz:{folder}/a.npz", val_fraction=0)
    wanted = x.reshape(*x.shape[:3], -1).transpose(0, 3, 1, 2)
    assert np.array_equal(data.train.x, wanted)
    pixels = wanted.transpose(1, 0, 2, 3).reshape(wanted.shape[1], -1) / 255
    np.testing.assert_allclose(data.fitted["mean"], pixels.mean(1), atol=1e-12)
    std = pixels.std(1)
    np.testing.assert_allclose(data.fitted["std"], np.where(std > 1e-9, std, np.array(data.fitted["std"])), atol=1e-7)


@quick
@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_a_copy_points_to_the_first_of_its_kind(rows: list[int], cut: int):
    x = np.array(rows, np.uint8)[:, None]
    parts = (x[:cut], x[cut:])
    found = np.concatenate(first_copies(*parts) or [])
    assert found.tolist() == [rows.index(value) for value in rows]


@quick
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.lists(st.floats(0, 0.999), min_size=3, max_size=3), st.booleans())
def test_a_crop_has_the_size_of_its_image_and_only_its_pixels(size: tuple[int, int], draws: list[float], flip: bool):
    x = torch.arange(1, size[0] * size[1] + 1, dtype=torch.uint8).view(1, 1, *size)
    border = border_of(x)
    padded = torch.nn.functional.pad(x, (border,) * 4)
    found: Any = cropped(padded, torch.tensor([0]), np.array([draws]), border, flip)
    assert found.shape == x.shape
    inside = found[found > 0]
    assert len(inside.unique()) == len(inside)
    assert len(inside) >= max(0, size[0] - border) * max(0, size[1] - border)
