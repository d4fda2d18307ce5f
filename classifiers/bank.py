"""The bank: embeddings, labels and a FAISS index; it answers "the k nearest, but not yourself".

The flat kinds are exact. A scan in float32 proposes a few rows more than asked for; their distances are computed anew, without
cancellation, and a bound on the scan's rounding tells for which queries no other row can belong among the k. Where it cannot tell, more
rows are proposed, in the end by a scan in float64. The other kinds are as good as their proposals; the order among those is exact too.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.approximate import MEASURED, RECALL, Proposer, check_kind, most_flat, recipe
from classifiers.faster_scan import FasterScan
from classifiers.index import (
    BLOCK,
    MISSING,
    ROUNDING,
    ROUNDING_64,
    Neighbors,
    blocks,
    checked_rows,
    excluded,
    gathered,
    integers,
    kept,
    rank,
    rank_products,
    slots_of,
    some_of,
    squared_lengths,
)
from classifiers.scan import Scan, least_distance, prove, scan, scan_in_float64
from utils import BadOption, one_of, say

EVICTIONS = ("fifo", "class-balanced")
PACKED = ("dim", "kind", "recall", "cap", "evict", "_next_id", "_next_birth")  # beside the rows
SLACK = 8  # rows proposed beyond those asked for
TRIED = 256  # rows that a faster scan is tried with


_banks: weakref.WeakSet[Bank] = weakref.WeakSet()


def _in_child() -> None:
    for bank in list(_banks):  # another thread of the parent may have held the lock
        bank._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Bank:
    """Embeddings with labels and ids. An id is a row's number in the training split, or assigned; it never changes.

    The properties `embeddings`, `labels` and `ids` show what is there now: rows in no particular order once some were evicted.
    What was computed in inference mode may be added: the bank's own tensors, and what it returns, are ordinary ones.

    Heads and evaluation store rows of length 1 (`classifiers.embedder.unit`). Other rows are found as exactly by the flat kinds. Where
    rows lie closer together than float32 products can tell, far from the origin or because an embedder gives nearly the same for
    all, queries are scanned a second time in float64.

    `copies`: for each id the lowest id of a row that is the same. Who excludes an id excludes all copies of its row.
    """

    def __init__(
        self, dim: int, *, kind: str = "auto", recall: float = RECALL, cap: int | None = None, evict: str = "fifo", copies: Any = None
    ) -> None:
        if dim < 1:
            raise BadOption("embed_dim", "must be at least 1", dim)
        if cap is not None and cap < 1:
            raise BadOption("cap", "must be at least 1", cap)
        check_kind(kind, dim)
        self.recall = recall  # of an approximate index
        self.dim, self.kind, self.cap, self.evict = dim, kind, cap, one_of("evict", evict, EVICTIONS)
        self.copies = None if copies is None else integers(copies, len(copies), "copies")
        self._size = self._next_id = self._next_birth = 0
        self._rows = torch.empty(0, dim)  # each of these has room to grow: only the first _size slots are rows
        self._labels, self._ids, self._births = (torch.empty(0, dtype=torch.long) for _ in range(3))
        self._forget()
        self._lock = threading.RLock()  # FAISS gives wrong answers, or crashes, when searched while rows are added
        _banks.add(self)

    def _forget(self) -> None:
        """Everything that is made of the rows."""
        self._lengths: Tensor | None = None  # squared
        self._proposer: Proposer | None = None
        self._faster_scan = FasterScan()
        self._sorted: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        """For copies, of a head or of a bank that will grow, and other processes: neither lock nor index, which is built anew."""
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_proposer", "_faster_scan")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock(), _proposer=None, _faster_scan=FasterScan())
        _banks.add(self)

    @property
    def embeddings(self) -> Tensor:
        return self._rows[: self._size]

    @property
    def labels(self) -> Tensor:
        return self._labels[: self._size]

    @property
    def ids(self) -> Tensor:
        return self._ids[: self._size]

    def require_classes(self, num_classes: int) -> None:
        """What a head demands of a bank to train with: a class without a row could never be voted for."""
        absent = [c for c, rows in enumerate(self.labels.bincount(minlength=num_classes).tolist()) if not rows]
        if absent:
            raise BadOption("bank", "must hold every class; it has no row of " + ", ".join(map(str, absent[:10])))

    # ------------------------------------------------ rows in

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, embeddings: Any, labels: Any, ids: Any = None) -> Tensor:
        """New rows, and who leaves if there are more than `cap`: how evaluation lets a bank grow. Returns the ids."""
        rows, _ = checked_rows(embeddings, self.dim, "embeddings")
        labels = integers(labels, len(rows), "labels")
        with self._lock:
            ids = torch.arange(self._next_id, self._next_id + len(rows)) if ids is None else integers(ids, len(rows), "ids")
            if len(ids.unique()) < len(ids) or torch.isin(ids, self.ids).any():
                raise BadOption("ids", "must be new: each row of the bank has an id of its own")
            births = torch.arange(self._next_birth, self._next_birth + len(rows))
            self._next_birth += len(rows)
            self._next_id = max(self._next_id, int(ids.max()) + 1) if len(ids) else self._next_id
            new, slots = torch.arange(len(rows)), torch.arange(self._size, self._size + len(rows))
            if self.cap is not None and self._size + len(rows) > self.cap:
                stays = kept(torch.cat([self.labels, labels]), torch.cat([self._births[: self._size], births]), self.cap, self.evict)
                new = stays[self._size :].nonzero()[:, 0]
                free = (~stays[: self._size]).nonzero()[:, 0]  # slots of those who leave; the others are appended
                slots = torch.cat([free, torch.arange(self._size, self._size + len(new) - len(free))])
            self._write(slots, rows[new], labels[new], ids[new], births[new])
        return ids

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, labels: Any, ids: Any, blocks: Iterable[tuple[Any, Any]]) -> None:
        """New content: rows `ids` with `labels`, as if all were added at once to an empty bank. Training makes its banks with this.

        Their embeddings come in `blocks` (ids of the block, embeddings), in any order; those of rows that `cap` does not let stay are
        dropped. What is in memory are the rows that stay and a block, never all blocks at once.
        """
        labels = integers(labels, len(labels), "labels")
        ids = integers(ids, len(labels), "ids")
        if len(ids.unique()) < len(ids):
            raise BadOption("ids", "must differ: each row of the bank has an id of its own")
        order = torch.arange(len(ids))
        stays = order if self.cap is None or len(ids) <= self.cap else kept(labels, order, self.cap, self.evict).nonzero()[:, 0]
        rows = gathered(blocks, ids[stays], self.dim)
        with self._lock:  # a search sees the old rows or the new ones
            self._size, self._rows = len(stays), rows
            self._labels, self._ids, self._births = labels[stays], ids[stays], self._next_birth + stays
            self._next_birth += len(ids)
            self._next_id = max(self._next_id, int(ids.max()) + 1) if len(ids) else self._next_id
            self._forget()

    def _write(self, slots: Tensor, rows: Tensor, labels: Tensor, ids: Tensor, births: Tensor) -> None:
        if not len(slots):
            return
        self._size = max(self._size, int(slots.max()) + 1)
        for name in ("_rows", "_labels", "_ids", "_births", "_lengths"):
            part = getattr(self, name)
            if part is not None and len(part) < self._size:
                room = max(self._size, min(2 * len(part), self.cap or 2 * len(part)))  # doubled, so that growing stays linear
                setattr(self, name, torch.cat([part, part.new_empty(room - len(part), *part.shape[1:])]))
        self._rows[slots], self._labels[slots], self._ids[slots], self._births[slots] = rows, labels, ids, births
        self._sorted, self._faster_scan = None, FasterScan()
        if self._lengths is not None:
            self._lengths[slots] = squared_lengths(rows)
        if self._proposer is not None:
            self._proposer.add(rows, slots)

    # ------------------------------------------------ neighbors out

    @torch.inference_mode(False)
    @torch.no_grad()
    def search(self, queries: Any, k: int, exclude: Any = None) -> Neighbors:
        """The k nearest rows of each query, without the rows whose ids `exclude` names, or their copies: (B,) or (B, M), -1 for none."""
        device = queries.device if isinstance(queries, Tensor) else torch.device("cpu")
        with self._lock:
            slots, distance = self._found(queries, k, exclude)
            mask, safe = slots >= 0, slots.clamp_min(0)
            embedding = F.embedding(safe, self._rows)  # (B, K, D)
            if not mask.all():
                embedding.masked_fill_(~mask[..., None], 0)
            index, label = self._ids[safe].masked_fill(~mask, MISSING), self._labels[safe].masked_fill(~mask, 0)
        return Neighbors(*(part.to(device) for part in (distance, index, label, embedding, mask)))

    @torch.inference_mode(False)
    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings (..., D), labels and mask of ids found earlier, or excluded; ids that have left the bank are masked."""
        with self._lock:
            slots = self._slots(index.cpu())
            mask, safe = slots >= 0, slots.clamp_min(0)
            embedding, label = self._rows[safe].masked_fill_(~mask[..., None], 0), self._labels[safe].masked_fill_(~mask, 0)
        return embedding.to(index.device), label.to(index.device), mask.to(index.device)

    def _slots(self, ids: Tensor) -> Tensor:
        if self._sorted is None:
            self._sorted = self.ids.sort()
        return slots_of(ids, self._sorted)

    def _found(self, queries: Any, k: int, exclude: Any) -> tuple[Tensor, Tensor]:
        """Slots (B, K), MISSING where there is none, and distances (B, K)."""
        rows, squared = checked_rows(queries, self.dim, "queries")
        self._check_k(k)
        banned = self._firsts(excluded(exclude, len(rows)))  # (B, M)
        self._prepare()
        search = self._approximate if self._proposer is not None else self._exact
        return search(rows, squared, k, banned)

    def _check_k(self, k: int) -> None:
        if not 1 <= k <= self._size:
            raise BadOption("k", f"must be from 1 to the number of rows in the bank ({self._size})", k)

    def _firsts(self, ids: Tensor) -> Tensor:
        """For each id the lowest one of a row that is the same; ids that were assigned later have no copies."""
        if self.copies is None:
            return ids
        known = (ids >= 0) & (ids < len(self.copies))
        return torch.where(known, self.copies[ids.clamp(0, len(self.copies) - 1)], ids)

    def _prepare(self) -> None:
        """The index, if the rows have changed enough to need another."""
        text = recipe(self.kind, self._size, self.dim)
        if text and (self._proposer is None or not self._proposer.serves(text, self._size)):
            if self.kind == "auto":
                say(f"bank: {text} ({self._size:,} rows; flat up to {most_flat(self.dim):,})")
            self._proposer = Proposer(text, self.embeddings)

    def _exact(self, rows: Tensor, squared: Tensor, k: int, banned: Tensor) -> tuple[Tensor, Tensor]:
        slots, distance = torch.empty(len(rows), k, dtype=torch.long), torch.empty(len(rows), k)

        def ranking(todo: Tensor, found: Tensor) -> Tensor:
            slots[todo], distance[todo], last = self._ranked(some_of(rows, todo), found, k, some_of(banned, todo))
            return last

        count = min(self._size, k + banned.shape[1] + SLACK)
        scans: list[tuple[Scan, int]] = [(partial(self._candidates, ROUNDING), 1), (partial(self._candidates, ROUNDING_64), 4)]
        faster = self._faster_scan.of(self.embeddings, self.kind == "ip", len(rows), count, partial(self._decided, k))
        left = prove(rows, squared, count, self._size, [(faster, faster.times), *scans] if faster else scans, ranking)
        if faster and 2 * left > len(rows):  # these queries are not like the rows
            self._faster_scan.drop()
        return slots, distance

    def _decided(self, k: int, faster: Scan, count: int) -> float:
        """For what share of some rows of the bank, themselves left out, a scan is enough."""
        rows, own = self._drawn(TRIED)
        found, beyond = faster(rows, squared_lengths(rows), count)
        return (self._ranked(rows, found, k, own)[2] < beyond).double().mean().item()

    def _drawn(self, count: int) -> tuple[Tensor, Tensor]:
        """Random rows (B, D), always the same, and their ids (B, 1). NOTE: not each so many-th, which may be one row again and again."""
        slots = torch.from_numpy(np.random.default_rng(0).choice(self._size, min(count, self._size), replace=False))
        return self._rows[slots], self._firsts(self._ids[slots])[:, None]

    def _candidates(self, rounding: float, queries: Tensor, squared: Tensor, count: int) -> tuple[Tensor, Tensor]:
        score, slots = self._scanned(queries, count, rounding)
        return slots, least_distance(score[:, -1], squared, self._row_lengths().max(), self.dim, rounding, self.kind == "ip")

    def _row_lengths(self) -> Tensor:
        if self._lengths is None:
            self._lengths = squared_lengths(self.embeddings)
        return self._lengths[: self._size]

    def _scanned(self, queries: Tensor, count: int, rounding: float) -> tuple[Tensor, Tensor]:
        """Scores and slots (B, count) of the nearest rows, by looking at all of them; no other row has a better score than the last."""
        if rounding == ROUNDING:
            return scan(queries, self.embeddings, self._row_lengths(), count, self.kind == "ip")
        return scan_in_float64(queries, self.embeddings, count, self.kind == "ip")

    def _approximate(self, rows: Tensor, squared: Tensor, k: int, banned: Tensor) -> tuple[Tensor, Tensor]:
        assert self._proposer is not None
        if k not in self._proposer.efforts:
            self._choose_effort(self._proposer, k)
        return self._proposed(rows, k, banned, self._proposer.efforts[k])

    def _proposed(self, rows: Tensor, k: int, banned: Tensor, effort: int) -> tuple[Tensor, Tensor]:
        assert self._proposer is not None
        found = self._proposer.propose(rows, min(self._size, 4 * k + banned.shape[1]), self._size, effort)
        return self._ranked(rows, found, k, banned)[:2]

    def _choose_effort(self, proposer: Proposer, k: int) -> None:
        """By the share of the k nearest that is found of random rows of the bank, themselves left out."""
        rows, own = self._drawn(MEASURED)
        nearest = self._exact(rows, squared_lengths(rows), k, own)[1]  # (500, k)
        there = nearest < math.inf
        farthest = nearest.masked_fill(~there, -math.inf).max(1, keepdim=True).values

        def shares(effort: int) -> Tensor:
            found = self._proposed(rows, k, own, effort)[1]
            share = (found <= farthest).sum(1) / there.sum(1)  # by distance: which of equal rows is found is as good
            return share.nan_to_num(1.0)  # of a row that has no neighbor

        proposer.choose(k, self.recall, shares)

    def _ranked(self, rows: Tensor, found: Tensor, k: int, banned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The k best of the slots found (B, M): slots, distances, and the k-th distance of each query in float64."""
        if found.shape[1] < k:
            found = torch.cat([found, found.new_full((len(found), k - found.shape[1]), MISSING)], 1)
        slots, distance = torch.empty(len(rows), k, dtype=torch.long), torch.empty(len(rows), k)
        last = torch.empty(len(rows), dtype=torch.float64)
        for at in blocks(len(rows), BLOCK // max(1, found.shape[1] * banned.shape[1])):
            safe = found[at].clamp_min(0)  # (b, M)
            ids = self._ids[safe]  # raises if a slot is out of bounds
            allowed = (found[at] >= 0) & ~(self._firsts(ids)[..., None] == banned[at][:, None]).any(2)
            candidates = rows[at], self._rows, safe, ids, allowed
            order, exact = rank_products(*candidates, k, self._row_lengths()) if self.kind == "ip" else rank(*candidates)
            there = exact[:, :k] < math.inf
            slots[at], distance[at] = safe.gather(1, order[:, :k]).masked_fill(~there, MISSING), exact[:, :k].float()
            last[at] = exact[:, k - 1]
        return slots, distance, last

    # ------------------------------------------------ what a bank in parts does otherwise (sharded_bank.py)

    in_parts = False

    @property
    def own(self) -> Bank:
        """What this process can search by itself."""
        return self

    def class_sums(self, num_classes: int) -> Tensor:
        """Sums of the embeddings of each class (C, D)."""
        return torch.zeros(num_classes, self.dim).index_add_(0, self.labels, self.embeddings)

    def every(self, step: int) -> tuple[Tensor, Tensor]:
        """Embeddings and labels of the first row, and of each that comes `step` later."""
        return self.embeddings[::step], self.labels[::step]

    def turns(self, count: int, size: int) -> list[slice]:
        """Of queries that every process has, blocks that this one looks up; `of_all` puts together what all have found."""
        return [slice(start, min(count, start + size)) for start in range(0, max(1, count), size)]

    def of_all(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def holding(self, index: Tensor) -> Bank:
        """A bank from which this process can take rows that were found, by itself."""
        return self

    # ------------------------------------------------ to disk and back

    @torch.inference_mode(False)
    def sample(self, count: int) -> Bank:
        """A bank of so many random rows, drawn by torch's generator, for a head that trains with `neighbor_sample`.

        Every row of it is looked at, whatever the kind.
        """
        with self._lock:
            return self._some(torch.randperm(self._size)[:count], "ip" if self.kind == "ip" else "flat")

    def _some(self, slots: Tensor, kind: str) -> Bank:
        part = Bank(self.dim, kind=kind, recall=self.recall, copies=self.copies)
        part._write(torch.arange(len(slots)), self._rows[slots], self._labels[slots], self._ids[slots], torch.arange(len(slots)))
        return part

    @torch.inference_mode(False)
    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a checkpoint: rows as tensors, and what JSON can hold of the rest."""
        with self._lock:
            rows = {"embedding": self.embeddings, "label": self.labels, "id": self.ids, "birth": self._births[: self._size]}
            rows |= {} if self.copies is None else {"copies": self.copies}
            rows = {name: part.clone() for name, part in rows.items()}
            return rows, {name: getattr(self, name) for name in PACKED} | {"shapes": {k: list(v.shape) for k, v in rows.items()}}

    def in_pieces(self) -> tuple[Mapping[str, Mapping[str, Tensor]], dict[str, Any]]:
        """The same in groups "bank-00000", ...: made when they are asked for, if rows have to be fetched for that."""
        rows, facts = self.pack()
        return {"bank-00000": rows}, facts

    @classmethod
    def unpack(cls, rows: Mapping[str, Tensor], packed: Mapping[str, Any]) -> Bank:
        if {name: list(part.shape) for name, part in rows.items()} != packed["shapes"]:
            raise BadOption("bank", "must be whole: its rows are not those that it names")
        options = {name: packed[name] for name in ("kind", "recall", "cap", "evict") if name in packed}  # older ones have no recall
        bank = cls(packed["dim"], **options, copies=rows.get("copies"))
        bank._rows, bank._labels, bank._ids, bank._births = (rows[name] for name in ("embedding", "label", "id", "birth"))
        bank._size, bank._next_id, bank._next_birth = len(bank._rows), packed["_next_id"], packed["_next_birth"]
        return bank
