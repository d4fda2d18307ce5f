"""A bank larger than memory: rows in a memory-mapped file, and FAISS's inverted lists of smaller codes on disk, built from a stream.

A search asks the lists, whose codes are float16 or int8, for four times as many rows as are wanted; only these are read from the file of
rows, in float32, and ranked exactly. Without codes every row is looked at, and the answer is exact. Memory holds the centers of the lists,
labels, and a few numbers a row; what is read of the files stays in memory only as long as nobody else needs it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classifiers.approximate import ENOUGH, RECALL, Proposer
from classifiers.bank import Bank
from classifiers.faiss_library import load_faiss, silenced
from classifiers.faster_scan import FasterScan
from classifiers.index import ROUNDING, blocks, checked_rows, integers, squared_lengths
from classifiers.scan import scan, scan_in_float64
from inputs import files
from inputs.indexed import FORMAT, read_index, verify, write_index
from utils import BadOption, one_of, say

CODES = {"float16": "SQfp16", "int8": "SQ8", "none": ""}
ROWS, LABELS, INDEX, LISTS = "rows.f32", "labels.i64", "lists.index", "lists.ivfdata"
LEARNED = 64  # rows for each list that its center is learned from
PART = 1 << 28  # bytes of rows that go to the lists at a time


class DiskProposer(Proposer):
    """Inverted lists in a folder."""

    def __init__(self, folder: Path, rows: int, codes: str) -> None:
        faiss = load_faiss()
        self.slot_of = torch.arange(rows)
        with silenced(1):
            self.use(faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR))
        self.text = f"IVF{self.lists.nlist} of {codes} on disk"
        faiss.downcast_InvertedLists(self.lists.invlists).prefetch_nthread = 0  # a thread for each list would be made in each search


class DiskBank(Bank):
    """What `build_bank` wrote. It is searched as every bank is; its rows stay as they are, with the numbers from 0 as ids."""

    def __init__(self, folder: Path, *, recall: float = RECALL, check: bool = True) -> None:
        """`check`: every byte against the digests first. FAISS believes what it reads: leave it out only where nobody else can write."""
        index = verify(folder) if check else read_index(folder)
        facts = index["facts"].get("disk_bank")
        if not isinstance(facts, dict):
            raise BadOption("bank", "must be a folder that build_bank wrote", str(folder))
        rows, dim = int(facts["rows"]), int(facts["dim"])
        super().__init__(dim, kind="flat", recall=recall)
        self.folder, self._size = folder, rows
        self._file = mapped(folder / ROWS, np.float32, (rows, dim))
        advise(self._file, "RANDOM")
        self._rows = torch.from_numpy(self._file)
        self._labels = torch.from_numpy(mapped(folder / LABELS, np.int64, (rows,)))
        self._ids = self._births = torch.arange(rows)
        self._next_id = self._next_birth = rows
        self._faster_scan = FasterScan(ever=False)  # it would be in memory
        self._proposer = DiskProposer(folder, rows, str(facts["codes"])) if INDEX in index["files"] else None

    def _prepare(self) -> None:
        pass  # the lists are there

    def _parts(self) -> Iterator[slice]:
        """Of all rows; what was read of one is given back before the next."""
        advise(self._file, "SEQUENTIAL")
        try:
            for part in blocks(self._size, PART // (4 * self.dim)):
                yield part
                given_back(self._file)
        finally:
            advise(self._file, "RANDOM")

    def _row_lengths(self) -> Tensor:
        if self._lengths is None:
            self._lengths = torch.cat([squared_lengths(self._rows[part]) for part in self._parts()])
        return self._lengths

    def _scanned(self, queries: Tensor, count: int, rounding: float) -> tuple[Tensor, Tensor]:
        lengths = self._row_lengths()
        found: list[tuple[Tensor, Tensor]] = []
        for part in self._parts():
            rows, few = self._rows[part], min(count, part.stop - part.start)
            near = scan(queries, rows, lengths[part], few, False) if rounding == ROUNDING else scan_in_float64(queries, rows, few, False)
            found = [*found, (near[0].double(), near[1] + part.start)]
            scores, slots = (torch.cat(of_parts, 1) for of_parts in zip(*found, strict=True))
            best = scores.topk(min(count, scores.shape[1]), largest=False)
            found = [(best.values, slots.gather(1, best.indices))]
        return found[0]

    def _found(self, queries: Any, k: int, exclude: Any) -> tuple[Tensor, Tensor]:
        found = super()._found(queries, k, exclude)
        given_back(self._file)
        return found

    def __reduce__(self) -> Any:
        return _opened, (self.folder, self.recall)

    def _write(self, *_: Any) -> None:
        raise BadOption("bank", "must stay as it is: its rows are on disk", str(self.folder))

    def refresh(self, *_: Any) -> None:
        self._write()

    def pack(self) -> Any:
        raise BadOption("bank", "is too large for a checkpoint; its folder can be copied", str(self.folder))


def _opened(folder: Path, recall: float) -> DiskBank:
    return DiskBank(folder, recall=recall, check=False)


def mapped(path: Path, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A file as an array. What would be written to it would not reach the file."""
    if path.stat().st_size != math.prod(shape) * np.dtype(kind).itemsize:
        raise BadOption("bank", f"is damaged: {path.name} does not hold what the facts say", str(path.parent))
    return np.memmap(path, dtype=kind, mode="c", shape=shape)


def given_back(array: np.ndarray) -> None:
    """Pages of a file need no memory until they are read again."""
    advise(array, "DONTNEED")


def advise(array: np.ndarray, how: str) -> None:
    """Tells the kernel how a file will be read. NOTE: around a single row (RANDOM) it would read megabytes ahead, which push others out."""
    inside, advice = getattr(array, "_mmap", None), getattr(mmap, f"MADV_{how}", None)
    if inside is not None and advice is not None:
        inside.madvise(advice)


# ---------------------------------------------------------------- building


def build_bank(folder: Path, dim: int, stream: Iterable[tuple[Any, Any]], *, codes: str = "int8", recall: float = RECALL) -> DiskBank:
    """Rows as they come, in blocks (embeddings, labels), into a folder that does not hold anything yet. `codes`: float16, int8 or none."""
    text = CODES[one_of("codes", codes, tuple(CODES))]
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise BadOption("bank", "must be written to an empty folder", str(folder))
    rows = _written(folder, dim, stream)
    names = [ROWS, LABELS]
    if text:
        _make_lists(folder, mapped(folder / ROWS, np.float32, (rows, dim)), text)
        names += [INDEX, LISTS]
    entries = {}
    for name in names:
        handle = os.open(folder / name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        entries[name] = {"file": name, "sha256": files.sha256_of(folder / name), "size": (folder / name).stat().st_size}
    write_index(folder, {"format": FORMAT, "files": entries, "facts": {"disk_bank": {"rows": rows, "dim": dim, "codes": codes}}})
    return DiskBank(folder, recall=recall, check=False)


def _written(folder: Path, dim: int, stream: Iterable[tuple[Any, Any]]) -> int:
    count = 0
    with open(folder / ROWS, "xb") as rows, open(folder / LABELS, "xb") as labels:
        for embeddings, classes in stream:
            block, _ = checked_rows(embeddings, dim, "embeddings")
            rows.write(block.numpy().data)
            labels.write(integers(classes, len(block), "labels").contiguous().numpy().data)
            count += len(block)
    if not count:
        raise BadOption("bank", "must have rows", str(folder))
    return count


def _make_lists(folder: Path, rows: np.ndarray, text: str) -> None:
    """Centers from some of the rows; then the codes of a part of the rows after the other, each part in a file, and all of them merged."""
    from faiss.contrib.ondisk import merge_ondisk

    faiss = load_faiss()
    count, dim = rows.shape
    lists = max(1, min(math.isqrt(count), count // ENOUGH))
    say(f"bank: {count:,} rows of {dim} to {lists:,} lists on disk")
    parts: list[str] = []
    sample, every = [], max(1, count // (LEARNED * lists))
    for at in blocks(count, PART // (4 * dim)):
        sample.append(rows[at][::every].copy())
        given_back(rows)
    with silenced(1):
        index = faiss.index_factory(dim, f"IVF{lists},{text}")
        index.train(np.concatenate(sample))
        for at in blocks(count, PART // (4 * dim)):
            index.add_with_ids(rows[at], np.arange(at.start, at.stop))
            parts.append(str(folder / f"{len(parts)}.part"))
            faiss.write_index(index, parts[-1])
            index.reset()
            given_back(rows)
        merge_ondisk(index, parts, str(folder / LISTS))
    faiss.write_index(index, str(folder / INDEX))
    for path in parts:
        os.unlink(path)
