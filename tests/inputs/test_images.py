"""Image files: read by workers or not, damaged or not, the same row gives the same pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inputs.images import CROP_RATIO, CROP_SCALE, center_box, eight_bit, random_box
from inputs.rows import Split
from tests.inputs.made import all_rows, batches, normalized, photos
from utils import BadOption, uniforms


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


@pytest.mark.parametrize(("low", "high"), [(5_000, 40_000)])
def test_sixteen_bit_images_keep_their_range(tmp_path, low, high):
    """Left to Pillow, both would be 255."""
    for value in (low, high):
        file = tmp_path / f"{value}.png"
        Image.fromarray(np.full((3, 5), value, np.uint16)).save(file)
        with Image.open(file) as image:
            assert np.unique(np.asarray(eight_bit(image).convert("RGB"))).tolist() == [value >> 8]
