"""Data sets from NumPy archives."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from inputs.memory import Room, require_room
from inputs.rows import Source, release, row_blocks
from utils import BadOption, check_file, say, shortened

NAMES = ("x_train", "y_train", "x_test", "y_test", "x_val", "y_val")
CLASSES = "classes"  # their names, if the file has them
CHECKED = 1 << 20  # bytes of a member whose checksum is computed at once
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: its mark, and how long its name and its extra field are
LARGEST = float(np.finfo(np.float32).max)  # what a model reads is float32


def read_npz(path: str) -> Source:
    """x_train, y_train, x_test, y_test: uint8 images, or float rows; classes: names, if there are any. Rows that are stored uncompressed
    stay in the file until they are used, as an array that is mapped."""
    check_file("dataset", path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            if missing := [k for k in NAMES[:4] if k not in members]:
                raise BadOption("dataset", f"needs {', '.join(missing)} in the npz", path)
            arrays: dict[str, Any] = {k: _array(archive, members[k], k, path) for k in NAMES if k in members}
            named = _names(archive, members[CLASSES], path) if CLASSES in members else None
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
    return Source(**arrays) if named is None else _with_names(arrays, named, path)


def _names(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str) -> np.ndarray | None:
    """The array that names classes. NOTE: another array of that name was always left out, and files that have one are still read."""
    with archive.open(member) as content:
        shape, _, kind = _header(content)
    if len(shape) == 1 and kind.kind == "U":
        return _array(archive, member, CLASSES, path)
    say(f"dataset: the array classes is no list of names ({kind}, {shape}) and is not read ({path})")
    return None


def _with_names(arrays: dict[str, Any], named: np.ndarray, path: str) -> Source:
    """Class n is called named[n]. Labels are such numbers, or names out of it."""
    names = tuple(named.tolist())
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise BadOption("dataset", "needs names in classes that are not empty, each once", f"{shortened(', '.join(names), 80)} in {path}")
    number = {name: n for n, name in enumerate(names)}
    for part in (part for part in arrays if part.startswith("y_") and arrays[part].dtype.kind == "U"):
        values, inverse = np.unique(arrays[part], return_inverse=True)
        if other := [value for value in values.tolist() if value not in number]:
            raise BadOption("dataset", f"needs labels that classes names, {part} has {shortened(other[0], 40)!r}", path)
        arrays[part] = np.array([number[value] for value in values.tolist()], np.int64)[inverse]
    return Source(**arrays, classes=names)


# ---------------------------------------------------------------- members of the archive


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, path: str) -> np.ndarray:
    with archive.open(member) as content:
        shape, fortran, kind = _header(content)
        start = content.tell()
    if kind.hasobject:
        raise ValueError("Object arrays are pickles")
    size = math.prod(shape) * kind.itemsize
    if start + size != member.file_size:
        raise zipfile.BadZipFile("a member is not as long as its header says")
    if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1 and size and name.startswith("x_"):
        return _mapped(Path(path), member, start, (shape, fortran, kind))
    require_room(Room("dataset", path, f"{name} of shape {shape}", size))
    with archive.open(member) as content:
        found: np.ndarray = np.lib.format.read_array(content, allow_pickle=False)
    return found


def _header(content: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and type of the array in a .npy file."""
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, kind = read(content)
    return shape, fortran, kind


def _mapped(path: Path, member: zipfile.ZipInfo, start: int, form: tuple[tuple[int, ...], bool, np.dtype[Any]]) -> np.ndarray:
    shape, fortran, kind = form
    with path.open("rb") as file:
        file.seek(member.header_offset)
        mark, name, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        if mark != b"PK\3\4":
            raise zipfile.BadZipFile("a member is not where the archive says")
        offset = member.header_offset + LOCAL_HEADER.size + name + extra
        _check_sum(file, offset, member)
    return np.memmap(path, kind, "r", offset + start, shape, "F" if fortran else "C")


def _check_sum(file: BinaryIO, offset: int, member: zipfile.ZipInfo) -> None:
    file.seek(offset)
    found, left = 0, member.file_size
    while left:
        block = file.read(min(left, CHECKED))
        if not block:
            raise zipfile.BadZipFile("a member is cut short")
        found, left = zlib.crc32(block, found), left - len(block)
    if found != member.CRC:
        raise zipfile.BadZipFile("a member does not match its checksum")


# ---------------------------------------------------------------- what they must be


def _check_arrays(x: np.ndarray, y: np.ndarray | None, part: str, path: str) -> None:
    if y is None or y.ndim != 1 or not x.ndim or len(x) != len(y):
        raise BadOption("dataset", f"needs one label a row: x_{part} {x.shape}, y_{part} {None if y is None else y.shape}", path)
    if y.dtype.kind not in "iubU":
        raise BadOption("dataset", f"needs whole numbers or text as labels, y_{part} is {y.dtype}", path)
    if y.dtype.kind == "i" and len(y) and y.min() < 0:  # often the mark of a row without a label
        say(f"dataset: y_{part} has labels from {y.min()}; every value is a class of its own, {y.min()} too ({path})")
    image = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 2, 3, 4)))
    if not image and not (x.dtype.kind == "f" and x.ndim == 2):
        raise BadOption("dataset", f"needs uint8 images (N, H, W[, C]) or float rows (N, F), x_{part} is {x.dtype} {x.shape}", path)
    if 0 in x.shape[1:] or (part == "val" and not len(x)):
        raise BadOption("dataset", f"needs rows that hold something, x_{part} is of shape {x.shape}", path)
    if not image:
        for at in row_blocks(len(x), x[:1].nbytes):
            largest = float(np.abs(x[at]).max())
            if not largest <= LARGEST:  # NaN is not
                found = "numbers beyond float32" if largest < np.inf else "NaN or infinity"
                raise BadOption("dataset", f"needs finite numbers, x_{part} has {found}", path)
            release(x)
