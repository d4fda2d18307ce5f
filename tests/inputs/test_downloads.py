"""Published data sets from their own files, and what is said when they are not there."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets as tv

from dataset import load
from inputs.downloads import read_adult, read_wine_quality
from tests.inputs.files import pixels
from utils import BadOption

# ---------------------------------------------------------------- torchvision's sets, in their very format on disk


def write_idx(file: Path, array: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)  # 8: unsigned bytes
    file.write_bytes(header + array.tobytes())


def write_mnist(root: Path, folder: str) -> dict[str, np.ndarray]:
    arrays = {}
    for part, rows in (("train", 31), ("t10k", 13)):
        arrays[part] = pixels(rows, 28, 28, seed=rows)
        write_idx(root / folder / "raw" / f"{part}-images-idx3-ubyte", arrays[part])
        write_idx(root / folder / "raw" / f"{part}-labels-idx1-ubyte", (np.arange(rows) * 7 % 10).astype(np.uint8))
    return arrays


@pytest.mark.parametrize(("name", "folder", "flip"), [("mnist", "MNIST", False), ("fashion-mnist", "FashionMNIST", True)])
def test_mnist_from_its_files(name, folder, flip, tmp_path):
    arrays = write_mnist(tmp_path, folder)
    data = load(name, str(tmp_path), val_fraction=0)
    assert (data.shape, data.num_classes, data.flip) == ((1, 28, 28), 10, flip)
    assert np.array_equal(data.train.x[:, 0], arrays["train"])
    assert np.array_equal(data.test.x[:, 0], arrays["t10k"])
    assert data.train.y.tolist() == [n * 7 % 10 for n in range(31)]


@pytest.mark.parametrize("length", [0, 2, 10, 100, 24_319])  # in the header, after it, one byte short
def test_mnist_cut_short_names_its_files(length, tmp_path):
    write_mnist(tmp_path, "MNIST")
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = file.read_bytes()
    assert len(content) == 24_320
    file.write_bytes(content[:length])
    with pytest.raises(BadOption, match=r"^data_path must hold MNIST/raw/train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k"):
        load("mnist", str(tmp_path))


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, files: dict[str, int], label: str, classes: int) -> dict[str, Any]:
    """Rows of 3,072 bytes, red then green then blue, and labels in a pickled dict, as the authors publish them."""
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    written = {}
    for name, rows in files.items():
        written[name] = {"data": pixels(rows, 3072, seed=rows), label: [n * 3 % classes for n in range(rows)]}
        (folder / name).write_bytes(pickle.dumps(written[name]))
    names = {kind.meta["key"]: [f"class {n}" for n in range(classes)]}
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps(names))
    # torchvision compares files with the MD5 sums of the published ones, which these are not; without sums it only looks
    # whether they exist.
    monkeypatch.setattr(kind, "train_list", [[name, None] for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [[name, None] for name, _ in kind.test_list])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    return written


def test_cifar10_from_its_files(tmp_path, monkeypatch):
    files = {**{f"data_batch_{n}": 6 + n for n in range(1, 6)}, "test_batch": 13}
    written = write_cifar(tmp_path, monkeypatch, tv.CIFAR10, files, "labels", 10)
    data = load("cifar10", str(tmp_path), val_fraction=0)
    assert (data.shape, data.classes[3], len(data.train), data.flip) == ((3, 32, 32), "class 3", 7 + 8 + 9 + 10 + 11, True)
    assert np.array_equal(data.train.x[7:15].reshape(8, 3072), written["data_batch_2"]["data"])
    assert data.train.y[7:15].tolist() == written["data_batch_2"]["labels"]
    assert np.array_equal(data.test.x.reshape(13, 3072), written["test_batch"]["data"])


def test_cifar100_from_its_files(tmp_path, monkeypatch):
    written = write_cifar(tmp_path, monkeypatch, tv.CIFAR100, {"train": 31, "test": 13}, "fine_labels", 100)
    data = load("cifar100", str(tmp_path), val_fraction=0)
    assert (data.shape, data.num_classes, len(data.train)) == ((3, 32, 32), 100, 31)
    assert data.test.y.tolist() == written["test"]["fine_labels"]
    assert np.array_equal(data.test.x.reshape(13, 3072), written["test"]["data"])


def test_cifar10_asymmetric_noise_follows_the_published_pairs(tmp_path, monkeypatch):
    files = {**{f"data_batch_{n}": 10 for n in range(1, 6)}, "test_batch": 13}
    write_cifar(tmp_path, monkeypatch, tv.CIFAR10, files, "labels", 10)
    clean = load("cifar10", str(tmp_path), val_fraction=0).train.y
    noisy = load("cifar10", str(tmp_path), val_fraction=0, label_noise="1:asymmetric").train.y
    # truck to car, bird to airplane, deer to horse, cat and dog to each other; the other classes stay
    assert noisy.tolist() == [[0, 1, 0, 5, 7, 3, 6, 7, 8, 1][c] for c in clean]


# ---------------------------------------------------------------- UCI files

ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, United-States, {}\n"
    "50, ?, 83311, HS-grad, 9, Divorced, ?, Husband, Black, Female, 0, 1887, 13, ?, {}\n"
)


@pytest.mark.parametrize("folder", [".", "adult"])
def test_adult(folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "adult.data").write_text(ADULT.format("<=50K", ">50K") * 2 + "\n")
    (tmp_path / folder / "adult.test").write_text("|1x3 Cross validator\n" + ADULT.format(">50K.", "<=50K.") + "\n")
    read = read_adult(tmp_path)
    assert len(read) == 4
    train, y_train, test, y_test = read
    assert train.numbers.tolist() == [[39, 77516, 13, 2174, 0, 40], [50, 83311, 9, 0, 1887, 13]] * 2
    assert train.categories[1].tolist() == ["", "HS-grad", "Divorced", "", "Husband", "Black", "Female", ""]
    assert y_train.tolist() == ["<=50K", ">50K"] * 2
    assert y_test.tolist() == [">50K", "<=50K"]
    assert test.numbers.tolist() == train.numbers[:2].tolist()

    data = load("adult", str(tmp_path), val_fraction=0)
    assert (data.shape, data.classes, len(data.train), len(data.test)) == ((6 + 8 * 2,), ("<=50K", ">50K"), 4, 2)
    assert data.test.y.tolist() == [1, 0]


def test_an_adult_file_cut_short_is_named(tmp_path):
    (tmp_path / "adult.data").write_text(ADULT.format("<=50K", ">50K")[:-40])
    (tmp_path / "adult.test").write_text(ADULT.format("<=50K.", ">50K."))
    with pytest.raises(BadOption, match=r"^data_path must hold the UCI file adult.data with 15 columns, got '.*adult.data'"):
        load("adult", str(tmp_path))
    (tmp_path / "adult.data").write_text("")
    with pytest.raises(BadOption, match=r"^dataset must leave at least 2 training rows"):
        load("adult", str(tmp_path))


MEASURES = [
    "fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides", "free sulfur dioxide",
    "total sulfur dioxide", "density", "pH", "sulphates", "alcohol", "quality",
]  # fmt: skip


@pytest.mark.parametrize("folder", [".", "wine-quality"])
def test_wine_quality(folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    for color, rows, base in (("red", 3, 0.0), ("white", 5, 100.0)):
        lines = [";".join(f'"{m}"' for m in MEASURES)]
        lines += [";".join(str(base + row + column / 16) for column in range(11)) + f";{3 + row}" for row in range(rows)]
        (tmp_path / folder / f"winequality-{color}.csv").write_text("\n".join(lines) + "\n")
    rows_, labels = read_wine_quality(tmp_path)
    assert rows_.categories[:, 0].tolist() == ["red"] * 3 + ["white"] * 5
    assert rows_.numbers[4].tolist() == [101 + column / 16 for column in range(11)]
    assert labels.tolist() == ["3", "4", "5", "3", "4", "5", "6", "7"]


# ---------------------------------------------------------------- neither files nor a network


def test_what_is_not_there_names_the_files_and_leaves_nothing_behind(tmp_path):
    """No network here, so the download fails; torchvision and scikit-learn make folders before they find that out."""
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    for name, files in (
        ("cifar10", "cifar-10-batches-py/data_batch_1 to 5, test_batch and batches.meta"),
        ("fashion-mnist", "FashionMNIST/raw/train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-"),
        ("adult", "adult.data and adult.test"),
    ):
        for root in (tmp_path / "mine", tmp_path / "new" / "data"):
            with pytest.raises(BadOption) as caught:
                load(name, str(root))
            assert str(caught.value).startswith(f"data_path must hold {files}")
            assert str(root) in str(caught.value)
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == ["mine", "mine/empty"]
