"""Data sets from folders of image files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from inputs.rows import Source
from utils import BadOption

IMAGE_FILES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


def read_folder(path: str, option: str = "dataset") -> Source:
    """ImageFolder layout: PATH/CLASS/*.jpg, or PATH/train, PATH/val and PATH/test with classes in them."""
    root = Path(path)
    parts = [p for p in ("train", "val", "test") if (root / p).is_dir()]
    x, y, classes = _list_images(root / "train" if "train" in parts else root, option)
    held = {p: _list_images(root / p, option, classes) for p in parts if p != "train"} if "train" in parts else {}
    x_test, y_test, _ = held.pop("test", None) or held.pop("val", None) or (None, None, ())
    x_val, y_val, _ = held.pop("val", None) or (None, None, ())
    return Source(x, y, x_test, y_test, x_val, y_val, classes)


def _list_images(root: Path, option: str, classes: tuple[str, ...] | None = None) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    found = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    for c in found:
        _check_name(root / c, option)
    files = [(_check_name(f, option), c) for c in found for f in sorted((root / c).rglob("*")) if f.suffix.lower() in IMAGE_FILES]
    if not files:
        raise BadOption(option, f"must hold CLASS/*{{{', '.join(IMAGE_FILES)}}} or train/CLASS/ and val/CLASS/", str(root))
    names = classes or tuple(sorted({c for _, c in files}))
    if strangers := sorted({c for _, c in files} - set(names)):
        raise BadOption(option, f"has classes that its train folder lacks: {', '.join(strangers[:5])}", str(root))
    number = {c: i for i, c in enumerate(names)}
    return np.array([f for f, _ in files]), np.array([number[c] for _, c in files]), names


def _check_name(path: Path, option: str) -> str:
    """Names are kept as text, in files and in what is printed."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise BadOption(option, "has a file whose name is not UTF-8", os.fsencode(path).decode("utf-8", "replace")) from None
    return str(path)
