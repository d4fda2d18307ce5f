"""Small data sets on disk, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def npz(folder: Path, **arrays: Any) -> str:
    file = folder / "set.npz"
    np.savez(file, **arrays)
    return f"npz:{file}"


def photo(file: Path, color: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (11, 13), (color, color, color)).save(file)
