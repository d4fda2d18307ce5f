"""Splits made by hand, and what comes out of their batches, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from inputs.batches import Batches
from inputs.rows import Data, Split

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


def photos(folder: Path, rows: int = 11) -> Data:
    rng = np.random.default_rng(0)
    paths = []
    for row in range(rows):
        paths.append(str(folder / f"{row}.{'jpg' if row % 2 else 'png'}"))
        height, width = rng.integers(13, 41, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(paths[-1])
    split = Split(np.array(paths), np.arange(rows) % 3)
    return Data("made", "files", (3, 224, 224), tuple("abc"), split, None, split, True, {"mean": MEAN, "std": STD})


def table(rows: int = 23, features: int = 5) -> Data:
    x = np.random.default_rng(0).normal(size=(rows, features)).astype(np.float32)
    split = Split(x, np.arange(rows) % 2)
    return Data("made", "table", (features,), ("a", "b"), split, None, split, True, {"mean": [], "std": [], "levels": []})
