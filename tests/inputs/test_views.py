"""What evaluation sees besides the image itself, the plain rows for a bank, and rows that are features already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inputs.augmentation import normals
from inputs.batches import VIEW, Batches, FeatureBatches
from inputs.images import CROP_SCALE, VIEW_SCALE, random_box
from inputs.rows import Data, Split
from tests.inputs.made import CPU, all_rows, batches, image_set, normalized, photos, table
from utils import BadOption, fold_in, uniforms

EVERYTHING: dict[str, Any] = dict(noise=0.1, size=(19, 13), seed=3)


def features(views: int = 3, rows: int = 23, width: int = 5, **options: Any) -> FeatureBatches:
    """Each number tells its place: view 1, row 2, feature 3 is 1023."""
    x = 1000.0 * torch.arange(views)[:, None, None] + 10 * torch.arange(rows)[:, None] + torch.arange(width)
    return FeatureBatches(x, np.arange(rows) % 5, **{"data": image_set(rows), "batch_size": 7, "device": CPU, **options})


def same_epochs(one: Any, two: Any, epoch: int = 0) -> None:
    for a, b in zip(one.epoch(epoch), two.epoch(epoch), strict=True):
        for part in ("x", "target", "index"):
            assert torch.equal(getattr(a, part), getattr(b, part)), part


# ---------------------------------------------------------------- plain rows


@pytest.mark.parametrize(("height", "width"), [(11, 17), (17, 11), (5, 7), (3, 2)])
@pytest.mark.parametrize("augment", [True, False])
def test_plain_training_rows_are_the_evaluated_split(height, width, augment):
    data = image_set(height=height, width=width)
    made = batches(data, train=True, augment=augment, **EVERYTHING)
    before = [made.order(2).tolist(), all_rows(made, 2)]
    same_epochs(made.plain(), batches(data, **EVERYTHING))
    same_epochs(made.plain(), batches(data, **EVERYTHING), epoch=5)
    same_epochs(made.plain().plain(), batches(data, **EVERYTHING))
    assert made.order(2).tolist() == before[0]  # the set that was asked is left alone
    assert torch.equal(all_rows(made, 2), before[1])


def test_plain_rows_without_noise_and_size_are_the_pixels():
    data = image_set()
    found = all_rows(batches(data, train=True, augment=True).plain())
    torch.testing.assert_close(found, normalized(data.train.x), rtol=1e-5, atol=1e-6)


def test_plain_rows_are_all_rows():
    """Training leaves out a last batch of one row; a bank needs it."""
    made = batches(image_set(15), train=True, augment=True)
    assert [len(b) for b in made.epoch()] == [7, 7]
    assert [len(b) for b in made.plain().epoch()] == [7, 7, 1]
    assert torch.cat([b.index for b in made.plain().epoch()]).tolist() == list(range(15))
    assert (len(made), len(made.plain())) == (2, 3)


def test_plain_rows_take_no_memory_of_their_own():
    for augment in (True, False):
        made = batches(image_set(), train=True, augment=augment)
        for other in (made.plain(), made.seen_as(3)):
            assert made.x is not None
            assert other.x is not None
            assert other.x.untyped_storage().data_ptr() == made.x.untyped_storage().data_ptr()


@pytest.mark.parametrize("workers", [0, 2])
def test_plain_photos_are_the_evaluated_photos(workers, tmp_path):
    data = photos(tmp_path)
    options: dict[str, Any] = dict(size=(19, 19), noise=0.1, workers=workers, batch_size=5)
    same_epochs(batches(data, train=True, augment=True, **options).plain(), batches(data, **options), epoch=1)


def test_plain_table_rows():
    data = table()
    made = Batches(data.train, data, batch_size=7, device=CPU, train=True, augment=True)
    assert torch.equal(torch.cat([b.x for b in made.plain().epoch()]), torch.from_numpy(data.train.x))


# ---------------------------------------------------------------- views of images in memory


def test_view_0_is_what_evaluation_sees():
    data = image_set()
    for options in ({}, EVERYTHING):
        same_epochs(batches(data, **options), batches(data, **options).seen_as(0))
        same_epochs(batches(data, **options), batches(data, **options).seen_as(5).seen_as(0))
    torch.testing.assert_close(all_rows(batches(data).seen_as(0)), normalized(data.train.x), rtol=1e-5, atol=1e-6)


def test_view_1_is_the_mirror_image():
    data = image_set()
    found = all_rows(batches(data).seen_as(1))
    torch.testing.assert_close(found, normalized(data.train.x[..., ::-1].copy()), rtol=1e-5, atol=1e-6)
    whole = all_rows(batches(data, **EVERYTHING))  # with its noise
    torch.testing.assert_close(all_rows(batches(data, **EVERYTHING).seen_as(1)), whole.flip(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("flip", "view"), [(True, 2), (True, 7), (False, 1), (False, 2)])
@pytest.mark.parametrize(("height", "width", "border"), [(11, 17, 2), (5, 7, 1)])
def test_other_views_are_crops_row_by_row(flip, view, height, width, border):
    data = image_set(height=height, width=width, flip=flip)
    draws = uniforms(fold_in(5, VIEW, view), np.arange(23), 3)
    noise = normals(11, np.arange(23), 3 * height * width, CPU).view(23, 3, height, width)
    padded, noise_padded = (np.pad(a, ((0, 0), (0, 0), (border, border), (border, border))) for a in (data.train.x, noise.numpy()))
    wanted: list[np.ndarray] = []
    noise_wanted: list[np.ndarray] = []
    for row in range(23):
        top, left = int(draws[row, 0] * (2 * border + 1)), int(draws[row, 1] * (2 * border + 1))
        for whole, kept in ((padded, wanted), (noise_padded, noise_wanted)):
            cut = whole[row, :, top : top + height, left : left + width]
            kept.append(cut[:, :, ::-1] if flip and draws[row, 2] < 0.5 else cut)
    made = batches(data, seed=5).seen_as(view)
    torch.testing.assert_close(all_rows(made), normalized(np.stack(wanted)), rtol=1e-5, atol=1e-6)
    assert np.array_equal(made._viewed(noise, np.arange(23)).numpy(), np.stack(noise_wanted))
    assert len({(d[0] // (1 / 3), d[1] // (1 / 3), d[2] < 0.5) for d in draws}) > 5


def test_noise_moves_with_its_image():
    """Fresh noise in every view would be averaged away by the mean over views."""
    data = image_set(rows=5, height=13, width=11, flip=False)
    data.train.x[:] = 128
    data.train.x[:, :, 6, 5] = 255  # shows where the crop is
    noisy, clean = batches(data, noise=0.1, seed=3), batches(data, seed=3)
    noise = [all_rows(noisy.seen_as(v)) - all_rows(clean.seen_as(v)) for v in (0, 4)]
    places = [all_rows(clean.seen_as(v))[:, 0].flatten(1).argmax(1) for v in (0, 4)]
    assert not torch.equal(places[0], places[1])
    for row in range(5):
        (y0, x0), (y4, x4) = (divmod(p[row].item(), 11) for p in places)
        around = [noise[n][row, :, y - 4 : y + 5, x - 3 : x + 4] for n, (y, x) in enumerate(((y0, x0), (y4, x4)))]
        torch.testing.assert_close(around[0], around[1], rtol=1e-4, atol=1e-5)


def test_views_differ_from_one_another_and_between_seeds():
    data = image_set(rows=13, height=43, width=41)
    seen = [all_rows(batches(data, seed=seed).seen_as(view)) for seed in (0, 1) for view in range(2, 13)]
    for n, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[:n])
    draws = np.stack([uniforms(fold_in(0, VIEW, view), np.arange(1009), 3).ravel() for view in range(1, 12)])
    assert np.abs(np.corrcoef(draws) - np.eye(11)).max() < 5 / 3027**0.5
    trained = batches(data, train=True, augment=True)
    assert not any(torch.equal(all_rows(trained, view), seen[view - 2]) for view in range(2, 13))


@pytest.mark.parametrize("view", [0, 1, 2, 5])
def test_a_view_of_a_row_does_not_depend_on_its_batch(view):
    data = image_set()
    wanted = all_rows(batches(data, batch_size=23, **EVERYTHING).seen_as(view))
    for size in (1, 2, 5, 11):
        made = batches(data, batch_size=size, **EVERYTHING).seen_as(view)
        assert torch.equal(all_rows(made), wanted)
        assert torch.equal(all_rows(made, epoch=9), wanted)  # nor on the epoch
        rest = list(made.epoch(0, start=2))
        assert torch.equal(torch.cat([b.x for b in rest]), wanted[2 * size :])


@pytest.mark.parametrize("view", [0, 1, 2])
def test_no_row_is_lost_in_a_view(view):
    data = image_set(15)
    for made in (batches(data).seen_as(view), batches(data, train=True, augment=True).seen_as(view), features(rows=15).seen_as(view)):
        assert torch.cat([b.index for b in made.epoch()]).tolist() == list(range(15))
        assert torch.cat([b.target for b in made.epoch()]).tolist() == [n % 5 for n in range(15)]


def test_a_training_set_is_seen_as_its_evaluation_is():
    data = image_set()
    for view in range(4):
        same_epochs(batches(data, train=True, augment=True, **EVERYTHING).seen_as(view), batches(data, **EVERYTHING).seen_as(view))


def test_the_smallest_image_has_views():
    data = image_set(rows=5, height=1, width=1)
    found = all_rows(batches(data).seen_as(2))
    wanted, black = normalized(data.train.x), normalized(np.zeros((1, 3, 1, 1), np.uint8))
    inside = [torch.allclose(found[row], wanted[row], atol=1e-6) for row in range(5)]
    assert all(near or torch.allclose(found[row], black[0], atol=1e-6) for row, near in enumerate(inside))


# ---------------------------------------------------------------- views of image files


@pytest.mark.parametrize("view", [0, 1, 2, 5])
def test_workers_change_nothing_in_a_view(view, tmp_path):
    data = photos(tmp_path)
    runs = [
        all_rows(batches(data, noise=0.1, size=(19, 19), workers=workers, batch_size=size, seed=3).seen_as(view))
        for workers, size in ((0, 3), (2, 3), (2, 4), (0, 11))
    ]
    assert runs[0].shape == (11, 3, 19, 19)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_view_1_of_a_photo_is_its_middle_mirrored(tmp_path):
    data = photos(tmp_path)
    for noise in (0.0, 0.1):
        made = batches(data, size=(19, 19), workers=0, noise=noise)
        assert torch.equal(all_rows(made.seen_as(1)), all_rows(made).flip(-1))
        same_epochs(made.seen_as(0), made)


def halves(folder: Path, flip: bool) -> Data:
    """Red on the left, green on the right, 29 rows of one photo."""
    image = Image.new("RGB", (40, 30), (255, 0, 0))
    image.paste((0, 255, 0), (20, 0, 40, 30))
    image.save(folder / "halves.png")
    split = Split(np.array([str(folder / "halves.png")] * 29), np.arange(29) % 2)
    fitted = {"mean": [0.0] * 3, "std": [1.0] * 3}
    return Data("made", "files", (3, 224, 224), ("a", "b"), split, None, split, flip, fitted)


@pytest.mark.parametrize(("flip", "view"), [(True, 2), (True, 3), (False, 1), (False, 2)])
def test_other_views_of_a_photo_are_its_boxes(flip, view, tmp_path):
    data = halves(tmp_path, flip)
    found = all_rows(batches(data, size=(19, 19), workers=0, seed=5).seen_as(view))
    draws = uniforms(fold_in(5, VIEW, view), np.arange(29), 5)
    turned = 0
    for row in range(29):
        left, _, right, _ = random_box((40, 30), draws[row], VIEW_SCALE)
        mirrored = flip and draws[row, 4] < 0.5
        red = (20 - left) / (right - left)  # of the columns
        means = found[row].mean((1, 2))
        torch.testing.assert_close(means, torch.tensor([red, 1 - red, 0.0]), atol=0.01, rtol=0)
        first = 1 if mirrored else 0  # the color of the left edge
        assert found[row, first, 9, 0] == 1
        turned += mirrored
    assert (0 < turned < 29) == flip


def test_views_crop_more_gently_than_training():
    draws = uniforms(3, np.arange(997), 5)
    for scale in (CROP_SCALE, VIEW_SCALE):
        boxes = np.array([random_box((97, 89), d, scale) for d in draws])
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (97 * 89)
        assert abs(area.min() - scale[0]) < 0.02
    assert random_box((97, 89), draws[0]) == random_box((97, 89), draws[0], CROP_SCALE)


# ---------------------------------------------------------------- what has no views


def test_a_table_has_no_views():
    data = table()
    made = Batches(data.train, data, batch_size=7, device=CPU)
    same_epochs(made.seen_as(0), made)
    with pytest.raises(BadOption, match=r"^tta needs images: the rows of a table have no views, got 1$"):
        made.seen_as(1)


def test_views_that_do_not_exist():
    with pytest.raises(ValueError, match=r"^view must be at least 0, got -1$"):
        batches(image_set()).seen_as(-1)
    for view in (-1, 3):
        with pytest.raises(ValueError, match=rf"^view must be one of those that were embedded \(0 to 2\), got {view}$"):
            features().seen_as(view)


# ---------------------------------------------------------------- features that are ready


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(23, 7), (15, 7), (16, 5), (1, 7), (3, 1)])
def test_features_come_in_the_order_of_their_images(rows, size, train):
    options: dict[str, Any] = dict(batch_size=size, train=train, seed=5)
    ready, images = features(rows=rows, **options), batches(image_set(rows), augment=train, **options)
    assert (len(ready), ready.bounds()) == (len(images), images.bounds())
    for epoch in range(3):
        assert ready.order(epoch).tolist() == images.order(epoch).tolist()
        for start in range(len(images) + 1):
            for one, two in zip(ready.epoch(epoch, start), images.epoch(epoch, start), strict=True):
                assert torch.equal(one.index, two.index)
                assert torch.equal(one.target, two.target)
                assert (one.embedded, two.embedded) == (True, False)


@pytest.mark.parametrize(("views", "taken"), [(1, [0, 0, 0, 0]), (2, [1, 1, 1, 1]), (3, [1, 2, 1, 2]), (4, [1, 2, 3, 1])])
def test_training_takes_every_view_but_the_plain_one_in_turn(views, taken):
    made = features(views=views, train=True)
    for epoch, view in enumerate(taken):
        for batch in made.epoch(epoch):
            wanted = 1000.0 * view + 10 * batch.index[:, None] + torch.arange(5)
            assert torch.equal(batch.x, wanted)


def test_evaluation_of_features():
    made = features(train=True, rows=15)
    for view in range(3):
        for seen in (made.seen_as(view), features(rows=15).seen_as(view)):
            for epoch in (0, 1):
                x = torch.cat([b.x for b in seen.epoch(epoch)])
                assert torch.equal(x, 1000.0 * view + 10 * torch.arange(15)[:, None] + torch.arange(5))
    same_epochs(made.plain(), made.seen_as(0))
    same_epochs(made.plain(), features(rows=15))
    assert made.train
    assert made.plain().views.data_ptr() == made.views.data_ptr()


def test_features_have_what_batches_have():
    made, images = features(train=True, seed=3), batches(image_set(), train=True, seed=3)
    for name in ("device", "batch_size", "train", "seed", "view"):
        assert getattr(made, name) == getattr(images, name)
    assert torch.equal(made.target, images.target)
    assert made.data.classes == images.data.classes
    assert np.array_equal(made.split.x, made.views[0].numpy())
    assert np.array_equal(made.split.y, images.split.y)


@pytest.mark.parametrize("shape", [(23, 5), (0, 23, 5), (2, 19, 5)])
def test_features_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"^views must be \(at least 1, 23 rows, features\), got "):
        FeatureBatches(torch.zeros(shape), np.arange(23) % 5, data=image_set(), batch_size=7, device=CPU)
