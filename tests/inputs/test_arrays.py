"""Archives of arrays as data sets, and every way in which one can be wrong."""

from __future__ import annotations

import pickle
import zipfile
from typing import Any

import numpy as np
import pytest

from dataset import load
from inputs.arrays import read_npz
from tests.inputs.files import npz, pixels
from utils import BadOption


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


@pytest.mark.parametrize("labels", [[1, 0, 2, 2, 0, 1], ["ant", "bee", "cow", "cow", "bee", "ant"]])
def test_npz_class_names(labels, tmp_path):
    """By number, in the order of the array, though it is not that of the alphabet; a class may have no rows."""
    x, names = pixels(6, 3, 3), np.array(["bee", "ant", "cow", "dog"])
    data = load(npz(tmp_path, x_train=x, y_train=np.array(labels), x_test=x, y_test=np.array(labels), classes=names), val_fraction=0)
    assert data.classes == ("bee", "ant", "cow", "dog")
    assert data.train.y.tolist() == data.test.y.tolist() == [1, 0, 2, 2, 0, 1]
    assert data.summary["class_counts"] == [2, 2, 2, 0]


@pytest.mark.parametrize(
    ("names", "labels", "rule"),
    [
        (["a", "a", "b"], [0, 1], "needs names in classes that are not empty, each once"),
        (["a", " "], [0, 1], "needs names in classes that are not empty, each once"),
        (["a", "b"], [1, 2], "needs labels from 0 to 1"),
        (["a", "b"], ["a", "c"], "needs labels that classes names, y_train has 'c'"),
    ],
)
def test_npz_class_names_that_do_not_fit(names, labels, rule, tmp_path):
    x, y = pixels(6, 3, 3), np.array(labels)[np.arange(6) % 2]
    with pytest.raises(BadOption, match=f"^dataset {rule}"):
        load(npz(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(names)), val_fraction=0)


@pytest.mark.parametrize("other", [np.arange(2), np.array([["a", "b"]]), np.array(["a", None], object)])
def test_an_array_classes_that_is_no_list_of_names_is_left_out(other, tmp_path, capsys):
    x, y = pixels(6, 3, 3), np.arange(6) % 2
    data = load(npz(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y, classes=other), val_fraction=0)
    assert data.classes == ("0", "1")
    assert "the array classes is no list of names" in capsys.readouterr().err


def test_npz_with_its_own_validation_set(tmp_path):
    x, y = pixels(31, 4, 4), np.arange(31) % 3
    file = npz(tmp_path, x_train=x, y_train=y, x_test=x[:5], y_test=y[:5], x_val=x[5:12], y_val=y[5:12])
    data = load(file, val_fraction=0.5, keep_duplicates=True)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == (31, 7, 5)  # nothing comes out of the training set
    assert np.array_equal(data.val.x[:, 0], x[5:12])
    assert data.val.y.tolist() == y[5:12].tolist()


def test_labels_below_0_are_classes_and_said(tmp_path, capsys):
    x, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) % 5 - 1
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=np.abs(y))
    assert load(f"npz:{tmp_path / 'd.npz'}").classes == ("-1", "0", "1", "2", "3")
    said = capsys.readouterr().err
    assert "dataset: y_train has labels from -1; every value is a class of its own, -1 too" in said
    assert "y_test" not in said


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
        (dict(x_train=np.zeros((13, 0)), x_test=np.zeros((13, 0))), r"needs rows that hold something, x_train is of shape \(13, 0\)"),
        (dict(x_train=X[:, :0], x_test=X[:, :0]), r"needs rows that hold something, x_train is of shape \(13, 0, 4\)"),
        (dict(x_val=X[:0], y_val=Y[:0]), r"needs rows that hold something, x_val is of shape \(0, 4, 4\)"),
        (dict(y_test=np.uint64(2**63 + 9) + Y.astype(np.uint64)), r"needs labels below 2\^63 \(test: 9223372036854775818\)"),
        (dict(x_train=X[:, 0] * 1e37, x_test=X[:, 0] / 1.0), "needs finite numbers, x_train has numbers beyond float32"),
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


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
def test_rows_stay_in_the_file_until_they_are_used(pack, tmp_path):
    """Those that are stored as they are; the splits are copies of their own."""
    pack(tmp_path / "a.npz", **GOOD, x_val=np.asfortranarray(X + 1), y_val=Y)
    source = read_npz(str(tmp_path / "a.npz"))
    assert isinstance(source.x_train, np.memmap) is (pack is np.savez)
    for name, wanted in (*GOOD.items(), ("x_val", X + 1)):
        assert np.array_equal(getattr(source, name), wanted)
    data = load(f"npz:{tmp_path / 'a.npz'}", keep_duplicates=True)
    (tmp_path / "a.npz").write_bytes(b"")
    assert np.array_equal(data.train.x[:, 0], X)
    assert data.val is not None
    assert np.array_equal(data.val.x[:, 0], X + 1)


def test_large_unsigned_labels_stay_apart(tmp_path):
    """As float64, which NumPy makes of uint64 beside int64, 2^62 and 2^62 + 1 are one number."""
    y = np.array([2**62, 2**62 + 1], np.uint64)[Y]
    assert load(npz(tmp_path, x_train=X, y_train=y, x_test=X, y_test=y.astype(np.int64))).classes == (str(2**62), str(2**62 + 1))


def test_a_flipped_bit_anywhere_in_the_rows_is_found(tmp_path):
    name = npz(tmp_path, **GOOD)
    content = bytearray((tmp_path / "set.npz").read_bytes())
    start = content.index(X.tobytes())
    for place in range(start, start + X.nbytes, 7):
        content[place] ^= 4
        (tmp_path / "set.npz").write_bytes(content)
        with pytest.raises(BadOption, match=r"^dataset must be an undamaged npz file \(BadZipFile\)"):
            load(name)
        content[place] ^= 4


def test_an_npz_cut_short_anywhere(tmp_path):
    name = npz(tmp_path, **GOOD)
    file = tmp_path / "set.npz"
    content = file.read_bytes()
    for length in range(0, len(content), 53):
        file.write_bytes(content[:length])
        with pytest.raises(BadOption, match=r"^dataset must be "):
            load(name)
