"""Every kind of data set, made on the fly, and every way in which one can be wrong."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets as tv
from PIL import Image

import dataset
from dataset import DATASETS, Source, load, long_tail, noisy_labels, stratified
from utils import BadOption


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def npz(folder: Path, **arrays: Any) -> str:
    file = folder / "set.npz"
    np.savez(file, **arrays)
    return f"npz:{file}"


def numbered(folder: Path, rows: int = 61, classes: int = 3) -> str:
    """Rows that carry their own number, so that a split can be read off them; the test rows are 1000, 1001, ..."""
    x = np.arange(rows, dtype=np.float64)[:, None].repeat(2, 1)
    x_test = 1000.0 + np.arange(7)[:, None].repeat(2, 1)
    return npz(folder, x_train=x, y_train=np.arange(rows) % classes, x_test=x_test, y_test=np.arange(7) % classes)


AS_THEY_ARE = {"mean": [0.0, 0.0], "std": [1.0, 1.0], "levels": []}


def rows_of(split: Any) -> list[int]:
    return split.x[:, 0].astype(int).tolist()


# ---------------------------------------------------------------- sets that ship with scikit-learn, and made-up ones


def test_digits():
    data = load("digits")
    assert (data.kind, data.shape, data.num_classes, data.flip) == ("image", (1, 8, 8), 10, False)
    assert data.train.x.dtype == np.uint8
    assert (data.train.x.min(), data.train.x.max()) == (0, 255)  # 16 levels of gray over the whole range
    assert data.val is not None
    assert len(data.train) + len(data.val) + len(data.test) == 1797
    assert data.facts == {
        "train": len(data.train),
        "val": len(data.val),
        "test": len(data.test),
        "class_counts": np.bincount(data.train.y).tolist(),
        "label_noise_rate": 0.0,
        "sha256": load("digits").facts["sha256"],
    }
    others = [load("digits", seed=1), load("digits", label_noise="0.1"), load("digits", imbalance=0.5), load("digits", val_fraction=0.2)]
    assert len({d.facts["sha256"] for d in [data, *others]}) == 5  # of rows, labels and their split


@pytest.mark.parametrize(("name", "rows", "features"), [("iris", 150, 4), ("wine", 178, 13)])
def test_tables_that_ship_with_scikit_learn(name, rows, features):
    data = load(name)
    assert (data.kind, data.shape, data.num_classes) == ("table", (features,), 3)
    assert data.val is not None
    assert len(data.train) + len(data.val) + len(data.test) == rows
    assert data.train.x.dtype == np.float32
    np.testing.assert_allclose(data.train.x.mean(0, dtype=np.float64), 0, atol=1e-6)
    np.testing.assert_allclose(data.train.x.std(0, dtype=np.float64), 1, atol=1e-6)
    assert np.abs(data.test.x.mean(0)).max() > 0.01  # standardized with the training split's numbers, not with its own


def test_fake():
    data = load("fake(train=41, test=11, size=7, channels=2, classes=3)", val_fraction=0)
    assert (data.shape, data.num_classes, len(data.train), len(data.test)) == ((2, 7, 7), 3, 41, 11)
    assert data.val is None
    assert np.array_equal(data.train.x, load("fake(train=41, test=11, size=7, channels=2, classes=3)", seed=5, val_fraction=0).train.x)
    assert load("fake").shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("fake(train=0)", "dataset takes whole numbers of at least 1 in fake(train=...), got 0"),
        ("fake(size='big')", "size must be a whole number, got 'big'"),
        ("fake(size=2.5)", "size must be a whole number, got 2.5"),
        ("fake(train=True)", "train must be a whole number, got True"),
        ("fake(classes=1)", "dataset needs at least two classes (1 found)"),
        ("fake(train=1)", "dataset must leave at least 2 training rows after the splits (1 left)"),
        ("fake(sizes=3)", "fake has no option 'sizes' (did you mean 'size'?); it has train, test, size, channels, classes"),
        ("fake(3)", "dataset must read Name(option=value"),
        ("digit", "dataset must be one of digits, "),
        ("cifar", "dataset must be one of digits, "),
        ("npz:", "dataset must read npz:FILE, got 'npz:'"),
        ("folder:", "dataset must read folder:PATH, got 'folder:'"),
        ("csv:", "dataset must read csv:FILE:TARGET, got 'csv:'"),
        ("csv:file.csv", "dataset must read csv:FILE:TARGET, got 'csv:file.csv'"),
        ("", "dataset must be one of digits, "),
    ],
)
def test_wrong_names(name, rule):
    with pytest.raises(BadOption) as caught:
        load(name)
    assert str(caught.value).startswith(rule)


def test_an_unknown_name_gets_the_nearest_and_the_list():
    with pytest.raises(BadOption, match=r"npz:FILE, csv:FILE:TARGET \(did you mean 'fashion-mnist'\?\), got 'fashionmnist'$"):
        load("fashionmnist")


@pytest.fixture
def register(monkeypatch):
    def add(source: Source) -> str:
        monkeypatch.setitem(DATASETS._parts, "own", lambda root: source)
        return "own"

    return add


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        ([0, 1, 2, 0, 1, 3], r"^dataset needs labels from 0 to 2 \(0 to 3 found\), got 'own'"),
        ([0, 1, 2, 0, 1, -1], r"^dataset needs labels from 0 to 2 \(-1 to 2 found\), got 'own'"),
        ([0, 1, 2, 0, 1], r"^dataset needs one label a row \(train: 6 rows, labels \(5,\)\), got 'own'"),
        ([[0], [1], [2], [0], [1], [2]], r"^dataset needs one label a row \(train: 6 rows, labels \(6, 1\)\)"),
    ],
)
def test_labels_must_fit_rows_and_classes(labels, rule, register):
    with pytest.raises(BadOption, match=rule):
        load(register(Source(pixels(6, 4, 4), np.array(labels), pixels(3, 4, 4), np.arange(3), classes=("a", "b", "c"))))


# ---------------------------------------------------------------- npz


def test_npz_gray_images(tmp_path):
    x, x_test = pixels(31, 5, 7), pixels(11, 5, 7, seed=1)
    name = npz(tmp_path, x_train=x, y_train=np.arange(31) % 2, x_test=x_test, y_test=np.arange(11) % 2)
    data = load(name, val_fraction=0)
    assert (data.kind, data.shape, data.classes) == ("image", (1, 5, 7), ("0", "1"))
    assert np.array_equal(data.train.x[:, 0], x)
    assert np.array_equal(data.test.x[:, 0], x_test)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_npz_images_with_channels(channels, tmp_path):
    x = pixels(31, 5, 7, channels)
    data = load(npz(tmp_path, x_train=x, y_train=np.arange(31) % 2, x_test=x[:11], y_test=np.arange(11) % 2), val_fraction=0)
    assert data.shape == (channels, 5, 7)
    for channel in range(channels):
        assert np.array_equal(data.train.x[:, channel], x[..., channel])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_npz_float_rows(kind, tmp_path):
    x = np.array([[1, 10], [3, 10], [5, 10], [7, 10]], kind)  # mean 4, variance 5; the second column is constant
    data = load(npz(tmp_path, x_train=x, y_train=[0, 1, 0, 1], x_test=x[:1] + 2, y_test=[0]), val_fraction=0)
    assert (data.kind, data.shape) == ("table", (2,))
    np.testing.assert_allclose(data.train.x[:, 0], np.array([-3, -1, 1, 3]) / 5**0.5, rtol=1e-6)
    assert data.train.x[:, 1].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(data.test.x, [[-1 / 5**0.5, 2]], rtol=1e-6)


def test_npz_labels_of_any_kind_become_class_numbers(tmp_path):
    x = pixels(6, 3, 3)
    for labels, classes, numbers in (
        ([7, -3, 7, 11, -3, 7], ("-3", "7", "11"), [1, 0, 1, 2, 0, 1]),
        (["dog", "cat", "dog", "emu", "cat", "dog"], ("cat", "dog", "emu"), [1, 0, 1, 2, 0, 1]),
        ([True, False, True, True, False, True], ("False", "True"), [1, 0, 1, 1, 0, 1]),
    ):
        data = load(npz(tmp_path, x_train=x, y_train=np.array(labels), x_test=x, y_test=np.array(labels)), val_fraction=0)
        assert data.classes == classes
        assert data.train.y.tolist() == data.test.y.tolist() == numbers
        assert data.train.y.dtype == np.int64


def test_npz_with_its_own_validation_set(tmp_path):
    x, y = pixels(31, 4, 4), np.arange(31) % 3
    data = load(npz(tmp_path, x_train=x, y_train=y, x_test=x[:5], y_test=y[:5], x_val=x[5:12], y_val=y[5:12]), val_fraction=0.5)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == (31, 7, 5)  # nothing comes out of the training set
    assert np.array_equal(data.val.x[:, 0], x[5:12])
    assert data.val.y.tolist() == y[5:12].tolist()


X, Y = pixels(13, 4, 4), np.arange(13) % 2
GOOD: dict[str, Any] = dict(x_train=X, y_train=Y, x_test=X, y_test=Y)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(y_train=Y[:-1]), r"needs one label a row: x_train \(13, 4, 4\), y_train \(12,\)"),
        (dict(y_test=Y[:-1]), r"needs one label a row: x_test \(13, 4, 4\), y_test \(12,\)"),
        (dict(y_train=Y[:, None]), r"needs one label a row: x_train \(13, 4, 4\), y_train \(13, 1\)"),
        (dict(x_val=X), r"needs one label a row: x_val \(13, 4, 4\), y_val None"),
        (dict(x_val=X[:, :3], y_val=Y), r"needs rows of one shape, got 'x_train \(13, 4, 4\), x_test \(13, 4, 4\), x_val \(13, 3, 4\)'"),
        (dict(x_test=pixels(13, 4, 5)), "needs rows of one shape"),
        (dict(x_train=None), "needs x_train in the npz"),
        (dict(y_train=None, x_test=None), "needs y_train, x_test in the npz"),
        (dict(x_train=X / 255), r"needs uint8 images \(N, H, W\[, C\]\) or float rows \(N, F\), x_train is float64 \(13, 4, 4\)"),
        (dict(x_train=X.astype(np.int64)), "needs uint8 images .* x_train is int64"),
        (dict(x_test=X[:, 0]), r"needs uint8 images .* x_test is uint8 \(13, 4\)"),
        (dict(x_train=pixels(13, 3, 4, 5)), r"needs uint8 images .* x_train is uint8 \(13, 3, 4, 5\)"),  # channels first
        (dict(y_train=Y + 0.5), "needs whole numbers or text as labels, y_train is float64"),
        (dict(y_train=np.array([None] * 13, object)), "must hold plain arrays, no object arrays"),
        (dict(x_train=np.array([X[0]] * 13, object)), "must hold plain arrays, no object arrays"),
        (dict(x_train=X[:0], y_train=Y[:0]), r"must leave at least 2 training rows after the splits \(0 left\)"),
        (dict(x_test=X[:0], y_test=Y[:0]), r"must leave at least 1 test row after the splits \(0 left\)"),
        (dict(y_train=Y * 0, y_test=Y * 0), r"needs at least two classes \(1 found\)"),
    ],
)
def test_a_wrong_npz(change, rule, tmp_path):
    name = npz(tmp_path, **{k: v for k, v in {**GOOD, **change}.items() if v is not None})
    with pytest.raises(BadOption, match=f"^dataset {rule}"):
        load(name)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["x_train", "x_test"])
def test_an_npz_row_that_is_not_finite(bad, part, tmp_path):
    rows = {"x_train": np.zeros((13, 3)), "x_test": np.zeros((13, 3))}
    rows[part][11, 2] = bad
    with pytest.raises(BadOption, match=f"^dataset needs finite numbers, {part} has NaN or infinity"):
        load(npz(tmp_path, y_train=Y, y_test=Y, **rows))


def test_an_npz_that_is_none(tmp_path):
    file = tmp_path / "set.npz"
    with pytest.raises(BadOption, match=r"^dataset must be a file that can be read \(No such file or directory\), got '.*set.npz'"):
        load(f"npz:{file}")
    with pytest.raises(BadOption, match=r"^dataset must be a file that can be read"):
        load(f"npz:{tmp_path}")
    for content in (b"", b"hello", pickle.dumps([1, 2]), b"PK\x03\x04" + bytes(99)):
        file.write_bytes(content)
        with pytest.raises(BadOption, match=r"^dataset must be an (undamaged )?npz file"):
            load(f"npz:{file}")
    np.save(tmp_path / "one.npy", X)
    with pytest.raises(BadOption, match=r"^dataset must be an undamaged npz file"):
        load(f"npz:{tmp_path / 'one.npy'}")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "no arrays here")
    with pytest.raises(BadOption, match=r"^dataset needs x_train, y_train, x_test, y_test in the npz"):
        load(f"npz:{file}")


def test_an_npz_cut_short_anywhere(tmp_path):
    name = npz(tmp_path, **GOOD)
    file = tmp_path / "set.npz"
    content = file.read_bytes()
    for length in range(0, len(content), 53):
        file.write_bytes(content[:length])
        with pytest.raises(BadOption, match=r"^dataset must be "):
            load(name)


# ---------------------------------------------------------------- folders of images


def photo(file: Path, color: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (11, 13), (color, color, color)).save(file)


def test_a_flat_folder_gives_a_fifth_for_the_test(tmp_path):
    for label, suffix in (("cat", "png"), ("dog", "JPEG")):
        for number in range(10):
            photo(tmp_path / label / f"{number}.{suffix}")
    photo(tmp_path / "dog" / "deeper" / "10.bmp")
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "empty").mkdir()
    photo(tmp_path / "lost.png")
    data = load(f"folder:{tmp_path}", val_fraction=0.25)
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
    data = load(f"folder:{tmp_path}", val_fraction=0.4)
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


# ---------------------------------------------------------------- splits


def test_stratified_takes_its_share_of_every_class():
    y = np.repeat([0, 1, 2, 5], [100, 31, 7, 1])
    rows = stratified(y, 0.2, 0)
    assert np.bincount(y[rows]).tolist() == [20, 6, 1]  # 6.2 and 1.4 rounded; the only row of class 5 stays outside
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert np.array_equal(rows, stratified(y, 0.2, 0))
    assert not np.array_equal(rows, stratified(y, 0.2, 1))
    assert np.bincount(y[stratified(y, 0.99, 0)], minlength=6).tolist() == [99, 30, 6, 0, 0, 0]  # one of each class stays, always
    assert stratified(y, 0.0, 0).tolist() == []
    assert stratified(y[:0], 0.5, 0).tolist() == []


def test_splits_are_disjoint_and_follow_from_the_seed(tmp_path):
    name = numbered(tmp_path)
    splits = []
    for seed in (0, 0, 1):
        data = load(name, val_fraction=0.3, seed=seed, fitted=AS_THEY_ARE)
        assert data.val is not None
        train, val = rows_of(data.train), rows_of(data.val)
        assert sorted(train + val) == list(range(61))
        assert data.train.y.tolist() == [row % 3 for row in train]
        assert data.val.y.tolist() == [row % 3 for row in val]
        assert np.bincount(data.val.y).tolist() == [6, 6, 6]  # of 21, 20 and 20
        assert rows_of(data.test) == list(range(1000, 1007))  # whatever the seed
        assert data.test.y.tolist() == [0, 1, 2, 0, 1, 2, 0]
        splits.append(val)
    assert splits[0] == splits[1] != splits[2]


def test_a_set_without_a_test_part_keeps_the_same_test_rows_for_every_seed():
    first, second = (load("iris", seed=seed, fitted={"mean": [0.0] * 4, "std": [1.0] * 4, "levels": []}) for seed in (0, 1))
    assert np.array_equal(first.test.x, second.test.x)
    assert not np.array_equal(first.train.x, second.train.x)
    assert np.bincount(first.test.y).tolist() == [10, 10, 10]


def test_statistics_come_from_the_training_split_alone(tmp_path):
    x = np.zeros((4, 1, 2, 3), np.uint8)
    x[:, 0, 0] = [51, 102, 0]
    x[:, 0, 1] = [153, 102, 255]
    x_test = np.full((3, 1, 2, 3), 255, np.uint8)
    data = load(npz(tmp_path, x_train=x, y_train=[0, 1, 0, 1], x_test=x_test, y_test=[0, 1, 0]), val_fraction=0)
    np.testing.assert_allclose(data.fitted["mean"], [0.4, 0.4, 0.5], rtol=1e-12)
    np.testing.assert_allclose(data.fitted["std"], [0.2, 1, 0.5], rtol=1e-12)  # a constant channel is left alone

    x = pixels(61, 5, 7, 2)
    data = load(npz(tmp_path, x_train=x, y_train=np.arange(61) % 2, x_test=x, y_test=np.arange(61) % 2), val_fraction=0.5)
    assert len(data.train) == 30
    np.testing.assert_allclose(data.fitted["mean"], data.train.x.mean((0, 2, 3)) / 255, rtol=1e-12)
    np.testing.assert_allclose(data.fitted["std"], data.train.x.std((0, 2, 3)) / 255, rtol=1e-12)


def test_statistics_of_an_earlier_run_are_used_as_they_are(tmp_path):
    data = load(numbered(tmp_path), fitted={"mean": [10.0, 20.0], "std": [2.0, 4.0], "levels": []}, val_fraction=0)
    assert data.train.x[30].tolist() == [10.0, 2.5]
    assert data.fitted["mean"] == [10.0, 20.0]


# ---------------------------------------------------------------- long tail


def test_long_tail_by_hand():
    y = np.repeat([0, 1, 2, 3], [100, 120, 110, 100])
    rows = long_tail(y, 0.027, 4, seed=0)
    assert np.bincount(y[rows]).tolist() == [100, 30, 9, 3]  # 100 times 1, 0.3, 0.09, 0.027
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert np.bincount(y[long_tail(y, 1e-9, 4, seed=0)]).tolist() == [100, 1, 1, 1]
    assert not np.array_equal(rows, long_tail(y, 0.027, 4, seed=1))


def test_the_long_tail_is_of_the_training_split_only(tmp_path):
    name = numbered(tmp_path, rows=90)
    whole, tailed = load(name, val_fraction=0.1, fitted=AS_THEY_ARE), load(name, val_fraction=0.1, imbalance=1 / 9, fitted=AS_THEY_ARE)
    assert whole.val is not None
    assert tailed.val is not None
    assert tailed.facts["class_counts"] == [27, 9, 3]
    assert set(rows_of(tailed.train)) < set(rows_of(whole.train))
    assert rows_of(tailed.val) == rows_of(whole.val)
    assert rows_of(tailed.test) == rows_of(whole.test)
    assert tailed.train.y.tolist() == [row % 3 for row in rows_of(tailed.train)]


# ---------------------------------------------------------------- label noise


@pytest.mark.parametrize(("spec", "rate"), [("0.2", 0.2), ("0.2:symmetric", 0.2), ("0.37:asymmetric", 0.37), ("1", 1), ("0", 0)])
def test_noise_has_its_rate_exactly(spec, rate):
    y = np.arange(1000) % 7
    noisy = noisy_labels(spec, y, np.arange(1000), 1000, tuple("abcdefg"), None, seed=0)
    assert (noisy != y).sum() == round(1000 * rate)
    assert set(noisy.tolist()) <= set(range(7))
    assert np.array_equal(y, np.arange(1000) % 7)  # the clean labels are left alone
    assert np.array_equal(noisy, noisy_labels(spec, y, np.arange(1000), 1000, tuple("abcdefg"), None, seed=0))
    changes = (noisy - y)[noisy != y] % 7
    if "asymmetric" in spec:
        assert set(changes.tolist()) == {1}  # always the next class
    elif rate:
        assert set(changes.tolist()) == {1, 2, 3, 4, 5, 6}  # any other class
        assert np.bincount(changes).max() < 2 * np.bincount(changes)[1:].min()
        other = noisy_labels(spec, y, np.arange(1000), 1000, tuple("abcdefg"), None, seed=1)
        assert not np.array_equal(noisy, other)


def test_noise_is_of_the_training_split_only(tmp_path):
    name = numbered(tmp_path, rows=101)
    data = load(name, val_fraction=0.3, label_noise="0.5", fitted=AS_THEY_ARE)
    assert data.val is not None
    clean = np.array(rows_of(data.train)) % 3
    assert (data.train.y != clean).sum() == round(0.5 * len(clean))
    assert data.facts["label_noise_rate"] == (data.train.y != clean).mean()
    assert data.facts["class_counts"] == np.bincount(data.train.y).tolist()
    assert data.val.y.tolist() == [row % 3 for row in rows_of(data.val)]
    assert data.test.y.tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("imbalance", [1.0, 0.25])
def test_noise_from_a_file_stays_with_its_rows(imbalance, tmp_path):
    """Row r of the file belongs to row r of the training set before anything was taken out of it."""
    name = numbered(tmp_path, rows=97)
    label_of = np.random.default_rng(0).integers(0, 3, 97)
    np.savez(tmp_path / "noise.npz", clean=np.arange(97) % 3, worst=label_of.astype(np.uint8))
    spec = f"{tmp_path}/noise.npz:worst"
    data = load(name, val_fraction=0.3, label_noise=spec, imbalance=imbalance, seed=3, fitted=AS_THEY_ARE)
    assert data.val is not None
    assert data.train.y.tolist() == label_of[rows_of(data.train)].tolist()
    assert data.val.y.tolist() == [row % 3 for row in rows_of(data.val)]
    clean = np.array(rows_of(data.train)) % 3
    assert data.facts["label_noise_rate"] == (data.train.y != clean).mean() > 0.4


@pytest.mark.parametrize(
    "spec",
    ["2", "-0.1", "nan", "much", "0.2:some", "0.2:", ":symmetric", "0.2:symmetric:asymmetric", "symmetric"],
)
def test_wrong_noise(spec, tmp_path):
    with pytest.raises(BadOption, match=r"^label_noise must read RATE\[:symmetric\|asymmetric\] with a rate in \[0, 1\], or FILE.npz:KEY"):
        load(numbered(tmp_path), label_noise=spec)


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        (np.zeros(60, int), r"needs one class number \(0 to 2\) a training row \(61\), the file has int64 \(60,\)"),
        (np.full(61, 3), "needs one class number"),
        (np.full(61, -1), "needs one class number"),
        (np.zeros(61), "needs one class number .* the file has float64"),
        (np.array([None] * 61, object), r"must be FILE.npz:KEY that can be read \(ValueError\)"),
    ],
)
def test_a_wrong_noise_file(labels, rule, tmp_path):
    np.savez(tmp_path / "noise.npz", worst=labels)
    with pytest.raises(BadOption, match=f"^label_noise {rule}"):
        load(numbered(tmp_path), label_noise=f"{tmp_path}/noise.npz:worst")


@pytest.mark.parametrize("spec", ["noise.npz:worst", "noise.npz", "none.npz:worst", "broken.npz:worst"])
def test_a_noise_file_without_the_key_or_damaged(spec, tmp_path):
    np.savez(tmp_path / "noise.npz", other=np.zeros(61, int))
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04broken")
    with pytest.raises(BadOption, match=r"^label_noise must be FILE.npz:KEY that can be read"):
        load(numbered(tmp_path), label_noise=f"{tmp_path}/{spec}")


def test_a_validation_split_too_small_for_any_class_is_none(tmp_path):
    assert load(numbered(tmp_path, rows=6), val_fraction=0.1).val is None


def test_the_names_are_those_of_the_readme():
    names = {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagenet", "fake", "iris", "wine", "adult", "wine-quality"}
    assert names <= set(DATASETS)
    assert set(dataset.PREFIXES) == {"folder", "npz", "csv"}
