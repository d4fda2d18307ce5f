"""Looking at every row for the nearest, until no other row can be nearer.

A scan proposes rows for each query, and says how near any other row can be. What it proposes is ranked by exact distances; queries for
which another row may still be nearer get a longer list, or the next scan, which takes longer and leaves less open.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from classifiers.faiss_library import load_faiss, pointers
from classifiers.index import LEAST, ROUNDING, ROUNDING_64, blocks, some_of, squared_lengths
from layers.compiled import native

FEW_QUERIES = 4  # for each thread: for fewer, laying out the rows as the C code reads them takes longer than FAISS's search
PROPOSALS = 1 << 22  # of one scan, at most: 48 MB
SCORES = 1 << 21  # numbers in a temporary of a scan in float64: 16 MB

# Queries (B, D), their squared lengths (B,) and how many rows to propose, to slots (B, count) and, for each query, a distance that no
# other row is nearer than (B,), in float64.
Scan = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
# Which of the queries (B,), and slots for them (B, M): how far the k-th best of these is (B,). It keeps the k best.
Ranking = Callable[[Tensor, Tensor], Tensor]


def prove(queries: Tensor, squared: Tensor, count: int, most: int, scans: list[tuple[Scan, int]], ranking: Ranking) -> int:
    """Ranks proposals for each query until no other row, of `most` in all, can be nearer than the k-th best.

    `scans`, the fastest first, each with how many times `count` it proposes; the last one can be repeated until it proposes all rows.
    Returns for how many queries the first one was not enough.
    """
    work, left = [(torch.arange(len(queries)), 0, min(most, count * scans[0][1]))], 0
    while work:
        todo, way, wanted = work.pop()
        if len(todo) * wanted > PROPOSALS and len(todo) > 1:
            work += [(half, way, wanted) for half in todo.chunk(2)]
            continue
        by, times = scans[way]
        slots, beyond = by(some_of(queries, todo), squared[todo], wanted)
        last = ranking(todo, slots)
        if wanted == most:
            continue
        undecided = todo[~(last < beyond)]
        if not len(undecided):
            continue
        left += len(undecided) if way == 0 and wanted == count * times else 0
        # Some, that have many rows about as near, are scanned once more in the same way; where it is most, that is too coarse.
        again = way + 1 == len(scans) or (wanted == count * times and 2 * len(undecided) <= len(todo))
        work.append((undecided, way, min(most, 4 * wanted)) if again else (undecided, way + 1, min(most, count * scans[way + 1][1])))
    return left


def least_distance(worst: Tensor, squared: Tensor, longest: Tensor, dim: int, rounding: float, inner: bool) -> Tensor:
    """The least distance to queries of `squared` lengths that a row can have to which a scan gave no better score than `worst` (B,)."""
    worst, squared = worst.double(), squared.double()
    if inner:  # rounding is below that of |q| |x|; the k-th best is in float64
        lost = dim * LEAST  # of a squared length
        return -worst - (dim + 8) * (rounding + ROUNDING_64) * ((squared + lost) * (longest.double() + lost)).sqrt() - 1e-30
    # Rounding is below C (|q|^2 + |x|^2), and |x|^2 is at most 2 |q|^2 + 2 |q - x|^2; the k-th best is in float32.
    unit = (2 * dim + 16) * rounding
    return (worst - 3 * unit * squared - 1e-30) / (1 + 2 * unit + rounding_of_distances(dim))


def rounding_of_distances(dim: int) -> float:
    """Of squared distances that are sums of squared differences in float32 (`index.rank`), in parts of them."""
    return (2 * dim + 16) * ROUNDING


def rounding_of_products(dim: int, length: Tensor, longest: float) -> Tensor:
    """Of inner products in float64 (`index.rank_products`), with rows no longer than `longest`, and of as much once more."""
    return 2 * (dim + 8) * ROUNDING_64 * length * longest


def scan(queries: Tensor, rows: Tensor, lengths: Tensor, count: int, inner: bool) -> tuple[Tensor, Tensor]:
    """Scores, inner products or squared distances, and slots (B, count) of the nearest rows, by looking at every row in float32.

    In C (native/nearest.c) where that is faster, else by FAISS. Either way a product of two rows is a sum of `dim` rounded terms, and what
    is made of it is rounded once or twice more; `least_distance` counts on no more.
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
