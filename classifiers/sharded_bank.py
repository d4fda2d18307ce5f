"""A bank in parts: each of several processes keeps the embeddings of its share of the rows, and all of them search together.

Queries go to every process. Each searches its rows; what it finds goes back to who asked, who keeps the k nearest of all by exact distance,
then id, as one bank ranks them, and fetches the embeddings of these from where they are. Labels, and the numbers of copies, are those
of the data set, which every process has.

NOTE: so all processes must search, and take, equally often and in the same order; who has nothing to look up does it with no rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from classifiers.bank import PACKED, Bank
from classifiers.classifier import require_no_nan
from classifiers.heads import Head
from classifiers.index import MISSING, Neighbors, blocks, checked_rows, excluded, ordered, rows_of
from ranks import here
from utils import BadOption

AT_ONCE = 1024  # queries whose neighbors' embeddings are held at once
PIECE = 64 << 20  # bytes of embeddings that one process gets of all others at a time


def in_parts(head: Head) -> bool:
    """Whether each process keeps its part of the head's bank only."""
    return head.wants_bank and head.shard_bank and here().world > 1


class ShardedBank(Bank):
    """Row i of all has id i; this process keeps those of `here().part(rows)`, in `own`."""

    in_parts = True

    def __init__(self, own: Bank, labels: Tensor, size: int | None = None) -> None:
        """`labels`: of all rows. `size`: how many there are on all processes, where these are only a sample."""
        super().__init__(own.dim, kind=own.kind, recall=own.recall, copies=own.copies)
        self._own, self._labels, self._size = own, labels, len(labels) if size is None else size
        world = here().world
        self._bounds = torch.tensor([len(labels) * rank // world for rank in range(world + 1)])  # as here().part has them

    @classmethod
    def of(cls, stream: Iterator[tuple[Tensor, Tensor]], labels: Tensor, options: Mapping[str, Any]) -> ShardedBank:
        """Of the rows that this process embeds, in blocks (ids, embeddings). `labels`: of all rows. `options` of a bank."""
        lost = 0.0

        def finite() -> Iterator[tuple[Tensor, Tensor]]:
            nonlocal lost
            for numbers, embeddings in chain([first], stream):
                lost += int((~embeddings.isfinite()).any(1).sum())
                yield numbers, embeddings.nan_to_num(0, 0, 0)

        first = next(stream)  # also where there are fewer rows than processes: one that counts as none
        own = Bank(first[1].shape[1], **options)
        ids = torch.arange(len(labels))[here().part(len(labels))]
        own.refresh(labels[ids], ids, finite())
        require_no_nan(int(here().summed({"rows": lost})["rows"]), len(labels))  # said by all, or others would wait for who says it
        return cls(own, labels)

    @property
    def own(self) -> Bank:
        return self._own

    @property
    def labels(self) -> Tensor:
        return self._labels

    @property
    def ids(self) -> Tensor:
        return torch.arange(len(self._labels))

    @property
    def embeddings(self) -> Tensor:
        raise BadOption("shard_bank", "leaves no process all embeddings", len(self))

    # ------------------------------------------------ neighbors out

    @torch.inference_mode(False)
    @torch.no_grad()
    def search(self, queries: Any, k: int, exclude: Any = None) -> Neighbors:
        device = queries.device if isinstance(queries, Tensor) else torch.device("cpu")
        self._check_k(k)
        rows = rows_of(queries, self.dim, "queries")
        banned = excluded(exclude, len(rows)).long()
        asked = here().exchanged([as_bytes(rows, banned)] * here().world)
        every, barred = from_bytes(torch.cat(asked), (torch.float32, self.dim), (torch.long, banned.shape[1]))
        found = as_bytes(*self._nearest(every, k, barred)).split([len(part) for part in asked])
        answers = here().exchanged(found, [len(rows)] * here().world)
        kinds = (torch.float64, k), (torch.float32, k), (torch.long, k)
        exact, distance, index = (torch.cat(of_all, 1) for of_all in zip(*(from_bytes(part, *kinds) for part in answers), strict=True))
        order, exact = ordered(exact, index, index >= 0)
        index = index.gather(1, order[:, :k]).masked_fill(exact[:, :k] == math.inf, MISSING)
        distance = distance.gather(1, order[:, :k]).cummax(1).values  # those of float32, never falling: see index.rank
        embedding, label, mask = self.take(index)
        return Neighbors(*(part.to(device) for part in (distance, index, label, embedding, mask)))

    def _nearest(self, queries: Tensor, k: int, banned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows here, for the queries of all: distances in float64, in float32 as a bank gives them, and ids; (B, k) each."""
        checked_rows(queries, self.dim, "queries")  # the same mistake everywhere, also where no row is
        shape = len(queries), k
        exact, distance = torch.full(shape, math.inf, dtype=torch.float64), torch.full(shape, math.inf)
        index, few = torch.full(shape, MISSING), min(k, len(self._own))
        for at in blocks(len(queries) if few else 0, AT_ONCE):
            near = self._own.search(queries[at], few, banned[at])
            wide = queries[at].double()[:, None]
            far = -(wide * near.embedding).sum(2) if self.kind == "ip" else (wide - near.embedding).square_().sum(2)
            exact[at, :few], distance[at, :few], index[at, :few] = far.masked_fill(~near.mask, math.inf), near.distance, near.index
        return exact, distance, index

    @torch.inference_mode(False)
    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wanted, place = index.cpu().unique(return_inverse=True)  # ascending, so those of one process stand together
        cuts = torch.searchsorted(wanted, self._bounds)
        there = slice(int(cuts[0]), int(cuts[-1]))
        counts = cuts.diff().tolist()
        asked = here().exchanged(wanted[there].split(counts))
        rows, _, mask = self._own.take(torch.cat(asked))
        answers = here().exchanged(as_bytes(rows, mask[:, None]).split([len(part) for part in asked]), counts)
        embedding, known = torch.zeros(len(wanted), self.dim), torch.zeros(len(wanted), dtype=torch.bool)
        embedding[there], found = from_bytes(torch.cat(answers), (torch.float32, self.dim), (torch.bool, 1))
        known[there] = found[:, 0]
        label = self._labels[wanted.clamp(0, len(self._labels) - 1)].masked_fill(~known, 0)
        return tuple(part[place].to(index.device) for part in (embedding, label, known))  # type: ignore[return-value]

    # ------------------------------------------------ what all do together

    def class_sums(self, num_classes: int) -> Tensor:
        sums = torch.zeros(num_classes, self.dim, dtype=torch.float64)  # so that the order of sums is below what float32 can tell
        own = self._own
        for at in blocks(len(own), AT_ONCE):
            sums.index_add_(0, own.labels[at], own.embeddings[at].double())
        return here().sum(sums).float()

    def every(self, step: int) -> tuple[Tensor, Tensor]:
        return self.take(torch.arange(0, len(self), step))[:2]

    def turns(self, count: int, size: int) -> list[slice]:
        part, most = here().part(count), -(-count // here().world)
        starts = range(part.start, part.start + max(1, most), size)
        return [slice(min(start, part.stop), min(start + size, part.stop)) for start in starts]

    def of_all(self, parts: list[Tensor]) -> Tensor:
        return here().gathered(parts)

    def holding(self, index: Tensor) -> Bank:
        ids = index.unique()
        embedding, label, mask = self.take(ids)
        held = Bank(self.dim, kind="ip" if self.kind == "ip" else "flat")
        held.add(embedding[mask], label[mask], ids[mask])
        return held

    @torch.inference_mode(False)
    def sample(self, count: int) -> Bank:
        drawn = torch.randperm(len(self))[:count]
        part = here().part(len(self))
        mine = drawn[(drawn >= part.start) & (drawn < part.stop)] - part.start
        return ShardedBank(self._own._some(mine, "ip" if self.kind == "ip" else "flat"), self._labels, count)

    # ------------------------------------------------ its rows stay as they are

    def _write(self, *_: Any) -> None:
        raise BadOption("shard_bank", "is for a bank whose rows stay; it was asked to change one of", len(self))

    def add(self, *_: Any) -> Any:
        self._write()

    def refresh(self, *_: Any) -> None:
        self._write()

    def pack(self) -> Any:
        raise BadOption("shard_bank", "leaves no process all rows to save", len(self))

    def in_pieces(self) -> tuple[Mapping[str, Mapping[str, Tensor]], dict[str, Any]]:
        rows = len(self)
        shapes = {"embedding": [rows, self.dim]} | {name: [rows] for name in ("label", "id", "birth")}
        shapes |= {} if self.copies is None else {"copies": [len(self.copies)]}
        facts = {name: getattr(self._own, name) for name in PACKED} | {"_next_id": rows, "_next_birth": rows, "shapes": shapes}
        return Pieces(self), facts


class Pieces(Mapping[str, Mapping[str, Tensor]]):
    """All rows for the first process, a few at a time. All must ask for the same piece: the others give theirs and get none."""

    def __init__(self, bank: ShardedBank) -> None:
        self.bank, self.size = bank, max(1, PIECE // (4 * bank.dim))

    def __len__(self) -> int:
        return max(1, -(-len(self.bank) // self.size))

    def __iter__(self) -> Iterator[str]:
        return (f"bank-{number:05d}" for number in range(len(self)))

    def __getitem__(self, name: str) -> Mapping[str, Tensor]:
        if name not in list(self):
            raise KeyError(name)
        first = list(self).index(name) * self.size
        ids = torch.arange(first, min(first + self.size, len(self.bank)))
        embedding, label, _ = self.bank.take(here().only_first(lambda: ids, lambda: ids[:0]))
        piece = {"embedding": embedding, "label": label, "id": ids, "birth": ids}
        return piece if first or self.bank.copies is None else {**piece, "copies": self.bank.copies}


# ---------------------------------------------------------------- rows of several numbers, on their way


def as_bytes(*parts: Tensor) -> Tensor:
    """Columns of several types beside each other, (B, bytes)."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def from_bytes(rows: Tensor, *kinds: tuple[torch.dtype, int]) -> list[Tensor]:
    """The columns again, by type and number."""
    sizes = [kind.itemsize * count for kind, count in kinds]
    return [
        part.clone(memory_format=torch.contiguous_format).view(kind) for part, (kind, _) in zip(rows.split(sizes, 1), kinds, strict=True)
    ]
