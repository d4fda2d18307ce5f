"""What the bank is made of: its answers, exact ranking, who leaves a full bank, and approximate FAISS indexes that propose rows."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import native
from classifiers.factory import check_factory
from utils import BadOption, did_you_mean, say, shortened

KINDS = ("auto", "flat", "ip", "hnsw", "ivf", "ivfpq")
MISSING = -1  # index of a neighbor that does not exist
# auto is flat as long as 10,000 queries take a minute: two cores do 20 billion products of numbers a second, and what a scan does beside
# them, keeping the nearest, takes as long as 32 dimensions more.
AUTO_FLAT = 60 * 20_000_000_000 // 10_000  # rows x (dimensions + 32)
SMALLEST_INDEX = 256  # rows, below which the named approximate kinds look at every row
ENOUGH = 39  # rows for a centroid: FAISS warns below that
FEW_QUERIES = 4  # for each thread: for fewer, laying out the rows as the C code reads them takes longer than FAISS's search
BLOCK = 1 << 18  # numbers in a temporary of the ranking: they stay in the cache
SCORES = 1 << 21  # numbers in a temporary of a scan in float64: 16 MB
ROUNDING, ROUNDING_64 = 2.0**-24, 2.0**-53  # of float32 and float64
# The parts of a factory string that are learned by k-means: IVF8 and HNSW32_8+PQ4 have lists; PQ4 (of 8 bits), PQ4x5, RQ2x5, RQ1x6_2x4,
# PRQ2x3x4 and IMI2x5 codes. OPQ4 learns 8 bits, whatever it is followed by. LSQ needs no k-means.
LISTS = re.compile(r"(?:IVF|Residual(?!\d+x)|_(?=\d+\+PQ))(\d+)([kM]?)")
CODES = re.compile(r"(OPQ|PQ|RQ|IMI|Residual(?=\d+x))(\d+(?:x\d+)*(?:_\d+x\d+)*)")


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
    rows = torch.as_tensor(values).detach()
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise BadOption(what, f"must have the bank's dimension, (rows, {dim})", tuple(rows.shape))
    rows = rows.to("cpu", torch.float32).contiguous()
    squared = squared_lengths(rows)
    if not (squared < 1e37).all():  # NaN is not
        row = int((~(squared < 1e37)).nonzero()[0, 0])
        rule = "must be shorter than 1e18" if rows[row].isfinite().all() else "must hold neither NaN nor Inf"
        raise BadOption(what, f"{rule}; row {row} does not comply")
    return rows, squared


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


def rank(queries: Tensor, rows: Tensor, slots: Tensor, ids: Tensor, allowed: Tensor, inner: bool) -> tuple[Tensor, Tensor]:
    """The candidates rows[slots] (B, M) of each query by exact distance, equal ones by id: their order (B, M) and the distances in it.

    Distances that are not `allowed` are infinite. NOTE: slots must be those of rows; FAISS does not check.
    """
    if inner:
        step = BLOCK // (slots.shape[1] * rows.shape[1])
        parts = [_order(-_products(queries[at], rows, slots[at]), ids[at], allowed[at]) for at in blocks(len(slots), step)]
        return torch.cat([order for order, _ in parts]), torch.cat([distance for _, distance in parts])
    single = _squared(queries, rows, slots).masked_fill_(~allowed, math.inf)
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
        order[some] = _order(exact, ids[some], allowed[some])[0]
        # The distances stay those of float32, so that they do not depend on k; never falling, in spite of its rounding.
        distance[some] = single[some].gather(1, order[some]).cummax(1).values
    return order, distance


def _products(queries: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Inner products (B, M) of each query with rows[slots], in float64."""
    return (queries.double()[:, None] * F.embedding(slots, rows).double()).sum(2)


def _squared(queries: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Squared distances (B, M) of each query to rows[slots], in float32: sums of squared differences, so that nothing cancels."""
    out = torch.empty(slots.shape)
    load_faiss().fvec_L2sqr_by_idx(*pointers(out, queries, rows, slots), rows.shape[1], *slots.shape)
    return out


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


def most_flat(dim: int) -> int:
    """Rows up to which auto looks at each of them."""
    return AUTO_FLAT // (dim + 32)


def recipe(kind: str, rows: int, dim: int) -> str:
    """The FAISS factory string of a kind for so many rows; "" where every row is looked at."""
    if kind == "auto":  # lists, but fewer than ivf: training them would take longer than searching every row
        return "" if rows <= most_flat(dim) else f"IVF{math.isqrt(rows)},Flat"
    if kind in ("flat", "ip") or (kind in KINDS and rows < SMALLEST_INDEX):
        return ""
    lists = max(1, min(int(4 * math.sqrt(rows)), rows // ENOUGH))
    if kind == "hnsw":
        return "HNSW32"
    if kind == "ivf":
        return f"IVF{lists},Flat"
    if kind == "ivfpq":
        parts = max(1, dim // 4) if dim >= 4 else dim
        rotation = f"PCAR{4 * parts}," if dim >= 4 and dim % 4 else ""  # PQ wants a dimension that its parts divide
        return f"{rotation}IVF{lists},PQ{parts}x{min(8, int(math.log2(rows // ENOUGH)))}"
    return kind


# ---------------------------------------------------------------- FAISS


_forks_are_safe = False
_silence = threading.Lock()  # descriptor 2 is one for all threads


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
        # A child must find descriptor 2 as it was, and the lock free.
        os.register_at_fork(before=_silence.acquire, after_in_parent=_silence.release, after_in_child=_silence.release)
        _forks_are_safe = True
    return faiss


@contextmanager
def silenced() -> Iterator[None]:
    """Drops what C++ writes to stderr. That goes to file descriptor 2, whatever Python's sys.stderr is."""
    with _silence:
        with suppress(AttributeError, OSError, ValueError):  # there may be none, or it may be closed
            sys.stderr.flush()
        stderr = None
        with suppress(OSError):  # closed: there is nothing to drop
            stderr = os.dup(2)
        try:
            if stderr is not None:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            if stderr is not None:
                os.dup2(stderr, 2)
                os.close(stderr)


def pointers(*tensors: Tensor) -> list[Any]:
    """For the functions of FAISS that are told addresses. NOTE: they check nothing; the sizes are the caller's to get right."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("what FAISS reads must be contiguous")
    return [load_faiss().swig_ptr(tensor.numpy()) for tensor in tensors]


def scan(queries: Tensor, rows: Tensor, lengths: Tensor, count: int, inner: bool) -> tuple[Tensor, Tensor]:
    """Scores, inner products or squared distances, and slots (B, count) of the nearest rows, by looking at every row in float32.

    In C (native/nearest.c) where that is faster, else by FAISS. Either way a product of two rows is a sum of `dim` rounded terms, and what
    is made of it is rounded once or twice more; `Bank._exact` counts on no more.
    """
    faiss = load_faiss()  # first: it makes what runs on several threads safe to fork
    if count <= native.MOST_KEPT and len(queries) >= FEW_QUERIES * torch.get_num_threads() and native.takes(queries, rows):
        product, slots = native.scan(queries, rows, None if inner else lengths / -2, count)  # q x - |x|^2 / 2
        return (product if inner else squared_lengths(queries).double()[:, None] - 2 * product.double()), slots
    if inner:
        score, nearest = faiss.knn(queries.numpy(), rows.numpy(), count, faiss.METRIC_INNER_PRODUCT)
        return torch.from_numpy(score), torch.from_numpy(nearest)
    # Not `faiss.knn`: that computes the squared lengths of all rows in each call.
    found = torch.empty(len(queries), count), torch.empty(len(queries), count, dtype=torch.long)
    x, y, known, score, nearest = pointers(queries, rows, lengths, *found)
    faiss.knn_L2sqr(x, y, rows.shape[1], len(queries), len(rows), count, score, nearest, known, None)
    return found


def scan_in_float64(queries: Tensor, rows: Tensor, count: int, inner: bool) -> tuple[Tensor, Tensor]:
    """What `scan` gives, with the rounding of float64. It takes several times as long."""
    found = []
    for at in blocks(len(queries), SCORES // len(rows)):
        some = queries[at].double()
        scores = torch.empty(len(some), len(rows), dtype=torch.float64)  # (b, N)
        for part in blocks(len(rows), SCORES // rows.shape[1]):
            few = rows[part].double()
            products = some @ few.T
            scores[:, part] = products if inner else some.square().sum(1, keepdim=True) + few.square().sum(1) - 2 * products
        found.append(scores.topk(count, 1, largest=inner))
    return torch.cat([score for score, _ in found]), torch.cat([slots for _, slots in found])


class Proposer:
    """An approximate FAISS index over the slots of a bank. A slot that is written again leaves a dead entry behind."""

    def __init__(self, text: str, rows: Tensor) -> None:
        faiss = load_faiss()
        self.text, self.trained_on = text, len(rows)
        self.slot_of = torch.empty(0, dtype=torch.long)  # of each entry; MISSING if it is dead
        try:
            self.index = faiss.index_factory(rows.shape[1], text)
            with silenced():  # it would print a line for each k-means over few rows, thousands of them; check_kind says it once
                self.index.train(rows.numpy())
                self.add(rows, torch.arange(len(rows)))
        except RuntimeError as error:
            raise BadOption("index", f"cannot be built over {len(rows)} rows ({_reason(error)})", text) from None
        self.lists = faiss.try_extract_index_ivf(self.index)
        graph = faiss.downcast_index(self.index)
        self.graph = graph if hasattr(graph, "hnsw") else None

    def add(self, rows: Tensor, slots: Tensor) -> None:
        self.slot_of[torch.isin(self.slot_of, slots)] = MISSING
        self.index.add(rows.contiguous().numpy())
        self.slot_of = torch.cat([self.slot_of, slots])

    def serves(self, text: str, live: int) -> bool:
        """Whether it can go on: same kind, few dead entries, trained on as much as half of what it holds."""
        same = text == self.text or (text[:3] == self.text[:3] == "IVF") or (text.startswith("PCAR") and self.text.startswith("PCAR"))
        return same and len(self.slot_of) <= 1.25 * live and (live <= 2 * self.trained_on or self.graph is not None)

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
    """What FAISS says, without the C++ function, file and condition that it says first."""
    text = str(error).strip().splitlines()[-1]
    text = re.sub(r"^Error in .*? at \S+:\d+: ", "", text)
    return shortened(re.sub(r"^Error: '.*?' failed: ?", "", text).strip().removeprefix("Error: "), 120) or "no reason"


# ---------------------------------------------------------------- what an index learns


def centroids(text: str) -> list[tuple[int, str]]:
    """How many centroids each k-means finds that a factory string asks for, and what these are: IVF8,PQ4x5 learns 8 lists and 32 values
    of a code. Strings that FAISS refuses are not asked about."""
    found = [(int(count) << {"": 0, "k": 10, "M": 20}[unit], "lists") for count, unit in LISTS.findall(text)]
    for name, sizes in CODES.findall(text):
        bits = [int(size.rpartition("x")[2]) for size in sizes.split("_")] if "x" in sizes and name != "OPQ" else [8]
        found.append((1 << max(bits), "values of a code"))
    return found


def check_kind(kind: str, dim: int, rows: int | None = None) -> None:
    """Whether it can be built; with `rows`, over so many."""
    if kind in KINDS:
        return
    rule = f"must be one of {', '.join(KINDS)} or a FAISS factory string"
    if not kind.strip():
        raise BadOption("index", rule, kind)
    check_factory(kind, dim, rule + did_you_mean(kind, KINDS))
    try:
        load_faiss().index_factory(dim, kind)
    except RuntimeError as error:
        raise BadOption("index", f"{rule}{did_you_mean(kind, KINDS)}; FAISS says: {_reason(error)}", kind) from None
    if rows is None:
        return
    counts = centroids(kind)
    most, what = max(counts, default=(1, ""))
    if any(count < 1 for count, _ in counts):
        raise BadOption("index", "must have at least one list", kind)
    if most > rows:
        raise BadOption("index", f"must have at most as many {what} as the bank has rows ({rows}), not {most}", kind)
    if most > 1 and most * ENOUGH > rows:
        say(f"index: {kind} learns {most} {what} from {rows:,} rows (fewer than {ENOUGH} for each: it may miss neighbors)")
