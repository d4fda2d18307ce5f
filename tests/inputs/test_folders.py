"""Folders of image files as data sets."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dataset import load
from tests.inputs.files import photo
from utils import BadOption


def test_a_flat_folder_gives_a_fifth_for_the_test(tmp_path):
    for label, suffix in (("cat", "png"), ("dog", "JPEG")):
        for number in range(10):
            photo(tmp_path / label / f"{number}.{suffix}")
    photo(tmp_path / "dog" / "deeper" / "10.bmp")
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "empty").mkdir()
    photo(tmp_path / "lost.png")
    data = load(f"folder:{tmp_path}", val_fraction=0.25, keep_duplicates=True)
    assert (data.kind, data.shape, data.classes) == ("files", (3, 224, 224), ("cat", "dog"))
    assert data.val is not None
    assert [np.bincount(s.y).tolist() for s in (data.train, data.val, data.test)] == [[6, 7], [2, 2], [2, 2]]
    paths = [p for s in (data.train, data.val, data.test) for p in s.x.tolist()]
    assert len(set(paths)) == 21
    for split in (data.train, data.val, data.test):
        assert [Path(p).relative_to(tmp_path).parts[0] for p in split.x] == [data.classes[c] for c in split.y]


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (("train", "val", "test"), (5, 3, 4)),
        (("train", "test"), (3, 2, 4)),  # validation comes out of the training set
        (("train", "val"), (3, 2, 3)),  # as in ImageNet: val is what is tested
    ],
)
def test_a_folder_with_parts(parts, sizes, tmp_path):
    for part in parts:
        for number in range({"train": 5, "val": 3, "test": 4}[part]):
            photo(tmp_path / part / "ab"[number % 2] / f"{number}.png")
    data = load(f"folder:{tmp_path}", val_fraction=0.4, keep_duplicates=True)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == sizes
    assert data.classes == ("a", "b")
    held = "test" if "test" in parts else "val"
    assert all(Path(p).relative_to(tmp_path).parts[0] == held for p in data.test.x)
    assert all(Path(p).relative_to(tmp_path).parts[0] == "train" for p in data.train.x)


def test_imagenet_is_read_from_data_path(tmp_path):
    for number in range(6):
        photo(tmp_path / "train" / f"n0{number % 3}" / f"{number}.JPEG")
        photo(tmp_path / "val" / f"n0{number % 3}" / f"{number}.JPEG")
    data = load("imagenet", str(tmp_path), val_fraction=0)
    assert (data.classes, len(data.train), len(data.test)) == (("n00", "n01", "n02"), 6, 6)


def test_wrong_folders(tmp_path):
    for name in (f"folder:{tmp_path}", f"folder:{tmp_path / 'none'}"):
        with pytest.raises(BadOption, match=r"^dataset must hold CLASS/\*\{.jpg.*\} or train/CLASS/ and val/CLASS/, got "):
            load(name)
    with pytest.raises(BadOption, match=r"^data_path must hold CLASS/"):
        load("imagenet", str(tmp_path))
    photo(tmp_path / "train" / "cat" / "1.png")
    photo(tmp_path / "train" / "dog" / "1.png")
    (tmp_path / "val").mkdir()
    with pytest.raises(BadOption, match=r"^dataset must hold CLASS/.*, got '.*val'"):
        load(f"folder:{tmp_path}")
    photo(tmp_path / "val" / "cat" / "1.png")
    photo(tmp_path / "val" / "emu" / "1.png")
    with pytest.raises(BadOption, match=r"^dataset has classes that its train folder lacks: emu, got '.*val'"):
        load(f"folder:{tmp_path}")


def test_a_folder_of_one_class(tmp_path):
    for number in range(3):
        photo(tmp_path / "cat" / f"{number}.png")
    with pytest.raises(BadOption, match=r"^dataset needs at least two classes \(1 found\)"):
        load(f"folder:{tmp_path}")


def test_broken_files_are_counted_before_training_or_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("inputs.images.WAITING", 4)  # not all at one time
    for n in range(20):
        photo(tmp_path / "ab"[n % 2] / f"{n}.png", n)
    (tmp_path / "a" / "0.png").write_bytes(b"")
    (tmp_path / "b" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    os.mkfifo(tmp_path / "b" / "pipe.png")
    with pytest.raises(BadOption, match=r"^dataset has 3 of 21 images that can't be read, .*--skip_broken leaves them out"):
        load(f"folder:{tmp_path}", val_fraction=0)
    data = load(f"folder:{tmp_path}", val_fraction=0, skip_broken=True)
    assert len(data.train) + len(data.test) == 18
    assert not {"0.png", "1.png", "pipe.png"} & {Path(path).name for part in (data.train, data.test) for path in part.x}
    assert "3 of 21 images that can't be read" in capsys.readouterr().err


def test_names_that_are_not_utf8_are_refused(tmp_path):
    photo(tmp_path / "a" / "1.png")
    os.rename(tmp_path / "a" / "1.png", os.fsencode(tmp_path / "a") + b"/\xff.png")
    with pytest.raises(BadOption, match=r"^dataset has a file whose name is not UTF-8"):
        load(f"folder:{tmp_path}")
