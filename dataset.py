"""Named data sets to training, validation and test splits: what the rows are. Files are read, and rows become batches, in inputs/.

Order of events: the source is read, validation rows come out of the training set (stratified, from the split seed), then long tail
and label noise change what is left for training, and validation rows that are exact copies of training rows are left out. Test stays
as it is and is only tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from inputs import fingerprint
from inputs.arrays import read_npz
from inputs.copies import first_copies
from inputs.downloads import read_adult, read_torchvision, read_wine_quality
from inputs.folders import read_folder, readable
from inputs.memory import Room, require_room
from inputs.rows import Data, Source, Split, checked, left_of, release, row_blocks
from inputs.shipped import read_shipped
from inputs.tables import Encoder, Table, read_csv
from utils import BadOption, Call, Registry, check_file, check_options, fold_in, parse_call

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILE_SIZE = 224  # image files have many sizes; the model sees this one unless --resize says otherwise
TEST_FRACTION = 0.2  # of the rows of a source without a test set

DATASETS: Registry[Callable[..., Source]] = Registry("dataset", "data set")
PREFIXES = {"folder": "folder:PATH", "npz": "npz:FILE", "csv": "csv:FILE:TARGET"}


def load(
    name: str,
    data_path: str = "./data",
    *,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    test_seed: int = 0,
    label_noise: str | None = None,
    noisy_val: bool = False,
    imbalance: float = 1.0,
    subset: float = 1.0,
    keep_duplicates: bool = False,
    skip_broken: bool = False,
    fitted: dict[str, Any] | None = None,
    ready: bool = False,
) -> Data:
    """A data set by name, split. `fitted` re-uses the statistics of an earlier run instead of those of this training split. `noisy_val`:
    label noise in the validation rows too. `ready`: numeric rows are features already and stay as they are. `subset`: the share of training
    rows that is there at all."""
    source = _with_test_set(readable(checked(_read(name, Path(data_path)), name), name, skip_broken), name, test_seed)
    labels, classes = _number_classes(source, name)
    kind = _kind(source.x_train)
    everything = np.arange(len(labels["train"]))
    used = stratified(labels["train"], subset, fold_in(split_seed, 5)) if subset < 1 else everything
    train_rows, val_rows = _split(labels["train"], used, 0.0 if source.x_val is not None else val_fraction, split_seed)
    for part, rows, least in (("training", len(train_rows), 2), ("test", len(labels["test"]), 1)):
        if rows < least:
            raise BadOption("dataset", f"must leave at least {least} {part} row{'s'[: least - 1]} after the splits ({rows} left)", name)
    if imbalance < 1:
        train_rows = train_rows[long_tail(labels["train"][train_rows], imbalance, len(classes), fold_in(split_seed, 2))]
    clean = labels["train"][train_rows]
    noisy = noisy_labels(label_noise, clean, train_rows, everything.size, classes, source.confusable, fold_in(split_seed, 3))

    if ready and kind == "table":
        fitted = fitted or _as_they_are(source, name)
    if kind == "image":
        require_room(Room("dataset", name, f"an array of {everything.size:,} images of {source.x_train.shape[1:]}", source.x_train.nbytes))
    x_train, fitted = _train_rows(kind, source.x_train, train_rows, fitted)
    train = Split(x_train, noisy)
    val = None
    if source.x_val is not None or len(val_rows):
        x, y = (source.x_val, labels["val"]) if source.x_val is not None else (source.x_train, labels["train"][val_rows])
        if noisy_val:
            if source.x_val is not None and ".npz" in (label_noise or ""):
                raise BadOption("noisy_val", "has no labels for the rows of x_val: the file has those of the training rows", label_noise)
            y = noisy_labels(label_noise, y, val_rows, everything.size, classes, source.confusable, fold_in(split_seed, 4))
        val = Split(_encode(kind, x, None if source.x_val is not None else val_rows, fitted), y)
    test = Split(_encode(kind, source.x_test, None, fitted), labels["test"])
    train, val, duplicates = without_copies(train, val, test, keep_duplicates)
    shape = (3, FILE_SIZE, FILE_SIZE) if kind == "files" else train.x.shape[1:]
    summary = {
        **{part: len(rows) if rows else 0 for part, rows in (("train", train), ("val", val), ("test", test))},
        "class_counts": np.bincount(train.y, minlength=len(classes)).tolist(),
        "label_noise_rate": float(np.mean(noisy != clean)),
        "duplicates": duplicates,
        "sha256": fingerprint.of_splits(train, val, test),
        "test_sha256": fingerprint.as_read(source.x_test, labels["test"]),
    }
    columns = source.x_train.columns if isinstance(source.x_train, Table) else ()
    return Data(name, kind, shape, classes, train, val, test, source.flip, fitted, summary, columns)


def _split(labels: np.ndarray, used: np.ndarray, val_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation rows of those used."""
    val_rows = used[stratified(labels[used], val_fraction, fold_in(seed, 1))]
    return used[left_of(len(used), np.searchsorted(used, val_rows))], val_rows


# ---------------------------------------------------------------- sources by name


def _read(name: str, root: Path) -> Source:
    prefix, colon, rest = name.partition(":")
    if colon and prefix in PREFIXES:
        if not rest:
            raise BadOption("dataset", f"must read {PREFIXES[prefix]}", name)
        return {"folder": read_folder, "npz": read_npz, "csv": _csv}[prefix](rest)
    call: Call = parse_call(name, "dataset")
    if call.name not in DATASETS:
        known = Registry[Any]("dataset", "data set")
        for key in (*DATASETS, *PREFIXES.values()):
            known.register(key)(None)
        known[call.name]  # raises, naming the nearest
    check_options(call.name, DATASETS[call.name], call.options)
    return DATASETS[call.name](root, **call.options)


@DATASETS.register("digits")
def digits(root: Path) -> Source:
    """scikit-learn's 1,797 handwritten digits, 8 x 8; ships with it."""
    data, target, _ = read_shipped("digits")
    return Source(np.rint(data.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), target, flip=False)


_IDX = "{}/raw/train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"


@DATASETS.register("mnist")
def mnist(root: Path) -> Source:
    """Handwritten digits, 28 x 28, 60,000 + 10,000."""
    return read_torchvision(root, "MNIST", _IDX.format("MNIST"), flip=False)


@DATASETS.register("fashion-mnist")
def fashion_mnist(root: Path) -> Source:
    """Pictures of clothes, 28 x 28, 60,000 + 10,000."""
    return read_torchvision(root, "FashionMNIST", _IDX.format("FashionMNIST"))


@DATASETS.register("cifar10")
def cifar10(root: Path) -> Source:
    """Small photographs of 10 classes, 32 x 32, 50,000 + 10,000."""
    # airplane 0, car 1, bird 2, cat 3, deer 4, dog 5, horse 7, truck 9: the pairs of Patrini et al. (arXiv 1609.03683)
    pairs = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
    return read_torchvision(root, "CIFAR10", "cifar-10-batches-py/data_batch_1 to 5, test_batch and batches.meta", confusable=pairs)


@DATASETS.register("cifar100")
def cifar100(root: Path) -> Source:
    """Small photographs of 100 classes, 32 x 32, 50,000 + 10,000."""
    return read_torchvision(root, "CIFAR100", "cifar-100-python/train, test and meta")


@DATASETS.register("imagenet")
def imagenet(root: Path) -> Source:
    """ImageNet-1K: train/CLASS/*.JPEG and val/CLASS/*.JPEG in --data_path."""
    return read_folder(str(root), "data_path")


@DATASETS.register("fake")
def fake(root: Path, *, train: int = 512, test: int = 128, size: int = 32, channels: int = 3, classes: int = 10) -> Source:
    """Random images with random labels, to try the machinery: fake(train=512, size=32, classes=10)."""
    for option, value in dict(train=train, test=test, size=size, channels=channels, classes=classes).items():
        if type(value) is not int or value < 1:
            raise BadOption("dataset", f"takes whole numbers of at least 1 in fake({option}=...)", value)
    if classes > train + test:
        raise BadOption("dataset", f"takes at most as many classes as rows ({train + test:,}) in fake(classes=...)", classes)
    asked = f"fake(train={train}, test={test}, size={size}, channels={channels})"
    require_room(Room("dataset", asked, "an array of all its images", (train + test) * size**2 * channels))
    x = np.random.default_rng(0).integers(0, 256, (train + test, size, size, channels), np.uint8)
    y = np.arange(train + test) % classes
    return Source(x[:train], y[:train], x[train:], y[train:], classes=tuple(map(str, range(classes))))


@DATASETS.register("iris")
def iris(root: Path) -> Source:
    """150 flowers, 4 measures, 3 classes; ships with scikit-learn."""
    data, target, names = read_shipped("iris")
    return Source(data, target, classes=names)


@DATASETS.register("wine")
def wine(root: Path) -> Source:
    """178 wines, 13 measures, 3 classes; ships with scikit-learn."""
    data, target, names = read_shipped("wine")
    return Source(data, target, classes=names)


@DATASETS.register("adult")
def adult(root: Path) -> Source:
    """Census rows, 6 numbers and 8 categories: income above 50,000? UCI files or OpenML."""
    return Source(*read_adult(root))


@DATASETS.register("wine-quality")
def wine_quality(root: Path) -> Source:
    """6,497 red and white wines, 11 measures: quality 3 to 9. UCI files or OpenML."""
    return Source(*read_wine_quality(root))


def _csv(text: str) -> Source:
    path, colon, target = text.rpartition(":")
    if not colon or not path:
        raise BadOption("dataset", f"must read {PREFIXES['csv']}", f"csv:{text}")
    return Source(*read_csv(Path(path), target))


# ---------------------------------------------------------------- splits


def _with_test_set(source: Source, name: str, seed: int) -> Source:
    if source.x_test is not None:
        if seed:
            raise BadOption("test_seed", f"draws test rows where there are none, and {name} has its own", seed)
        return source
    y = np.asarray(source.y_train)
    test = stratified(y, TEST_FRACTION, seed)
    train = left_of(len(y), test)
    x = source.x_train if isinstance(source.x_train, Table) else np.asarray(source.x_train)
    return replace(source, x_train=x[train], y_train=y[train], x_test=x[test], y_test=y[test])


def _number_classes(source: Source, name: str) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Labels as 0 .. C-1, and the classes' names."""
    labels = {part: np.asarray(y) for part, (_, y) in source.parts().items()}
    for part, y in labels.items():
        if y.dtype.kind == "u":  # beside int64 they would become float64, where large ones are equal
            if len(y) and int(y.max()) >= 2**63:
                raise BadOption("dataset", f"needs labels below 2^63 ({part}: {y.max()})", name)
            labels[part] = y.astype(np.int64)
    values = np.unique(np.concatenate(list(labels.values())))
    found = len(values) if source.classes is None else len(source.classes)
    if found < 2:
        raise BadOption("dataset", f"needs at least two classes ({found} found)", name)
    if source.classes is not None:
        if len(values) and not 0 <= values[0] <= values[-1] < found:
            raise BadOption("dataset", f"needs labels from 0 to {found - 1} ({values[0]} to {values[-1]} found)", name)
        return {k: v.astype(np.int64) for k, v in labels.items()}, source.classes
    return {k: np.searchsorted(values, v).astype(np.int64) for k, v in labels.items()}, tuple(str(v) for v in values)


def _kind(x: Any) -> str:
    if isinstance(x, Table) or (isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.ndim == 2):
        return "table"
    return "files" if np.asarray(x).dtype.kind in "UO" else "image"


def _train_rows(kind: str, x: Any, rows: np.ndarray, fitted: dict[str, Any] | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Training rows as the model reads them, and the statistics of the training split, as JSON, unless they are given."""
    if kind == "files":
        return _encode(kind, x, rows, {}), fitted or {"mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)}
    if kind == "table":
        fitted = fitted or Encoder.fit(Table.of(x)[rows]).to_json()
        return _encode(kind, x, rows, fitted), fitted
    found = _encode(kind, x, rows, {})
    return found, fitted or _mean_and_std(found)


def _mean_and_std(x: np.ndarray) -> dict[str, Any]:
    """Of each channel of uint8 images (N, C, H, W)."""
    levels = np.arange(256) / 255
    counts = np.zeros((x.shape[1], 256), np.int64)
    for at in row_blocks(len(x), x[:1].nbytes):
        for channel in range(x.shape[1]):
            values = np.ascontiguousarray(x[at, channel]).ravel()
            pairs = np.bincount(values[: values.size // 2 * 2].view(np.uint16), minlength=1 << 16).reshape(256, 256)  # half of the counting
            counts[channel] += pairs.sum(0) + pairs.sum(1) + np.bincount(values[values.size // 2 * 2 :], minlength=256)
    frequency = counts / counts.sum(1, keepdims=True)  # (C, 256)
    mean = frequency @ levels
    std = np.sqrt(np.maximum(frequency @ levels**2 - mean**2, 0))
    return {"mean": mean.tolist(), "std": np.where(std > 0, std, 1).tolist()}


def _as_they_are(source: Source, name: str) -> dict[str, Any]:
    """The statistics that change nothing."""
    for part, x in (("train", source.x_train), ("val", source.x_val), ("test", source.x_test)):
        finite = x is None or (not isinstance(x, Table) and all(np.isfinite(block).all() for _, block in Table.of(x).blocks()))
        if not finite:
            raise BadOption("dataset", f"must hold ready-made features: numbers, neither NaN nor Inf (x_{part})", name)
    width = source.x_train.shape[1]
    return Encoder([0.0] * width, [1.0] * width, []).to_json()


def _encode(kind: str, x: Any, rows: np.ndarray | None, fitted: dict[str, Any]) -> np.ndarray:
    """Those `rows` (None: all), as the model reads them."""
    rows = np.arange(len(x)) if rows is None else rows
    if kind == "files":
        return np.asarray(x)[rows]
    if kind == "table":
        return Encoder.from_json(fitted).encode(Table.of(x)[rows])
    images = x.reshape(*x.shape[:3], -1)  # (N, H, W, C)
    found = np.empty((len(rows), *images.shape[3:], *images.shape[1:3]), np.uint8)
    for at in row_blocks(len(rows), images[:1].nbytes):  # copied once, out of a file that may be mapped
        found[at] = images[rows[at]].transpose(0, 3, 1, 2)
        release(x)
    return found


def stratified(y: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted row numbers: `fraction` of every class, rounded; a class keeps at least one row outside."""
    rng = np.random.default_rng(seed)
    order = np.argsort(y, kind="stable")  # sorted once: there may be as many classes as rows
    picked = []
    for of_class in np.split(order, np.unique(y[order], return_index=True)[1][1:]):
        rows = rng.permutation(of_class)
        picked.append(rows[: max(0, min(round(len(rows) * fraction), len(rows) - 1))])
    return np.sort(np.concatenate([np.empty(0, np.int64), *picked]))


def without_copies(train: Split, val: Split | None, test: Split, keep: bool) -> tuple[Split, Split | None, dict[str, int]]:
    """Validation without rows that are in training, training rows with the copies they have there, and how many copies were found.

    NOTE: with a copy of itself in the bank, a row is its own neighbor: it learns to trust distance 0, and so would the validation rows.
    """
    parts = [train, *([val] if val else []), test]
    found = first_copies(*(part.x for part in parts))
    if found is None:
        return train, val, {}
    of = dict(zip(("train", "val", "test") if val else ("train", "test"), found, strict=True))
    ends, start = np.cumsum([len(first) for first in found]), 0
    counts: dict[str, int] = {}
    for j, (part, first) in enumerate(of.items()):  # a copy is counted where the first of its kind is
        owner = np.where(first == start + np.arange(len(first)), -1, np.searchsorted(ends, first, "right"))
        counts |= {part if i == j else f"{part}_in_{earlier}": int((owner == i).sum()) for i, earlier in enumerate(of) if i <= j}
        start += len(first)
    if keep:
        return train, val, counts
    if counts["train"]:
        train = replace(train, copies=of["train"])
    if val and counts["val_in_train"]:
        fresh = of["val"] >= len(train)
        val = Split(val.x[fresh], val.y[fresh]) if fresh.any() else None
    return train, val, counts


def long_tail(y: np.ndarray, ratio: float, num_classes: int, seed: int) -> np.ndarray:
    """Rows to keep: class c of C keeps n * ratio^(c / (C - 1)), at least 1; n is the size of the smallest class (arXiv 1901.05555)."""
    rng = np.random.default_rng(seed)
    counts = np.bincount(y, minlength=num_classes)
    most = counts[counts > 0].min()
    keep = []
    for c in range(num_classes):
        wanted = max(1, round(float(most) * ratio ** (c / max(num_classes - 1, 1))))
        keep.append(rng.permutation(np.flatnonzero(y == c))[:wanted])
    return np.sort(np.concatenate(keep))


def noisy_labels(
    spec: str | None, y: np.ndarray, rows: np.ndarray, total: int, classes: tuple[str, ...], confusable: dict[int, int] | None, seed: int
) -> np.ndarray:
    """Labels after noise: RATE[:symmetric|asymmetric], or FILE.npz:KEY with one label a row of the whole training set."""
    if not spec:
        return y
    head, _, tail = spec.rpartition(":")
    if ".npz" in spec:
        return _noise_file(head, tail, spec, total, len(classes))[rows]
    text, mode = (head, tail) if head else (spec, "symmetric")
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1 or mode not in ("symmetric", "asymmetric"):
        raise BadOption("label_noise", "must read RATE[:symmetric|asymmetric] with a rate in [0, 1], or FILE.npz:KEY", spec)
    rng = np.random.default_rng(seed)
    hit = rng.permutation(len(y))[: round(rate * len(y))]
    noisy = y.copy()
    if mode == "symmetric":  # any other class
        noisy[hit] = (y[hit] + rng.integers(1, len(classes), len(hit))) % len(classes)
    else:
        other = np.array([(confusable or {}).get(c, c if confusable else (c + 1) % len(classes)) for c in range(len(classes))])
        noisy[hit] = other[y[hit]]
    return noisy


def _noise_file(path: str, key: str, spec: str, total: int, num_classes: int) -> np.ndarray:
    try:
        check_file("label_noise", path)
        with np.load(path, allow_pickle=False) as archive:
            labels = archive[key]
    except Exception as error:  # absent file, absent key, damaged archive: the same advice
        reason = error.rule if isinstance(error, BadOption) else type(error).__name__
        raise BadOption("label_noise", f"must be FILE.npz:KEY that can be read ({reason})", spec) from None
    if labels.shape != (total,) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= num_classes:
        rule = f"needs one class number (0 to {num_classes - 1}) a training row ({total}), the file has {labels.dtype} {labels.shape}"
        raise BadOption("label_noise", rule, spec)
    return labels.astype(np.int64)
