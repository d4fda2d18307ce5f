"""Features of a frozen backbone: computed once, found again, and computed anew when anything that they follow from changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inputs.batches import Batches
from inputs.features import Features, Reading, digest_of, stamp
from inputs.rows import Batch, Data, Split
from tests.inputs.made import CPU, image_set

LAYER = ("KvtAttention", 3, 2, *[None] * 13)
WEIGHTS = digest_of(torch.tensor([7.0, -1.5]), torch.arange(6.0).view(2, 3))
PIXELS = np.arange(150, dtype=np.uint8).reshape(5, 2, 3, 5)
FITTED = {"mean": [0.3, 0.5], "std": [0.25, 0.2]}


def data_of(kind: str, x: np.ndarray, fitted: dict[str, Any], flip: bool = True) -> Data:
    split = Split(x, np.arange(len(x)) % 2)
    shape = (3, 224, 224) if kind == "files" else x.shape[1:]
    return Data("made", kind, shape, ("a", "b"), split, None, split, flip, fitted)


def batches(data: Data, **options: Any) -> Batches:
    return Batches(data.train, data, **{"batch_size": 3, "device": CPU, "seed": 11, **options})


def sums(batch: Batch) -> Tensor:
    """A backbone of one feature for each channel."""
    return batch.x.flatten(2).sum(2)


def features(folder: Path | None = None, embed: Callable[[Batch], Tensor] = sums, **changed: Any) -> Features:
    values: dict[str, Any] = {"model": "vit", "layer": LAYER, "use_amp": False, **changed}
    return Features(embed, values.pop("weights", WEIGHTS), Reading(**values), folder)


# ---------------------------------------------------------------- keys


def test_keys_are_those_that_caches_on_disk_have(tmp_path, monkeypatch):
    """Written down from an earlier version: another key, and everyone's features would be computed anew."""
    noisy = batches(data_of("image", PIXELS, FITTED), size=(7, 11), noise=0.1)
    assert [features().key(noisy.seen_as(view), view) for view in (0, 2)] == ["aefbe5b2127c6bca", "cfa0517297adf306"]
    quick = features(use_amp=True)
    clean = batches(data_of("image", PIXELS, FITTED, flip=False), size=(7, 11), noise=0.0)
    assert [quick.key(clean.seen_as(view), view) for view in (0, 1)] == ["25b9caf7344b5ca9", "17dca80bfe0013c2"]
    train = batches(data_of("image", PIXELS, FITTED), size=(7, 11), train=True, augment=True)
    assert [quick.key(train, epoch) for epoch in (0, 1)] == ["26590913de1078ec", "646618f63caeebeb"]
    rows = (np.arange(35, dtype=np.float32) / 8).reshape(7, 5)
    table = batches(data_of("table", rows, {"mean": [0.0] * 5, "std": [1.0] * 5, "levels": []}))
    assert quick.key(table, 0) == "d9a1db507bc4d8e1"
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.png").touch()
        os.utime(f"{name}.png", ns=(0, 1_234_567_890_000_000_000 + ord(name)))
    files = batches(data_of("files", np.array(["a.png", "b.png"]), {"mean": [0.3] * 3, "std": [0.25] * 3}), size=(7, 7))
    assert stamp("a.png") == "a.png 1234567890000000097"
    assert quick.key(files, 0) == "ffe39cfbde138ded"


def test_a_key_follows_from_everything_that_features_follow_from():
    data, other = data_of("image", PIXELS, FITTED), data_of("image", PIXELS[::-1].copy(), FITTED)
    seen = [
        features().key(batches(data), 0),
        features(weights=digest_of("others")).key(batches(data), 0),
        features(model="timm/other").key(batches(data), 0),
        features(layer=("KvtAttention", 3, 4, *LAYER[3:])).key(batches(data), 0),
        features(use_amp=True).key(batches(data), 0),
        features().key(batches(other), 0),
        features().key(batches(data_of("image", PIXELS, {**FITTED, "mean": [0.3, 0.4]})), 0),
        features().key(batches(data_of("image", PIXELS.reshape(5, 2, 5, 3), FITTED)), 0),
        features().key(batches(data, size=(7, 11)), 0),
        *(features().key(batches(data, noise=noise, seed=seed), 0) for noise in (0.1, 0.2) for seed in (11, 13)),
        *(features().key(batches(data, seed=seed).seen_as(view), view) for view in (1, 2) for seed in (11, 13)),
        *(features().key(batches(data, train=True, augment=True, seed=seed), epoch) for epoch in (0, 1) for seed in (11, 13)),
    ]
    assert len(set(seen)) == len(seen) == 21
    assert features().key(batches(data, seed=13), 0) == seen[0]  # where nothing is drawn, the seed changes nothing
    assert features().key(batches(data, batch_size=2, workers=0), 0) == seen[0]


# ---------------------------------------------------------------- batches


def test_views_and_epochs_are_what_the_backbone_makes_of_them():
    images = batches(image_set(13), train=True, augment=True, noise=0.1)  # a last batch of one row is left out
    made = features().batches("train", images, views=2, epochs=3)
    assert made.views.shape == (5, 13, 3)
    assert (made.train, made.batch_size, made.seed, made.device) == (True, 3, 11, CPU)
    assert made.data is images.data
    for view in range(2):
        wanted = torch.cat([sums(batch) for batch in images.seen_as(view).epoch()])
        assert torch.equal(made.views[view], wanted)
    for epoch in range(3):
        seen = torch.zeros(13, dtype=torch.bool)
        for batch in images.epoch(epoch):
            assert torch.equal(made.views[2 + epoch, batch.index], sums(batch))
            seen[batch.index] = True
        assert seen.sum() == 12
        assert torch.equal(made.views[2 + epoch, ~seen], made.views[0, ~seen])  # the row that the epoch leaves out, as it is


def test_features_need_no_gradient():
    weight = torch.ones(3, requires_grad=True)
    made = features(embed=lambda batch: sums(batch) * weight).batches("train", batches(image_set(7)))
    assert not made.views.requires_grad


# ---------------------------------------------------------------- on disk


def test_features_are_computed_once(tmp_path, capsys):
    images = batches(image_set(7), train=True, augment=True)
    first = features(tmp_path).batches("train", images, epochs=1)
    lines = [f"features: 7 rows of {name} through the backbone" for name in ("train", "train-augmented-0")]
    assert capsys.readouterr().err.splitlines() == lines
    keys = [features().key(images.plain(), 0), features().key(images, 0)]
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted([f"train-{keys[0]}", f"train-augmented-0-{keys[1]}"])

    def never(batch: Batch) -> Tensor:
        raise AssertionError("the cache has it")

    again = features(tmp_path, never).batches("train", images, epochs=1)
    assert torch.equal(again.views, first.views)
    assert capsys.readouterr().err == ""
    features(tmp_path).batches("test", batches(image_set(7)), views=3)
    assert {f.name.rpartition("-")[0] for f in tmp_path.iterdir()} >= {"test", "test-view-1", "test-view-2"}


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features(None).batches("train", batches(image_set(7)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["checkpoint.json", "features-*"])
def test_damaged_features_are_computed_anew(name, tmp_path, capsys):
    images = batches(image_set(7))
    first = features(tmp_path).batches("val", images)
    file = next(tmp_path.glob(f"*/{name}"))
    file.write_bytes(file.read_bytes()[:-5])
    again = features(tmp_path).batches("val", images)
    assert torch.equal(again.views, first.views)
    assert "features: computed anew; the cache is damaged (is damaged: " in capsys.readouterr().err
    features(tmp_path).batches("val", images)
    assert capsys.readouterr().err == ""  # the damage is mended


def test_of_two_that_need_the_same_one_computes(tmp_path):
    images = batches(image_set(7))
    inside, asked = threading.Event(), []

    def slow(batch: Batch) -> Tensor:
        asked.append(len(batch))
        inside.set()
        assert other_waits.wait(60)  # until the other one stands before the lock
        return sums(batch)

    other_waits = threading.Event()
    found: list[Tensor] = []
    first = threading.Thread(target=lambda: found.append(features(tmp_path, embed=slow).batches("train", images).views))
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=lambda: found.append(features(tmp_path, embed=slow).batches("train", images).views))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    other_waits.set()
    first.join(60)
    second.join(60)
    assert len(asked) == len(list(images.epoch()))
    assert torch.equal(found[0], found[1])
    assert not list(tmp_path.glob("*.lock"))
