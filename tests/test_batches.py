"""Batches: what happens to a row follows from (seed, epoch, row), never from the batch it sits in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from batches import AUGMENT, CROP_RATIO, CROP_SCALE, Batch, Batches, center_box, mixed, normals, random_box
from dataset import Data, Split
from utils import BadOption, fold_in, uniforms

CPU = torch.device("cpu")
MEAN, STD = [0.3, 0.5, 0.2], [0.25, 0.2, 0.4]


def image_set(rows: int = 23, channels: int = 3, height: int = 11, width: int = 17, *, flip: bool = True, seed: int = 0) -> Data:
    x = np.random.default_rng(seed).integers(0, 256, (rows, channels, height, width), np.uint8)
    split = Split(x, np.arange(rows) % 5)
    fitted = {"mean": MEAN[:channels], "std": STD[:channels]}
    return Data("made", "image", x.shape[1:], tuple("abcde"), split, None, split, flip, fitted)


def batches(data: Data, **options: Any) -> Batches:
    return Batches(data.train, data, **{"batch_size": 7, "device": CPU, **options})


def all_rows(made: Batches, epoch: int = 0) -> torch.Tensor:
    """The epoch, in the order of the split."""
    parts = list(made.epoch(epoch))
    x, index = torch.cat([b.x for b in parts]), torch.cat([b.index for b in parts])
    return x[index.argsort()]


def normalized(x: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(x).double() / 255
    mean, std = (torch.tensor(v[: x.shape[1]], dtype=torch.float64).view(1, -1, 1, 1) for v in (MEAN, STD))
    return ((pixels - mean) / std).float()


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


def test_normals_are_normal():
    draws = normals(7, np.arange(1009), 101, CPU)
    assert draws.shape == (1009, 101)
    assert draws.isfinite().all()
    flat = draws.double().flatten().sort().values
    n = len(flat)
    normal = torch.distributions.Normal(0, 1)
    steps = (torch.arange(n) + 0.5) / n
    assert (normal.cdf(flat) - steps).abs().max() < 1.95 / n**0.5  # Kolmogorov-Smirnov at 0.1 %
    assert torch.equal(normals(7, np.array([13, 5]), 101, CPU), draws[[13, 5]])


# ---------------------------------------------------------------- image files


def photos(folder: Path, rows: int = 11) -> Data:
    rng = np.random.default_rng(0)
    paths = []
    for row in range(rows):
        paths.append(str(folder / f"{row}.{'jpg' if row % 2 else 'png'}"))
        height, width = rng.integers(13, 41, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(paths[-1])
    split = Split(np.array(paths), np.arange(rows) % 3)
    return Data("made", "files", (3, 224, 224), tuple("abc"), split, None, split, True, {"mean": MEAN, "std": STD})


@pytest.mark.parametrize("train", [True, False])
def test_workers_change_nothing(train, tmp_path):
    data = photos(tmp_path)
    state = torch.get_rng_state()
    runs = []
    for workers, size in ((0, 3), (2, 3), (2, 4)):
        made = batches(data, train=train, augment=train, noise=0.1, size=(19, 19), workers=workers, batch_size=size, seed=3)
        runs.append(all_rows(made, epoch=2))
    assert runs[0].shape == (11, 3, 19, 19)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert torch.equal(torch.get_rng_state(), state)  # starting workers takes nothing from the generator of dropout
    made = batches(data, train=train, augment=train, size=(19, 19), workers=2, batch_size=3)
    parts = list(made.epoch(1))
    for one, two in zip(made.epoch(1, start=2), parts[2:], strict=True):
        assert torch.equal(one.x, two.x)
    assert torch.equal(all_rows(made, 0), all_rows(made, 1)) != train


def test_an_evaluated_photo_is_its_middle_resized(tmp_path):
    image = Image.new("RGB", (16, 24), (255, 0, 0))
    image.paste((0, 255, 0), (1, 5, 15, 19))  # 0.875 of the shorter side, in the middle
    data = photos(tmp_path, rows=2)
    image.save(data.train.x[0])
    found = next(batches(data, size=(14, 14), workers=0).epoch()).x[0]
    green = normalized(np.array([[[[0]], [[255]], [[0]]]], np.uint8))[0]
    torch.testing.assert_close(found, green.expand(3, 14, 14))


def test_gray_palette_and_transparent_photos_become_three_channels(tmp_path):
    data = photos(tmp_path, rows=5)
    for row, mode in enumerate(("L", "P", "RGBA", "1", "I;16")):
        Image.new(mode, (13, 17)).save(tmp_path / f"{row}.png")
    data.train.x[:] = [str(tmp_path / f"{row}.png") for row in range(5)]
    assert next(batches(data, size=(7, 7), workers=0).epoch()).x.shape == (5, 3, 7, 7)


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    elif how == "text":
        content = bytearray(b"not an image")
    elif how == "chunk":  # the name of the first data chunk of a PNG: Pillow raises SyntaxError
        content[content.index(b"IDAT") : content.index(b"IDAT") + 4] = b"\xff\xff\xff\xff"
    elif how == "bomb":  # a header of 65,535 x 65,535 pixels
        content[18:24] = b"\xff\xff\x00\x00\xff\xff"
    file.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["cut", "empty", "text", "chunk", "gone"])
def test_a_photo_that_can_not_be_read_is_one_line(how, workers, tmp_path):
    data = photos(tmp_path)
    if how == "gone":
        Path(data.train.x[6]).unlink()
    else:
        damage(Path(data.train.x[6]), how)
    made = batches(data, size=(7, 7), workers=workers, batch_size=3)
    with pytest.raises(BadOption, match=r"^dataset has an image that can't be read \(\w+\), got '.*6.png'"):
        list(made.epoch())


def test_a_header_of_billions_of_pixels_is_one_line(tmp_path):
    data = photos(tmp_path, rows=2)
    file = tmp_path / "bomb.bmp"
    Image.new("RGB", (5, 5)).save(file)
    content = bytearray(file.read_bytes())
    content[18:26] = (65_535).to_bytes(4, "little") * 2
    file.write_bytes(content)
    data = dataclasses.replace(data, train=Split(np.array([str(file)] * 2), data.train.y))
    with pytest.raises(BadOption, match=r"^dataset has an image that can't be read \(DecompressionBombError\)"):
        next(batches(data, size=(7, 7), workers=0).epoch())


def test_random_boxes_are_inside_the_image_and_as_large_as_drawn():
    draws = uniforms(3, np.arange(2003), 5)
    for size in ((31, 97), (97, 31), (53, 53)):
        boxes = np.array([random_box(size, d) for d in draws])
        left, top, right, bottom = boxes.T
        assert left.min() >= 0
        assert top.min() >= 0
        assert right.max() <= size[0]
        assert bottom.max() <= size[1]
        area = (right - left) * (bottom - top) / (size[0] * size[1])
        wanted = CROP_SCALE[0] + draws[:, 0] * (CROP_SCALE[1] - CROP_SCALE[0])
        fits = (right - left < size[0] - 1e-9) & (bottom - top < size[1] - 1e-9)
        np.testing.assert_allclose(area[fits], wanted[fits], rtol=1e-5)
        assert (area <= wanted * (1 + 1e-5)).all()
        ratio = (right - left) / (bottom - top)
        assert (ratio[fits] >= CROP_RATIO[0] - 1e-6).all()
        assert (ratio[fits] <= CROP_RATIO[1] + 1e-6).all()
    assert center_box((16, 24)) == (1, 5, 15, 19)


# ---------------------------------------------------------------- mixed rows


def batch(rows: int = 5, height: int = 7, width: int = 11) -> Batch:
    x = torch.arange(1.0, rows + 1).view(-1, 1, 1, 1).expand(rows, 2, height, width).contiguous()  # each row its own gray
    return Batch(x, torch.tensor([2, 0, 1, 2, 0][:rows]), torch.arange(100, 100 + rows))


def test_off_is_off():
    given = batch()
    assert mixed(given, 3, 0.0, 0.0, seed=0) is given


@pytest.mark.parametrize("seed", range(5))
def test_mixup_by_hand(seed):
    given, found = batch(), mixed(batch(), 3, 0.7, 0.0, seed)
    keep = ((found.x[0, 0, 0, 0] - 5) / (1 - 5)).item()  # row 0 is mixed with row 4
    assert 0 < keep < 1
    torch.testing.assert_close(found.x, keep * given.x + (1 - keep) * given.x.flip(0))
    one_hot = torch.eye(3)[given.target]
    torch.testing.assert_close(found.target, keep * one_hot + (1 - keep) * one_hot.flip(0))
    torch.testing.assert_close(found.target.sum(1), torch.ones(5))
    assert found.index.tolist() == [[100, 104], [101, 103], [102, 102], [103, 101], [104, 100]]
    assert torch.equal(mixed(batch(), 3, 0.7, 0.0, seed).x, found.x)


@pytest.mark.parametrize("seed", range(7))
def test_cutmix_by_hand(seed):
    given, found = batch(), mixed(batch(), 3, 0.0, 1.0, seed)
    pasted = found.x[0, 0] == 5
    share = pasted.double().mean().item()
    rows, columns = pasted.any(1).sum().item(), pasted.any(0).sum().item()
    assert pasted.sum() == rows * columns  # one rectangle
    assert abs(rows / 7 - columns / 11) <= 0.5 / 7 + 0.5 / 11 + 1e-9  # of the image's own shape, to a pixel
    assert torch.equal(found.x[:, 0] == given.x.flip(0)[:, 0], pasted.expand(5, 7, 11) | (given.x[:, 0] == given.x.flip(0)[:, 0]))
    assert torch.equal(found.x[2], given.x[2])  # the middle row is its own mirror
    one_hot = torch.eye(3)[given.target]
    torch.testing.assert_close(found.target, (1 - share) * one_hot + share * one_hot.flip(0))
    assert found.index.tolist() == [[100, 104], [101, 103], [102, 102], [103, 101], [104, 100]]
    assert torch.equal(given.x, batch().x)  # the batch that was given is left alone


def test_with_both_a_coin_decides():
    kinds = []
    for seed in range(101):
        values = mixed(batch(), 3, 1.0, 1.0, seed).x[0].unique()
        kinds.append(set(values.tolist()) <= {1.0, 5.0})
    assert 30 < sum(kinds) < 71


def test_shares_follow_the_beta_distribution():
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1))."""
    for alpha in (0.2, 1.0, 5.0):
        keep = np.array([(mixed(batch(), 3, alpha, 0.0, seed).x[0, 0, 0, 0].item() - 5) / -4 for seed in range(1009)])
        variance = 1 / (4 * (2 * alpha + 1))
        assert abs(keep.mean() - 0.5) < 5 * (variance / 1009) ** 0.5
        assert abs(keep.var() / variance - 1) < 0.2


def test_table_rows_are_mixed_and_never_cut():
    given = Batch(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 1, 0]), torch.arange(3))
    found = mixed(given, 2, 0.0, 1.0, seed=3)
    assert 1 < found.x[0, 0] < 5
    assert found.target.shape == (3, 2)


@pytest.mark.parametrize(("low", "high"), [(5_000, 40_000)])
def test_sixteen_bit_images_keep_their_range(tmp_path, low, high):
    """Left to Pillow, both would be 255."""
    from PIL import Image

    from batches import eight_bit

    for value in (low, high):
        file = tmp_path / f"{value}.png"
        Image.fromarray(np.full((3, 5), value, np.uint16)).save(file)
        with Image.open(file) as image:
            assert np.unique(np.asarray(eight_bit(image).convert("RGB"))).tolist() == [value >> 8]
