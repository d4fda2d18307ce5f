"""What the bank is made of: exact ranking, who leaves a full bank, and approximate FAISS indexes that propose rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils import BadOption, nearest

KINDS = ("auto", "flat", "ip", "hnsw", "ivf", "ivfpq")
MISSING = -1  # index of a neighbor that does not exist
AUTO_FLAT_ROWS, AUTO_HNSW_ROWS = 100_000, 1_000_000  # auto is flat below the first, HNSW up to the second, then IVF
SMALLEST_INDEX = 256  # rows, below which the named approximate kinds look at every row
BLOCK = 1 << 18  # numbers in a temporary of the ranking: they stay in the cache
ROUNDING = 2.0**-24  # of float32


# ---------------------------------------------------------------- pure functions


def checked_rows(values: Any, dim: int, what: str) -> tuple[Tensor, Tensor]:
    """Rows of `dim` finite numbers as float32 on the CPU (not copied if they are), and their squared lengths."""
    rows = torch.as_tensor(values).detach()
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise BadOption(what, f"must have the bank's dimension, (rows, {dim})", tuple(rows.shape))
    rows = rows.to("cpu", torch.float32).contiguous()
    squared = torch.empty(len(rows))
    for start in range(0, len(rows), step := max(1, BLOCK // dim)):
        torch.sum(rows[start : start + step].square(), 1, out=squared[start : start + step])
    if not (squared < 1e37).all():  # NaN is not
        row = int((~(squared < 1e37)).nonzero()[0, 0])
        rule = "must be shorter than 1e18" if rows[row].isfinite().all() else "must hold neither NaN nor Inf"
        raise BadOption(what, f"{rule}; row {row} does not comply")
    return rows, squared


def integers(values: Any, count: int, what: str) -> Tensor:
    """Whole numbers from 0, as int64 on the CPU."""
    numbers = torch.as_tensor(values).detach().cpu()
    if numbers.shape != (count,) or (count and (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)):
        raise BadOption(what, f"must be whole numbers, one for each of {count} rows", f"{numbers.dtype} {tuple(numbers.shape)}")
    if count and numbers.min() < 0:
        raise BadOption(what, "must be at least 0", int(numbers.min()))
    return numbers.long()


def blocks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(count, start + size)) for start in range(0, count, size))


def rank(queries: Tensor, rows: Tensor, ids: Tensor, allowed: Tensor, k: int, inner: bool) -> tuple[Tensor, Tensor]:
    """Candidates (B, M, D) of each query by exact distance, equal ones by id: their order (B, M) and the distances in that order.

    Good for the first k places. Distances that are not `allowed` are infinite.
    """
    if inner:
        return _order(-(queries.double()[:, None] * rows.double()).sum(2), ids, allowed)
    single = (queries[:, None] - rows).square_().sum(2)  # (B, M)
    order, distance = _order(single, ids, allowed)
    # What float32 cannot tell apart, float64 does: for queries that have two such distances among the first k + 1.
    far = distance[:, 1 : k + 1]
    gap = far - distance[:, : far.shape[1]]
    close = ((gap <= 2 * (rows.shape[2] + 4) * ROUNDING * far + 1e-30) & far.isfinite()).any(1).nonzero()[:, 0]
    if len(close):
        exact = (queries[close].double()[:, None] - rows[close].double()).square_().sum(2)
        order[close], _ = _order(exact, ids[close], allowed[close])
        # The distances stay those of float32, so that they do not depend on k; never falling, in spite of its rounding.
        ordered = single[close].masked_fill(~allowed[close], math.inf).gather(1, order[close])
        distance[close] = ordered.cummax(1).values
    return order, distance


def _order(distance: Tensor, ids: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    distance = distance.masked_fill(~allowed, math.inf)
    by_id = ids.argsort(1)
    distance, then = distance.gather(1, by_id).sort(dim=1, stable=True)  # stable: equal distances stay in the order of ids
    return by_id.gather(1, then), distance


def kept(labels: Tensor, births: Tensor, cap: int, evict: str) -> Tensor:
    """Which rows stay when only `cap` may: the newest; or, class-balanced, the oldest of the largest class leaves, again and again."""
    newest = births.argsort(descending=True)
    if evict == "class-balanced":
        # The r-th newest of each class stays before the (r+1)-th newest of any: what is left is the largest classes cut to one size.
        by_class = newest[labels[newest].argsort(stable=True)]
        counts = labels.bincount()
        place = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)  # 0 for the newest of a class
        rank_in_class = torch.empty_like(place).index_put_((by_class,), place)
        newest = newest[rank_in_class[newest].argsort(stable=True)]
    stays = torch.zeros(len(labels), dtype=torch.bool)
    stays[newest[:cap]] = True
    return stays


def recipe(kind: str, rows: int, dim: int) -> str:
    """The FAISS factory string of a kind for so many rows; "" where every row is looked at."""
    if kind == "auto":
        kind = "flat" if rows < AUTO_FLAT_ROWS else "hnsw" if rows <= AUTO_HNSW_ROWS else "ivf"
    if kind in ("flat", "ip") or (kind in KINDS and rows < SMALLEST_INDEX):
        return ""
    lists = max(1, min(int(4 * math.sqrt(rows)), rows // 39))  # 39 rows a centroid: FAISS warns below that
    if kind == "hnsw":
        return "HNSW32"
    if kind == "ivf":
        return f"IVF{lists},Flat"
    if kind == "ivfpq":
        parts = max(1, dim // 4) if dim >= 4 else dim
        rotation = f"PCAR{4 * parts}," if dim >= 4 and dim % 4 else ""  # PQ wants a dimension that its parts divide
        return f"{rotation}IVF{lists},PQ{parts}x{min(8, int(math.log2(rows // 39)))}"
    return kind


# ---------------------------------------------------------------- FAISS


_forks_are_safe = False


def load_faiss() -> Any:
    """FAISS, loaded when first needed, and made safe to fork."""
    global _forks_are_safe
    import faiss

    if not _forks_are_safe and hasattr(os, "register_at_fork"):
        # NOTE: OpenMP's threads do not survive a fork, and a parallel region in the child would wait for them for ever.
        def in_child() -> None:
            faiss.omp_set_num_threads(1)
            torch.set_num_threads(1)

        os.register_at_fork(after_in_child=in_child)
        _forks_are_safe = True
    return faiss


class Proposer:
    """An approximate FAISS index over the slots of a bank. A slot that is written again leaves a dead entry behind."""

    def __init__(self, text: str, base: Tensor, index: Any = None, slot_of: Tensor | None = None, built: int = 0) -> None:
        faiss = load_faiss()
        self.text, self.built = text, built or len(base)
        self.slot_of = torch.empty(0, dtype=torch.long) if slot_of is None else slot_of  # of each entry; MISSING if it is dead
        self.index = index
        if index is None:
            try:
                self.index = faiss.index_factory(base.shape[1], text)
                self.index.train(base.numpy())
                self.add(base, torch.arange(len(base)))
            except RuntimeError as error:
                raise BadOption("index", f"cannot be built over {len(base)} rows ({_reason(error)})", text) from None
        self.lists = faiss.try_extract_index_ivf(self.index)
        self.graph = faiss.downcast_index(self.index) if text.startswith("HNSW") else None

    def add(self, rows: Tensor, slots: Tensor) -> None:
        self.slot_of[torch.isin(self.slot_of, slots)] = MISSING
        self.index.add(rows.contiguous().numpy())
        self.slot_of = torch.cat([self.slot_of, slots])

    def serves(self, text: str, live: int) -> bool:
        """Whether it can go on: same kind, few dead entries, trained on as much as half of what it holds."""
        same = text == self.text or (text[:3] == self.text[:3] == "IVF") or (text.startswith("PCAR") and self.text.startswith("PCAR"))
        return same and len(self.slot_of) <= 1.25 * live and (live <= 2 * self.built or self.graph is not None)

    def propose(self, queries: Tensor, count: int, live: int) -> Tensor:
        """(B, M) slots, MISSING where the index found fewer."""
        count = min(len(self.slot_of), math.ceil(count * (2 * len(self.slot_of) / live - 1)) + 1)  # some of them dead
        if self.lists is not None:
            self.lists.nprobe = min(self.lists.nlist, max(8, self.lists.nlist // 8))
        if self.graph is not None:
            self.graph.hnsw.efSearch = max(64, 2 * count)
        entries = torch.from_numpy(self.index.search(queries.numpy(), count)[1])
        return self.slot_of[entries.clamp_min(0)].masked_fill(entries < 0, MISSING)


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].split("Error: ")[-1].strip()[:120]


def check_kind(kind: str, dim: int) -> None:
    if kind in KINDS:
        return
    try:
        load_faiss().index_factory(dim, kind)
    except RuntimeError as error:
        rule = f"must be one of {', '.join(KINDS)} or a FAISS factory string{nearest(kind, KINDS)}; FAISS says: {_reason(error)}"
        raise BadOption("index", rule, kind) from None
