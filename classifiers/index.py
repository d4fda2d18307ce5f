"""What the bank is made of: its answers, exact ranking, and who leaves a full bank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.faiss_library import load_faiss, pointers
from utils import BadOption

MISSING = -1  # index of a neighbor that does not exist
BLOCK = 1 << 18  # numbers in a temporary of the ranking: they stay in the cache
MORE = 8  # than k candidates whose products are computed in float64
ROUNDING, ROUNDING_64 = 2.0**-24, 2.0**-53  # of float32 and float64
LEAST = 2.0**-126  # what is smaller, float32 may take for nothing


@dataclass(frozen=True)
class Neighbors:
    """The K nearest rows of each query, nearest first. Where `mask` is False there is none (see MISSING)."""

    distance: Tensor  # (B, K) squared Euclidean; kind ip: minus the inner product. Smaller is nearer
    index: Tensor  # (B, K) ids
    label: Tensor  # (B, K)
    embedding: Tensor  # (B, K, D)
    mask: Tensor  # (B, K)


# ---------------------------------------------------------------- pure functions


def checked_rows(values: Any, dim: int, what: str) -> tuple[Tensor, Tensor]:
    """Rows of `dim` finite numbers as float32 on the CPU (not copied if they are), and their squared lengths."""
    rows = rows_of(values, dim, what)
    squared = squared_lengths(rows)
    if not (squared < 1e37).all():  # NaN is not
        row = int((~(squared < 1e37)).nonzero()[0, 0])
        rule = "must be shorter than 1e18" if rows[row].isfinite().all() else "must hold neither NaN nor Inf"
        raise BadOption(what, f"{rule}; row {row} does not comply")
    return rows, squared


def rows_of(values: Any, dim: int, what: str) -> Tensor:
    rows = torch.as_tensor(values).detach()
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise BadOption(what, f"must have the bank's dimension, (rows, {dim})", tuple(rows.shape))
    return rows.to("cpu", torch.float32).contiguous()


def excluded(ids: Any, count: int) -> Tensor:
    """Ids (B, M) that each of `count` queries must not find; MISSING is none."""
    banned = torch.full((count, 1), MISSING) if ids is None else torch.as_tensor(ids).detach().cpu()
    banned = banned[:, None] if banned.ndim == 1 else banned
    if banned.ndim != 2 or len(banned) != count or banned.is_floating_point() or banned.dtype == torch.bool:
        raise BadOption("exclude", f"must be ids, ({count},) or ({count}, M)", tuple(banned.shape))
    return banned


def squared_lengths(rows: Tensor) -> Tensor:
    squared = torch.empty(len(rows))
    for at in blocks(len(rows), BLOCK // rows.shape[1]):
        torch.sum(rows[at].square(), 1, out=squared[at])
    return squared


def integers(values: Any, count: int, what: str) -> Tensor:
    """Whole numbers from 0, as int64 on the CPU."""
    numbers = torch.as_tensor(values).detach().cpu()
    if numbers.shape != (count,) or (count and (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)):
        raise BadOption(what, f"must be whole numbers, one for each of {count} rows", f"{numbers.dtype} {tuple(numbers.shape)}")
    if count and numbers.min() < 0:
        raise BadOption(what, "must be at least 0", int(numbers.min()))
    return numbers.long()


def slots_of(ids: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
    """Where each id stands, from sorted ids and their slots; MISSING for one that is not among them."""
    ordered, slots = known
    if not len(ordered):
        return torch.full_like(ids, MISSING)
    place = torch.searchsorted(ordered, ids.contiguous()).clamp_max(len(ordered) - 1)
    return slots[place].masked_fill(ordered[place] != ids, MISSING)


def gathered(blocks: Iterable[tuple[Any, Any]], ids: Tensor, dim: int) -> Tensor:
    """Rows in the order of `ids`, from blocks (ids, embeddings) in any order. What is not asked for is dropped."""
    known = ids.sort()
    rows, there = torch.empty(len(ids), dim), torch.zeros(len(ids), dtype=torch.bool)
    for named, embeddings in blocks:
        block, _ = checked_rows(embeddings, dim, "embeddings")
        slots = slots_of(integers(named, len(block), "ids"), known)
        wanted = slots != MISSING
        slots = slots[wanted]
        if there[slots].any() or len(slots.unique()) < len(slots):
            raise BadOption("embeddings", "must come once for each row, but some came again")
        rows[slots], there[slots] = block[wanted], True
    if not there.all():
        raise BadOption("embeddings", f"must come for all {len(ids)} rows", int(there.sum()))
    return rows


def blocks(count: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, min(count, start + size)) for start in range(0, count, size))


def some_of(values: Tensor, rows: Tensor) -> Tensor:
    """`rows` in ascending order; not copied if they are all."""
    return values if len(rows) == len(values) else values[rows]


def rank(queries: Tensor, rows: Tensor, slots: Tensor, ids: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates rows[slots] (B, M) of each query by exact distance, equal ones by id: their order (B, M) and the distances in it.

    Distances that are not `allowed` are infinite. NOTE: slots must be those of rows; FAISS does not check.
    """
    # Sums of squared differences, so that nothing cancels.
    single = _by_slots("fvec_L2sqr_by_idx", queries, rows, slots).masked_fill_(~allowed, math.inf)
    distance, order = single.sort(1)
    # What float32 cannot tell apart, float64 does: distances that may be in the wrong order beside the next one.
    far = distance[:, 1:]
    tied = (far - distance[:, :-1] <= 2 * (rows.shape[1] + 4) * ROUNDING * far + 1e-30) & far.isfinite()
    some = tied.any(1).nonzero()[:, 0]
    if len(some):
        pairs = F.pad(tied[some], (1, 0)) | F.pad(tied[some], (0, 1))
        exact = single[some].double()  # elsewhere float32 will do
        row, place = pairs.nonzero(as_tuple=True)
        column = order[some[row], place]
        for at in blocks(len(row), BLOCK // rows.shape[1]):
            query = some[row[at]]
            difference = queries[query].double() - rows[slots[query, column[at]]]
            exact[row[at], column[at]] = difference.square_().sum(1)
        order[some] = ordered(exact, ids[some], allowed[some])[0]
        # The distances stay those of float32, so that they do not depend on k; never falling, in spite of its rounding.
        distance[some] = single[some].gather(1, order[some]).cummax(1).values
    return order, distance


def rank_products(
    queries: Tensor, rows: Tensor, slots: Tensor, ids: Tensor, allowed: Tensor, k: int, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """As `rank` by minus the inner product, as far as the k best go: float64 for those that float32 can't rule out.

    `lengths` (N,): squared, of the rows.
    """
    near = -_by_slots("fvec_inner_products_by_idx", queries, rows, slots).masked_fill_(~allowed, -math.inf)
    lost = rows.shape[1] * LEAST  # of a squared length
    squared = (squared_lengths(queries).double()[:, None] + lost) * (lengths[slots].double() + lost)
    error = (rows.shape[1] + 8) * ROUNDING * squared.sqrt() + 1e-30
    order, distance = near.sort(1).indices, near.new_full(slots.shape, math.inf, dtype=torch.float64)
    todo, count = torch.arange(len(queries)), min(slots.shape[1], k + MORE)
    while len(todo):
        some = order[todo, :count]
        own_slots, own_ids, own_allowed = (part[todo].gather(1, some) for part in (slots, ids, allowed))
        place, exact = ordered(-_products(queries[todo], rows, own_slots), own_ids, own_allowed)
        others = (near[todo] - error[todo]).scatter(1, some, math.inf).min(1).values  # what float32 put behind may belong before
        distance[todo, :count], best = exact, some.gather(1, place)
        left = ~(exact[:, min(k, count) - 1] < others) & (count < slots.shape[1])
        order[todo[~left], :count] = best[~left]
        todo, count = todo[left], slots.shape[1]
    return order, distance


def _products(queries: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Inner products (B, M) of each query with rows[slots], in float64."""
    out = torch.empty(slots.shape, dtype=torch.float64)
    for at in blocks(len(slots), BLOCK // (slots.shape[1] * rows.shape[1])):
        out[at] = F.embedding(slots[at], rows).double().mul_(queries[at].double()[:, None]).sum(2)
    return out


def _by_slots(function: str, queries: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """What FAISS computes in float32 of each query and rows[slots]: (B, M)."""
    out = torch.empty(slots.shape)
    getattr(load_faiss(), function)(*pointers(out, queries, rows, slots), rows.shape[1], *slots.shape)
    return out


def ordered(distance: Tensor, ids: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The order (B, M) of candidates by distance, then id, and the distances in it; infinite where not `allowed`."""
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
