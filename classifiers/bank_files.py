"""A bank in a folder: safetensors files of some of its rows each, and an index with the SHA-256 of every file (inputs/store.py).

What a run has learned can so be served by another program or machine, and a bank of many rows is written and read a file at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from classifiers.bank import Bank
from inputs import store
from inputs.indexed import read_index
from utils import BadOption

SHARD = 256 << 20  # bytes of embeddings in a file
FACTS = "bank"


class Shards(Mapping[str, Mapping[str, Tensor]]):
    """Rows in groups: made when they are asked for, so that one after the other is written."""

    def __init__(self, rows: Mapping[str, Tensor], size: int) -> None:
        self.copies = {"copies": {"copies": rows["copies"]}} if "copies" in rows else {}
        self.rows = {name: part for name, part in rows.items() if name != "copies"}
        self.size = size
        self.count = max(1, -(-len(rows["label"]) // size))

    def __len__(self) -> int:
        return self.count + len(self.copies)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.copies, *(f"rows-{number:05d}" for number in range(self.count))])

    def __getitem__(self, group: str) -> Mapping[str, Tensor]:
        if group in self.copies:
            return self.copies[group]
        first = int(group.removeprefix("rows-")) * self.size
        return {name: part[first : first + self.size] for name, part in self.rows.items()}


def save_bank(folder: Path, bank: Bank, shard: int = SHARD) -> None:
    """The bank as the new content of the folder; `shard`: bytes of embeddings in a file."""
    rows, facts = bank.pack()
    store.save(folder, Shards(rows, max(1, shard // (4 * bank.dim))), {FACTS: facts})


def load_bank(folder: Path) -> Bank:
    """Every byte is checked against the digests first. An approximate index is built again: it is no part of the files."""
    index = read_index(folder)
    packed = index["facts"].get(FACTS)
    if not isinstance(packed, dict):
        raise BadOption("bank", "must be a folder that save_bank wrote", str(folder))
    found: dict[str, list[Tensor]] = {}
    for group in sorted(index["files"]):
        for name, part in store.load(folder, group)[0][group].items():
            found.setdefault(name, []).append(part)
    try:
        rows = {name: torch.cat(found.pop(name)) for name in list(found)}
        return Bank.unpack(rows, packed)
    except (KeyError, TypeError, RuntimeError) as error:
        raise BadOption("bank", f"is not whole ({type(error).__name__})", str(folder)) from None
