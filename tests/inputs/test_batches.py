"""Batches: what happens to a row follows from (seed, epoch, row), never from the batch it sits in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from inputs.batches import AUGMENT, Batches
from inputs.rows import Data, Split
from tests.inputs.made import CPU, MEAN, STD, all_rows, batches, image_set, normalized
from utils import fold_in, uniforms

# ---------------------------------------------------------------- order


def test_evaluation_reads_every_row_once_in_order():
    data = image_set()
    parts = list(batches(data).epoch())
    assert [len(b) for b in parts] == [7, 7, 7, 2]
    assert torch.cat([b.index for b in parts]).tolist() == list(range(23))
    assert torch.cat([b.target for b in parts]).tolist() == [n % 5 for n in range(23)]
    torch.testing.assert_close(torch.cat([b.x for b in parts]), normalized(data.train.x), rtol=1e-5, atol=1e-6)
    assert [b.index.tolist() for b in batches(data).epoch(3)] == [b.index.tolist() for b in parts]


def test_training_order_is_a_permutation_that_depends_on_seed_and_epoch():
    data = image_set()
    made = batches(data, train=True)
    orders = [made.order(epoch).tolist() for epoch in range(5)]
    orders.append(batches(data, train=True, seed=1).order(0).tolist())
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert batches(data, train=True, batch_size=3).order(2).tolist() == orders[2]
    for batch in made.epoch(1):
        assert batch.target.tolist() == [n % 5 for n in batch.index.tolist()]


def test_a_start_in_the_middle_continues_the_same_epoch():
    made = batches(image_set(), train=True, augment=True, noise=0.1, size=(19, 13))
    whole = list(made.epoch(3))
    for start in range(len(whole) + 1):
        rest = list(made.epoch(3, start))
        assert len(rest) == len(whole) - start
        for one, two in zip(rest, whole[start:], strict=True):
            assert torch.equal(one.x, two.x)
            assert torch.equal(one.index, two.index)


@pytest.mark.parametrize(
    ("rows", "size", "train", "sizes"),
    [
        (15, 7, True, [7, 7]),  # a last batch of one row has no variance for BatchNorm
        (15, 7, False, [7, 7, 1]),  # evaluation counts every row
        (16, 7, True, [7, 7, 2]),
        (14, 7, True, [7, 7]),
        (1, 7, True, [1]),  # there is nothing else
        (3, 1, True, [1, 1, 1]),  # as asked
    ],
)
def test_sizes_of_batches(rows, size, train, sizes):
    made = batches(image_set(rows), batch_size=size, train=train)
    assert [len(b) for b in made.epoch()] == sizes
    assert len(made) == len(sizes)


# ---------------------------------------------------------------- crops and flips


@pytest.mark.parametrize(("height", "width", "border"), [(11, 17, 2), (5, 7, 1), (32, 32, 4)])
@pytest.mark.parametrize("flip", [True, False])
def test_the_gather_is_plain_slicing_row_by_row(height, width, border, flip):
    data = image_set(height=height, width=width, flip=flip)
    made = batches(data, train=True, augment=True, seed=5)
    found = all_rows(made, epoch=3)
    draws = uniforms(fold_in(5, AUGMENT, 3), np.arange(23), 3)
    padded = np.pad(data.train.x, ((0, 0), (0, 0), (border, border), (border, border)))
    wanted = []
    for row in range(23):
        top, left = int(draws[row, 0] * (2 * border + 1)), int(draws[row, 1] * (2 * border + 1))
        cut = padded[row, :, top : top + height, left : left + width]
        wanted.append(cut[:, :, ::-1] if flip and draws[row, 2] < 0.5 else cut)
    torch.testing.assert_close(found, normalized(np.stack(wanted)), rtol=1e-5, atol=1e-6)
    assert not torch.equal(found, all_rows(made, epoch=4))


def test_every_place_of_the_crop_occurs_equally_often():
    data = image_set(rows=5003, channels=1, height=8, width=8)
    data.train.x[:] = 0
    data.train.x[:, :, 3, 4] = 255  # one bright pixel, off the middle
    bright = all_rows(batches(data, train=True, augment=True, batch_size=997))[:, 0].flatten(1).argmax(1)
    rows, columns = np.unravel_index(bright.numpy(), (8, 8))
    counts = np.array([[((rows == y) & (columns == x)).sum() for x in range(2, 6)] for y in range(2, 5)])
    share = counts / 5003
    # up, same, down; a flip maps column 4 to 3: 3 to 5 become 2 to 4, so 3 and 4 come in two ways
    wanted = np.outer([1 / 3] * 3, [1 / 6, 1 / 3, 1 / 3, 1 / 6])
    assert counts.sum() == 5003
    assert np.abs(share - wanted).max() < 5 * (wanted.max() / 5003) ** 0.5


@pytest.mark.parametrize("train", [True, False])
def test_a_row_does_not_depend_on_its_batch(train):
    data = image_set()
    options: dict[str, Any] = dict(train=train, augment=train, noise=0.1, size=(19, 13), seed=3)
    wanted = all_rows(batches(data, batch_size=23, **options), epoch=2)
    for size in (2, 5, 11):
        found = all_rows(batches(data, batch_size=size, **options), epoch=2)
        seen = torch.cat([b.index for b in batches(data, batch_size=size, **options).epoch(2)]).sort().values
        assert torch.equal(found, wanted[seen])


def test_tables_pass_as_they_are():
    x = np.random.default_rng(0).normal(size=(23, 5)).astype(np.float32)
    split = Split(x, np.arange(23) % 2)
    data = Data("made", "table", (5,), ("a", "b"), split, None, split, True, {"mean": [], "std": [], "levels": []})
    made = Batches(split, data, batch_size=7, device=CPU, train=True, augment=True, noise=0.5)
    assert torch.equal(all_rows(made), torch.from_numpy(x))


# ---------------------------------------------------------------- normalize, resize, noise


@pytest.mark.parametrize("size", [(23, 29), (5, 7), (23, 7), (11, 31)])
def test_normalizing_before_resizing_is_the_same_as_after(size):
    data = image_set()
    found = all_rows(batches(data, size=size))
    smaller = size[0] < 11 or size[1] < 17
    pixels = F.interpolate(torch.from_numpy(data.train.x).double(), size, mode="bilinear", antialias=smaller)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (MEAN, STD))
    torch.testing.assert_close(found, ((pixels / 255 - mean) / std).float(), rtol=1e-4, atol=1e-5)
    assert found.shape[2:] == size


def test_noise_has_the_strength_that_was_asked_for_in_every_channel():
    data = image_set(rows=31, height=47, width=53)
    clean, noisy = all_rows(batches(data)), all_rows(batches(data, noise=0.1))
    pixels = (noisy - clean) * torch.tensor(STD).view(1, 3, 1, 1)  # back to 0..1
    n = 31 * 47 * 53
    for channel in range(3):
        assert abs(pixels[:, channel].std().item() - 0.1) < 5 * 0.1 / (2 * n) ** 0.5
        assert abs(pixels[:, channel].mean().item()) < 5 * 0.1 / n**0.5
    flat = pixels.flatten(1).double()
    assert np.abs(np.corrcoef(flat.numpy()) - np.eye(31)).max() < 5 / flat.shape[1] ** 0.5  # rows get noise of their own


def test_evaluation_gets_the_same_noise_in_every_epoch_and_training_does_not():
    data = image_set()
    held, trained = batches(data, noise=0.1), batches(data, noise=0.1, train=True)
    assert torch.equal(all_rows(held, 0), all_rows(held, 9))
    assert not torch.equal(all_rows(trained, 0), all_rows(trained, 9))
    assert not torch.equal(all_rows(held), all_rows(batches(data, noise=0.1, seed=1)))
