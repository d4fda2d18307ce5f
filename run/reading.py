"""What a model reads without its data set: images, files, arrays and table rows as a user has them, made like the rows it was trained on.

A row that can't be read is not an end: it becomes `Unreadable`, which says why, in its place.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset import IMAGENET_MEAN, IMAGENET_STD
from inputs.batches import VIEW
from inputs.columns import coded
from inputs.folders import IMAGE_FILES
from inputs.images import VIEW_SCALE, Crop, eight_bit, square
from inputs.rows import Data
from inputs.tables import MISSING, Encoder, Table
from utils import BadOption, check_file, fold_in, say, shortened

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's names, by channels
MOST_NAMES = 100_000  # image files of a training split that a checkpoint names


class Unreadable(Exception):
    """A row that can't be read, and why."""


class Row(NamedTuple):
    """One row to predict, and what it is called in what people read."""

    name: str
    content: Any  # a path, an image of Pillow's, an array, a record; or Unreadable


# ---------------------------------------------------------------- what a checkpoint keeps


def reading_of(data: Data) -> dict[str, Any]:
    """What it takes to read further rows, beside the shape and what was fitted; JSON can hold it."""
    files = {}
    if data.kind == "files" and len(data.train) <= MOST_NAMES:  # so that a neighbor can be named where the data set is not at hand
        files = {"files": ["/".join(Path(path).parts[-2:]) for path in data.train.x]}
    return {"kind": data.kind, "flip": data.flip, "columns": list(data.columns), **files}


def reading_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a checkpoint. An older one tells less; what follows from the rest is filled in."""
    if "reading" in facts:
        found: dict[str, Any] = facts["reading"]
        return found
    name, shape = facts["config"]["dataset"], facts["shape"]
    of_files = facts["fitted"].get("mean") == list(IMAGENET_MEAN) and facts["fitted"].get("std") == list(IMAGENET_STD)
    files = name.startswith("folder:") or name == "imagenet" or (of_files and ":" not in name)
    return {"kind": "table" if len(shape) == 1 else "files" if files else "image", "flip": None, "columns": []}


# ---------------------------------------------------------------- inputs to rows


def rows_of(inputs: Any, shape: Sequence[int] = ()) -> Iterator[Row]:
    """One row at a time, of whatever holds rows: a path, a folder, an image, a record, an array, a data frame, or several of these.

    `shape` is that of the model's rows: it tells an array that is one row from one that holds several.
    """
    if isinstance(inputs, str | Path):
        yield from files_in(Path(inputs))
    elif hasattr(inputs, "to_dict") and hasattr(inputs, "columns"):  # a data frame
        yield from (Row(f"row {n}", record) for n, record in enumerate(inputs.to_dict("records")))
    elif isinstance(inputs, Mapping) or hasattr(inputs, "getbands"):
        yield Row("row 0", inputs)
    elif hasattr(inputs, "__array__") and not isinstance(inputs, list | tuple):
        array = as_array(inputs)
        yield from (Row(f"row {n}", row) for n, row in enumerate(array[None] if is_one_row(array, shape) else array))
    else:
        yield from (_named(n, item) for n, item in enumerate(inputs))


def _named(number: int, item: Any) -> Row:
    if isinstance(item, Row):
        return item
    return Row(str(item), Path(item)) if isinstance(item, str | Path) else Row(f"row {number}", item)


def files_in(path: Path) -> Iterator[Row]:
    """A folder's image files, or the file itself; one that is not there is a row, too."""
    if not path.is_dir():
        yield Row(str(path), path)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_FILES)
    if not files:
        raise BadOption("input", f"must hold image files ({', '.join(IMAGE_FILES)})", str(path))
    yield from (Row(str(file), file) for file in files)


def as_array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)  # a tensor may lie on a GPU


def is_one_row(array: np.ndarray, shape: Sequence[int]) -> bool:
    """(H, W) or (H, W, C) of an image, (F,) of a table. Image files are of any size."""
    if len(shape) == 1:
        return array.ndim == 1
    return array.ndim == 2 or (array.ndim == 3 and (array.shape[2] in MODES or tuple(array.shape[:2]) == tuple(shape[1:])))


def read_npz(path: Path, key: str = "") -> Iterator[Row]:
    """The rows of an array in an npz file: KEY, else x, else x_test, else the only one."""
    check_file("input", path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive)
            found = next((name for name in (key, "x", "x_test", *(names if len(names) == 1 else ())) if name in names), None)
            if found is None or (key and found != key):
                rule = f"must hold an array {key!r}" if key else "must hold an array x or x_test, or be typed FILE.npz:KEY"
                raise BadOption("input", f"{rule}; it has {', '.join(names[:10])}", str(path))
            array = archive[found]
    except BadOption:
        raise
    except Exception as error:  # zipfile and zlib raise a dozen kinds for a damaged archive
        raise BadOption("input", f"must be an npz file that can be read ({type(error).__name__})", str(path)) from None
    yield from (Row(f"{path} row {n}", row) for n, row in enumerate(array))


def read_csv(path: Path, reader: Reader) -> Iterator[Row]:
    """The rows of a CSV file with a header, a line at a time. Its columns may stand in any order; those that the model does not read
    are left out, which is said."""
    check_file("input", path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = (line for line in file if line.strip())
            first = next(lines, "")
            delimiter = max(",;\t", key=first.count)
            header = [cell.strip() for cell in next(csv.reader([first], delimiter=delimiter, skipinitialspace=True), [])]
            places = reader.places_in(header, path)
            if other := [name for place, name in enumerate(header) if place not in places]:
                say(f"input: {path} has columns that the model does not read: {shortened(', '.join(other), 100)}")
            for number, cells in enumerate(csv.reader(lines, delimiter=delimiter, skipinitialspace=True)):
                odd = len(cells) != len(header)
                content = Unreadable(f"has {len(cells)} cells, and the header {len(header)}") if odd else Cells(cells[p] for p in places)
                yield Row(f"{path} row {number}", content)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or shortened(error, 80)
        raise BadOption("input", f"must be a CSV file that can be read ({reason})", str(path)) from None


class Cells(tuple[Any, ...]):
    """Values of a table row in the order of the model's columns."""


# ---------------------------------------------------------------- a row as the model's data set had it


class Reader:
    """Rows of one model: `read` gives one, `together` makes a batch of several."""

    def __init__(self, facts: Mapping[str, Any], *, side: int, seed: int) -> None:
        reading = reading_in(facts)
        self.kind, self.flip, self.columns = reading["kind"], reading["flip"], tuple(reading["columns"])
        self.files = reading.get("files")
        self.shape, self.side, self.seed = tuple(facts["shape"]), side, seed
        self.encoder = Encoder.from_json(facts["fitted"]) if self.kind == "table" else None
        self.count = len(self.encoder.mean) if self.encoder else 0  # columns of numbers

    @property
    def width(self) -> int:
        """Columns of a table."""
        assert self.encoder is not None
        return self.count + len(self.encoder.levels)

    def places_in(self, header: Sequence[str], path: Path) -> list[int]:
        """Where each of the model's columns stands; of those that share a name, the first is the first. By place alone where the model
        was trained on numbers without names."""
        if self.kind != "table":
            raise BadOption("input", "must be images: the model does not read tables", str(path))
        if not self.columns and self.width == self.count == len(header):
            return list(range(self.width))
        places: list[int] = []
        for name in self.require_columns():
            place = next((n for n, known in enumerate(header) if known == name and n not in places), None)
            if place is None:
                raise BadOption("input", f"must have the columns that the model reads; it has no {name!r}", str(path))
            places.append(place)
        return places

    def require_columns(self) -> tuple[str, ...]:
        """NOTE: without their names, the columns of another table could be taken for each other."""
        if not self.columns:
            rule = f"must be rows of {self.width} numbers" if self.width == self.count else "can't be told by its columns"
            raise BadOption("input", f"{rule}: the checkpoint lacks the names of the columns that the model was trained on")
        return self.columns

    def crops(self, views: int) -> list[Crop | None]:
        """For each view that is cut out of an image file anew, how; the views of other rows are made of view 0."""
        own = [v for v in range(1, views) if self.kind == "files" and not (v == 1 and self.flip)]
        return [None, *(Crop(fold_in(self.seed, VIEW, view), bool(self.flip), VIEW_SCALE) for view in own)]

    def read(self, content: Any, number: int, crops: Sequence[Crop | None] = (None,)) -> Any:
        """Images (1 + crops, C, H, W), or the cells of a table row; raises Unreadable. `number` draws the crops."""
        if isinstance(content, Unreadable):
            raise content
        if self.kind == "table":
            return self._cells(content)
        if isinstance(content, Path):
            return self._opened(content, number, crops)
        if hasattr(content, "getbands"):
            return self._pixels(content, number, crops)
        array = as_array(content)
        if array.dtype != np.uint8:
            raise Unreadable(f"must be uint8 pixels, got {array.dtype} {array.shape}")
        if self.kind == "files":
            return self._pixels(self._image(array), number, crops)
        channels, height, width = self.shape
        if array.shape not in ({(height, width), (height, width, 1)} if channels == 1 else {(height, width, channels)}):
            raise Unreadable(f"must be pixels of the model's size ({height} x {width}, {channels} channels), got {array.shape}")
        return array.reshape(1, height, width, channels).transpose(0, 3, 1, 2)

    def together(self, rows: list[Any]) -> np.ndarray:
        """A batch of what `read` gave: (N, V, C, H, W) uint8, or (N, F) float32."""
        if self.encoder is None:
            return np.stack(rows)
        numbers, categories = (np.array([row[part] for row in rows]) for part in (0, 1))
        return self.encoder.encode(Table(numbers.reshape(len(rows), -1), [coded(column) for column in categories.T]))

    # ------------------------------------------------ images

    def _opened(self, path: Path, number: int, crops: Sequence[Crop | None]) -> np.ndarray:
        from PIL import Image

        try:
            check_file("input", path)
            with Image.open(path) as file:
                return self._pixels(file, number, crops)
        except BadOption as error:
            raise Unreadable(error.rule if path.exists() else "there is no such file") from None
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for a damaged file
            raise Unreadable(f"can't be read as an image ({type(error).__name__})") from None

    def _pixels(self, image: Any, number: int, crops: Sequence[Crop | None]) -> np.ndarray:
        try:
            if self.kind == "files":
                rgb = eight_bit(image).convert("RGB")
                return np.stack([square(rgb, self.side, crop, number) for crop in crops])
            return fitted_pixels(image, self.shape)[None]
        except (OSError, ValueError) as error:
            raise Unreadable(f"can't be read as an image ({shortened(error, 80)})") from None

    @staticmethod
    def _image(array: np.ndarray) -> Any:
        from PIL import Image

        if array.ndim == 3 and array.shape[2] == 1:
            array = array[..., 0]
        if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in MODES):
            raise Unreadable(f"must be pixels (H, W) or (H, W, C), got {array.shape}")
        return Image.fromarray(np.ascontiguousarray(array))

    # ------------------------------------------------ table rows

    def _cells(self, content: Any) -> tuple[list[float], list[str]]:
        """Numbers and categories."""
        assert self.encoder is not None
        if isinstance(content, Mapping):
            names = self.require_columns()
            if absent := [name for name in names if name not in content]:
                raise Unreadable(f"has no {', '.join(map(repr, absent[:5]))}")
            content = Cells(content[name] for name in names)
        if isinstance(content, Cells):
            return [number(v, n, self.columns) for n, v in enumerate(content[: self.count])], [text(v) for v in content[self.count :]]
        if self.encoder.levels:
            raise Unreadable(f"must be a record with the {self.width} columns that the model reads: some are categories")
        array = as_array(content) if not isinstance(content, Path) else np.empty(0, "U1")
        if array.shape != (self.width,) or array.dtype.kind not in "fiu":
            raise Unreadable(f"must be a row of {self.width} numbers, got {array.dtype} {array.shape}")
        if not np.isfinite(array).all():
            raise Unreadable("must be finite numbers, and has NaN or infinity")
        return array.astype(np.float64).tolist(), []


def fitted_pixels(image: Any, shape: Sequence[int]) -> np.ndarray:
    """An image of Pillow's, cropped and resized to the shape that arrays of images have: (C, H, W) uint8."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    if channels not in MODES:
        raise ValueError(f"no image file has {channels} channels")
    found = ImageOps.fit(eight_bit(image).convert(MODES[channels]), (width, height), Image.Resampling.BILINEAR)
    return np.asarray(found).reshape(height, width, channels).transpose(2, 0, 1).copy()


def number(value: Any, place: int = 0, columns: Sequence[str] = ()) -> float:
    """A cell as a number; NaN where it is missing."""
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Unreadable(f"must have a number as {columns[place] if columns else place!r}, got {shortened(value, 40)!r}") from None


def text(value: Any) -> str:
    """A cell as a category; empty where it is missing."""
    found = "" if value is None or value != value else str(value).strip()
    return "" if found.lower() in MISSING else found


def in_chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
