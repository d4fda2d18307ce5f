"""Data sets by name, and what becomes of their rows and labels: splits, statistics, a long tail, noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataset
from dataset import DATASETS, Source, load, long_tail, noisy_labels, stratified
from tests.inputs.files import npz, pixels
from utils import BadOption


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
    assert data.summary == {
        "train": len(data.train),
        "val": len(data.val),
        "test": len(data.test),
        "class_counts": np.bincount(data.train.y).tolist(),
        "label_noise_rate": 0.0,
        "duplicates": dict.fromkeys(("train", "val_in_train", "val", "test_in_train", "test_in_val", "test"), 0),
        "sha256": load("digits").summary["sha256"],
        "test_sha256": load("digits").summary["test_sha256"],
    }
    others = [
        load("digits", split_seed=1),
        load("digits", label_noise="0.1"),
        load("digits", imbalance=0.5),
        load("digits", val_fraction=0.2),
    ]
    assert len({d.summary["sha256"] for d in [data, *others]}) == 5  # of rows, labels and their split


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
    again = load("fake(train=41, test=11, size=7, channels=2, classes=3)", split_seed=5, val_fraction=0)
    assert np.array_equal(data.train.x, again.train.x)
    assert load("fake").shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("fake(train=0)", "dataset takes whole numbers of at least 1 in fake(train=...), got 0"),
        ("fake(size='big')", "size must be a whole number, got 'big'"),
        ("fake(size=2.5)", "size must be a whole number, got 2.5"),
        ("fake(train=True)", "train must be a whole number, got True"),
        ("fake(classes=1)", "dataset needs at least two classes (1 found)"),
        ("fake(train=60, test=30, classes=3000000000)", "dataset takes at most as many classes as rows (90) in fake(classes=...)"),
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


@pytest.mark.parametrize(
    ("returned", "rule"),
    [
        (Source(pixels(10, 4, 4), np.arange(9) % 2), r"^dataset needs one label a row \(train: 10 rows, labels \(9,\)\), got 'own'"),
        (Source(pixels(10, 4, 4), np.arange(11) % 2), r"^dataset needs one label a row \(train: 10 rows, labels \(11,\)\)"),
        (Source(pixels(10, 4, 4) / 255, np.arange(10) % 2), r"^dataset needs uint8 images .*, x_train is float64 \(10, 4, 4\), got 'own'"),
        (Source(pixels(10, 4, 4).astype(int), np.arange(10) % 2), r"^dataset needs uint8 images .*, x_train is int64 \(10, 4, 4\)"),
        (Source(np.ones((10, 4), int), np.arange(10) % 2), r"^dataset needs uint8 .*, float rows .*, x_train is int64 \(10, 4\)"),
        ((pixels(10, 4, 4), np.arange(10) % 2), r"^dataset must be made by a function that returns a Source, and it returned tuple"),
        (None, r"^dataset must be made by a function that returns a Source, and it returned NoneType, got 'own'"),
    ],
)
def test_what_a_function_returns_must_fit_before_it_is_split(returned, rule, register):
    """Without a test set, too: rows beyond the labels were left out, and floats from 0 to 1 became black pixels."""
    with pytest.raises(BadOption, match=rule):
        load(register(returned))


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
        data = load(name, val_fraction=0.3, split_seed=seed, fitted=AS_THEY_ARE)
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
    first, second = (load("iris", split_seed=seed, fitted={"mean": [0.0] * 4, "std": [1.0] * 4, "levels": []}) for seed in (0, 1))
    assert np.array_equal(first.test.x, second.test.x)
    assert not np.array_equal(first.train.x, second.train.x)
    assert np.bincount(first.test.y).tolist() == [10, 10, 10]


def test_another_test_seed_draws_other_test_rows_and_only_where_there_are_none(tmp_path):
    as_they_are = {"mean": [0.0] * 13, "std": [1.0] * 13, "levels": []}
    first, second = (load("wine", test_seed=seed, fitted=as_they_are) for seed in (0, 1))
    assert not np.array_equal(first.test.x, second.test.x)
    assert np.array_equal(np.bincount(first.test.y), np.bincount(second.test.y))
    of_both = [[tuple(row) for part in (data.train, data.val, data.test) if part for row in part.x] for data in (first, second)]
    assert sorted(of_both[0]) == sorted(of_both[1])
    assert len(set(of_both[0])) == len(of_both[0]) == 178
    with pytest.raises(BadOption, match="test_seed draws test rows where there are none"):
        load(numbered(tmp_path), test_seed=1)


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
    assert tailed.summary["class_counts"] == [27, 9, 3]
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
    assert data.summary["label_noise_rate"] == (data.train.y != clean).mean()
    assert data.summary["class_counts"] == np.bincount(data.train.y).tolist()
    assert data.val.y.tolist() == [row % 3 for row in rows_of(data.val)]
    assert data.test.y.tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("imbalance", [1.0, 0.25])
def test_noise_from_a_file_stays_with_its_rows(imbalance, tmp_path):
    """Row r of the file belongs to row r of the training set before anything was taken out of it."""
    name = numbered(tmp_path, rows=97)
    label_of = np.random.default_rng(0).integers(0, 3, 97)
    np.savez(tmp_path / "noise.npz", clean=np.arange(97) % 3, worst=label_of.astype(np.uint8))
    spec = f"{tmp_path}/noise.npz:worst"
    data = load(name, val_fraction=0.3, label_noise=spec, imbalance=imbalance, split_seed=3, fitted=AS_THEY_ARE)
    assert data.val is not None
    assert data.train.y.tolist() == label_of[rows_of(data.train)].tolist()
    assert data.val.y.tolist() == [row % 3 for row in rows_of(data.val)]
    clean = np.array(rows_of(data.train)) % 3
    assert data.summary["label_noise_rate"] == (data.train.y != clean).mean() > 0.4


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


def test_a_subset_is_split_like_the_whole(tmp_path: Path) -> None:
    name = numbered(tmp_path, rows=60)
    whole, half = load(name, val_fraction=0.2, fitted=AS_THEY_ARE), load(name, val_fraction=0.2, fitted=AS_THEY_ARE, subset=0.5)
    assert whole.val is not None
    assert half.val is not None
    train, val = rows_of(half.train), rows_of(half.val)
    assert (len(train), len(val)) == (24, 6)
    assert sorted(n % 3 for n in train) == [c for c in range(3) for _ in range(8)]
    assert not set(train) & set(val)
    assert set(train + val) < set(rows_of(whole.train) + rows_of(whole.val))
    assert rows_of(half.test) == rows_of(whole.test)
    assert load(name, subset=1.0).summary == load(name).summary
