"""Text files of columns, read a block of lines at a time with pyarrow; what can be wrong with one is said with its line.

pyarrow is imported late: it takes time and memory, and few runs read such a file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inputs.memory import give_back_memory, kept_aside
from inputs.rows import release
from utils import BadOption, check_file, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = frozenset({"", "?", "na", "nan", "null", "none"})
LARGEST = float(np.finfo(np.float32).max)  # what a model reads is float32
BLOCK = 1 << 20  # bytes that are parsed at once; no line may be longer
LINE_END, BLANK_LINES = re.compile(rb"\r\n|\n|\r"), re.compile(rb"(?:\xef\xbb\xbf)?(?:[ \t]*(?:\r\n|\n|\r))+")
SPACED_QUOTE = re.compile(rb'"[^"]*"|(?<=[,;\t])[ \t]+(?=")')


class Categories(NamedTuple):
    """A column of text: its values without blanks around them, and for each row which of them it has."""

    levels: list[str]
    codes: np.ndarray


class Columns(NamedTuple):
    """What a file holds. Two columns of one name are two columns."""

    numbers: np.ndarray  # (rows, a), NaN where missing
    numeric: list[str]  # their names
    categories: list[Categories]  # (b)
    textual: list[str]
    target: Categories


def read_columns(path: Path, target: str) -> Columns:
    """A column is of numbers if every value in it is a number or missing; `target` never is."""
    check_file("dataset", path)
    text: set[int] = set()
    while True:
        found = _read(path, target, text)
        if found is not None:
            give_back_arrows_memory()
            return found
        # Some column had numbers at first and text further down: now it is known which, and they are read as text from the start.


def _read(path: Path, target: str, text: set[int]) -> Columns | None:
    """None if columns are text that `text` lacks, found when others were read already; they are then in it."""
    lines = _Lines(path)
    row, again = 0, False
    for columns in lines.blocks():
        if not row:
            names = [str(column[0].as_py()).strip() for column in columns]
            place = check_names(names, target, path)
            columns = [column.slice(1) for column in columns]
            text |= {place, *(i for i, column in enumerate(columns) if i not in text and numbers_of(column) is None)}
            most = min(lines.count, path.stat().st_size // len(names)) + 1  # rows; memory that is never written is never taken
            numeric, textual = ([i for i in range(len(names)) if (i in text) is of_text] for of_text in (False, True))
            numbers = kept_aside((most, len(numeric)))
            codes = np.empty((most, len(textual)), np.int32, order="F")
            levels: list[dict[str, int]] = [{} for _ in textual]
        at = slice(row, row + len(columns[0]))
        for j, i in enumerate(numeric):
            found = numbers_of(columns[i])
            if found is None:
                text.add(i)
                again = True
            else:
                check_size(found, names[i], str(path), row)
                numbers[at, j] = found
        for j, i in enumerate(textual):
            codes[at, j] = _codes(columns[i], levels[j])
        release(numbers)
        row = at.stop
    if not row:
        raise BadOption("dataset", "must be a CSV file with a header and rows", str(path))
    if again:
        return None
    categories = {i: Categories(list(levels[j]), codes[:row, j]) for j, i in enumerate(textual)}
    own = categories.pop(place)
    return Columns(numbers[:row], [names[i] for i in numeric], list(categories.values()), [names[i] for i in categories], own)


def check_names(names: list[str], target: str, path: Path) -> int:
    """The place of the target among the names."""
    if target not in names:
        raise BadOption("dataset", f"has no column {target!r}{did_you_mean(target, names)}; it has {', '.join(names[:20])}", str(path))
    if names.count(target) > 1:  # left among the columns, the other one would tell the class
        raise BadOption("dataset", f"must have one column {target!r}, and has {names.count(target)}", str(path))
    if len(names) < 2:
        raise BadOption("dataset", f"must have columns besides {target!r}", str(path))
    return names.index(target)


def check_size(numbers: np.ndarray, name: str, source: str, row: int = 0) -> None:
    """`row`: how many rows stand before these."""
    if (beyond := np.abs(numbers) > LARGEST).any():
        first = int(beyond.argmax())
        rule = f"must hold finite numbers, up to {LARGEST:.3g}; column {name!r} has {numbers[first]:g} in line {row + first + 2}"
        raise BadOption("dataset", rule, source)


# ---------------------------------------------------------------- a column


def numbers_of(column: pa.Array) -> np.ndarray | None:
    """As float64, NaN where missing; None if some value is no number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return _values(pc.cast(column, pa.float64()), np.float64)
    except pa.ArrowInvalid:
        pass
    encoded = column.dictionary_encode()
    values = [value.strip() for value in encoded.dictionary.to_pylist()]
    try:
        numbers = pc.cast(text_of("nan" if value.lower() in MISSING else value for value in values), pa.float64())
    except pa.ArrowInvalid:
        return None
    return _values(numbers, np.float64)[_values(encoded.indices, np.int32)]


def _values(array: pa.Array, kind: type[np.generic]) -> np.ndarray:
    """Of an array without missing values; its own to_numpy would import pandas."""
    if not len(array):
        return np.empty(0, kind)
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * np.dtype(kind).itemsize)


def text_of(values: Iterable[object]) -> pa.Array:
    """Of the values as Python shows them. NOTE: pa.array would import pandas where it is installed, which takes 50 MB."""
    import pyarrow as pa

    text = [str(value).encode() for value in values]
    ends = np.cumsum([0, *map(len, text)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(text), pa.py_buffer(ends), pa.py_buffer(b"".join(text)))


def coded(values: Sequence[str] | np.ndarray) -> Categories:
    levels: dict[str, int] = {}
    codes = [levels.setdefault(str(value), len(levels)) for value in values]
    return Categories(list(levels), np.array(codes, np.int32))


def categories_of(column: pa.Array) -> Categories:
    levels: dict[str, int] = {}
    codes = _codes(column, levels)
    return Categories(list(levels), codes)


def _codes(column: pa.Array, levels: dict[str, int]) -> np.ndarray:
    """The number of each row's value among `levels`, which learns those that are new."""
    encoded = column.dictionary_encode()
    of = [levels.setdefault(value.strip(), len(levels)) for value in encoded.dictionary.to_pylist()]
    return np.array(of, np.int32)[_values(encoded.indices, np.int32)]


def give_back_arrows_memory() -> None:
    """Of some 40 MB that its pool would keep."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    give_back_memory()


# ---------------------------------------------------------------- lines


class _Lines:
    """What must be known of a file before it is parsed, found by reading it once."""

    def __init__(self, path: Path) -> None:
        self.path, self.count, spaced, last = path, 0, False, b""
        try:
            with path.open("rb") as file:
                start = block = file.read(BLOCK)
                while block:
                    self.count += block.count(b"\n") + block.count(b"\r")
                    # pyarrow takes a quote behind a blank for text
                    spaced = spaced or b' "' in last + block or (b'\t"' in block and bool(re.search(rb'[,;\t]\t+"', last + block)))
                    last, block = block[-1:], file.read(BLOCK)
        except OSError as error:
            raise BadOption("dataset", f"must be a file that can be read ({error.strerror})", str(path)) from None
        blank = BLANK_LINES.match(start)
        self.skipped = len(LINE_END.findall(blank[0])) if blank else 0
        first = LINE_END.split(start[len(blank[0]) if blank else 0 :], maxsplit=1)[0]
        header = re.sub(rb'"[^"]*"', b"", first)
        self.delimiter = max((",", ";", "\t"), key=lambda mark: header.count(mark.encode()))
        self.block = max(BLOCK, 64 * len(first))
        self.most_columns = first.count(self.delimiter.encode()) + 1  # more, where names hold delimiters
        self.source: Any = io.BytesIO(SPACED_QUOTE.sub(_without_blanks, path.read_bytes())) if spaced else str(path)

    def blocks(self) -> Iterator[list[pa.Array]]:
        """Columns of text, some lines at a time; the header is the first row."""
        import pyarrow as pa
        from pyarrow import csv

        wrong: list[str] = []

        def odd(row: Any) -> str:
            if row.text.strip():
                unclosed = row.text.count('"') % 2
                other = f"has {row.expected_columns} columns, and {row.actual_columns} in line {row.number}"
                wrong.append(f"must be a CSV file (a quote opens in line {row.number} and does not close)" if unclosed else other)
            return "skip"

        # One thread: with more, nobody knows the number of a line.
        read = csv.ReadOptions(autogenerate_column_names=True, use_threads=False, block_size=self.block, skip_rows=self.skipped)
        parse = csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=odd)
        kinds = {f"f{i}": pa.string() for i in range(self.most_columns)}
        as_text = csv.ConvertOptions(column_types=kinds, strings_can_be_null=False)
        try:
            for batch in csv.open_csv(self.source, read, parse, as_text):
                if wrong:
                    break
                if batch.num_rows:
                    yield [column.cast(pa.string()) for column in batch.columns]
        except pa.ArrowInvalid as error:
            raise BadOption("dataset", _rule_of(str(error), self.block), str(self.path)) from None
        if wrong:
            raise BadOption("dataset", wrong[0], str(self.path))


def _without_blanks(match: re.Match[bytes]) -> bytes:
    return match[0] if match[0].startswith(b'"') else b""


def _rule_of(reason: str, block: int) -> str:
    """The rule that a file breaks, from pyarrow's words."""
    if "UTF8" in reason:
        return "must be a file that can be read (not UTF-8 text)"
    if "straddl" in reason:
        return f"must be a CSV file (a line is longer than {block >> 20} MB, or a quote does not close)"
    if "mpty CSV" in reason:
        return "must be a CSV file with a header and rows"
    return f"must be a CSV file ({reason[:120]})"
