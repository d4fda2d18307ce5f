"""Data sets from NumPy archives."""

from __future__ import annotations

import numpy as np

from inputs.rows import Source
from utils import BadOption, say


def read_npz(path: str) -> Source:
    """x_train, y_train, x_test, y_test: uint8 images, or float rows."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [k for k in ("x_train", "y_train", "x_test", "y_test") if k not in archive]
            if missing:
                raise BadOption("dataset", f"needs {', '.join(missing)} in the npz", path)
            arrays = {k: archive[k] for k in ("x_train", "y_train", "x_test", "y_test", "x_val", "y_val") if k in archive}
    except BadOption:
        raise
    except OSError as error:
        raise BadOption("dataset", f"must be a file that can be read ({error.strerror or error})", path) from None
    except ValueError as error:
        rule = "must hold plain arrays, no object arrays" if "Object arrays" in str(error) else "must be an npz file"
        raise BadOption("dataset", rule, path) from None
    except Exception as error:  # zipfile and zlib raise a dozen kinds for a damaged archive
        raise BadOption("dataset", f"must be an undamaged npz file ({type(error).__name__})", path) from None
    for part in ("train", "test", "val"):
        if f"x_{part}" in arrays:
            _check_arrays(arrays[f"x_{part}"], arrays.get(f"y_{part}"), part, path)
    shapes = {k: v.shape for k, v in arrays.items() if k.startswith("x_")}
    if len({shape[1:] for shape in shapes.values()}) > 1:
        raise BadOption("dataset", "needs rows of one shape", ", ".join(f"{k} {shape}" for k, shape in shapes.items()))
    return Source(**arrays)


def _check_arrays(x: np.ndarray, y: np.ndarray | None, part: str, path: str) -> None:
    if y is None or y.ndim != 1 or len(x) != len(y):
        raise BadOption("dataset", f"needs one label a row: x_{part} {x.shape}, y_{part} {None if y is None else y.shape}", path)
    if y.dtype.kind not in "iubU":
        raise BadOption("dataset", f"needs whole numbers or text as labels, y_{part} is {y.dtype}", path)
    if y.dtype.kind == "i" and len(y) and y.min() < 0:  # often the mark of a row without a label
        say(f"dataset: y_{part} has labels from {y.min()}; every value is a class of its own, {y.min()} too ({path})")
    image = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 2, 3, 4)))
    if not image and not (x.dtype.kind == "f" and x.ndim == 2):
        raise BadOption("dataset", f"needs uint8 images (N, H, W[, C]) or float rows (N, F), x_{part} is {x.dtype} {x.shape}", path)
    if not image and not np.isfinite(x).all():
        raise BadOption("dataset", f"needs finite numbers, x_{part} has NaN or infinity", path)
