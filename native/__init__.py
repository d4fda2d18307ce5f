"""nearest.c, compiled at its first use (build.py), called by ctypes.

Everything that the C code does, kernels.py, dropout.py and norm.py of layers/ and classifiers/index.py can do without it. `available()`
says whether it is there; where it is not, one line tells why. NEIGHBORS_NATIVE=0 does without it by hand.
"""

from __future__ import annotations

import ctypes
import functools
import os
import statistics
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native.build import Unbuilt, built
from native.build import processor as processor
from utils import say

FUNCTIONS = ("nearest", "scan", "others", "bag", "pair_dot", "spread", "factor_gradient", "attend", "attend_gradient")
POINTERS = (
    *("index", "weight", "factor", "matrix", "turned", "panel", "d_matrix", "d_blocks", "bias", "keep", "first", "among", "own", "places"),
    *("score", "kept", "chosen"),
)
SIZES = ("B", "H", "N", "M", "D", "E", "F", "K", "A", "S")
VIEWS = ("rows", "columns", "out", "values", "grad", "d_rows", "d_columns", "d_values")
MOST_RANKS = 64  # of a list that is selected here: beyond, sorting whole rows is faster
MOST_KEPT = 256  # rows for each query of a scan: beyond, inserting one after the other takes longer than FAISS's heap
WIDEST = 1024  # channels of a row that is normalized here (norm.h)
_lock = threading.Lock()


class View(ctypes.Structure):
    """A tensor (B, H, rows, D) in memory, with the distances from one to the next in numbers."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("image", "head", "row"))]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, View) for name in VIEWS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in (*SIZES, "lists", "threads")),
        ("scale", ctypes.c_float),
    ]


class Norm(ctypes.Structure):
    _fields_ = [
        *((name, View) for name in ("x", "grad")),
        *((name, ctypes.c_void_p) for name in ("y", "d_x", "weight", "bias", "d_weight", "d_bias")),
        *((name, ctypes.c_int64) for name in ("B", "H", "N", "D", "centered", "threads")),
        ("epsilon", ctypes.c_float),
    ]


# ---------------------------------------------------------------- compiling and loading


def available() -> bool:
    return library() is not None


@functools.cache
def library() -> Any:
    """The compiled code, or None; why is said once."""
    with _lock:
        try:
            return _load(built())
        except Unbuilt as why:
            say(f"kernels: torch ({why})")
            return None


def _load(path: Path) -> Any:
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unbuilt(f"{path} can't be loaded: {error}") from None
    for name in FUNCTIONS:
        function = getattr(found, f"neighbors_{name}")
        function.argtypes, function.restype = [ctypes.POINTER(Call)], ctypes.c_int64
    pointers, sizes = 4 * (ctypes.c_void_p,), 3 * (ctypes.c_int64,)
    found.neighbors_dropped.argtypes, found.neighbors_dropped.restype = (*pointers, *sizes, ctypes.c_float, ctypes.c_int64), None
    found.neighbors_keep.argtypes, found.neighbors_keep.restype = (*pointers[1:], *5 * (ctypes.c_int64,)), ctypes.c_int64
    found.neighbors_distance.argtypes, found.neighbors_distance.restype = (ctypes.c_int64,), ctypes.c_double
    return found


# ---------------------------------------------------------------- calling it


def takes(*tensors: Tensor) -> bool:
    """Whether the C code computes with these: float32 on the CPU, none of them empty."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in tensors) and available()


def nearest(q: Tensor, k: Tensor, K: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """q (B, H, N, D), k (B, H, M, D) to scores and index (B, H, N, K), best first, equals by column; `own` (M,): a row's own column."""
    B, H, N, _ = q.shape
    if not 1 <= K <= k.shape[2]:
        raise ValueError(f"nearest: K must be from 1 to the number of columns ({k.shape[2]}), got {K}")
    score, index = q.new_empty(B, H, N, K), q.new_empty((B, H, N, K), dtype=torch.int64)
    call("nearest", rows=q, columns=k, K=K, score=score, chosen=index, own=None if own is None else places_of(own, N))
    return score, index


def places_of(columns: Tensor, N: int) -> Tensor:
    """Where each of N rows is among columns that are named by their rows; -1 where it is not."""
    there = (columns >= 0) & (columns < N)
    where = torch.arange(len(columns), device=columns.device)[there]
    return columns.new_full((N,), -1).index_put((columns[there],), where)


def scan(queries: Tensor, rows: Tensor, more: Tensor | None, K: int) -> tuple[Tensor, Tensor]:
    """The K largest of queries (Q, D) . rows (M, D) + more (M,): scores and index (Q, K), best first, equals by row; -1 for none."""
    if not 1 <= K <= len(rows):
        raise ValueError(f"scan: K must be from 1 to the number of rows ({len(rows)}), got {K}")
    score, index = queries.new_empty(1, 1, len(queries), K), queries.new_empty((1, 1, len(queries), K), dtype=torch.int64)
    call("scan", rows=queries[None, None], columns=rows[None, None], K=K, score=score, chosen=index, factor=more)
    return score[0, 0], index[0, 0]


def keep(scores: Tensor, first: int, best: Tensor, chosen: Tensor) -> None:
    """Into lists that stand, best and chosen (Q, K): scores (Q, M) in bfloat16 of the columns from `first` on. In an empty list
    all are minus infinity and -1."""
    given = (("scores", scores, torch.bfloat16), ("best", best, torch.float32), ("chosen", chosen, torch.int64))
    for name, part, kind in given:
        if part.dtype != kind or part.dim() != 2 or not part.is_contiguous() or not part.numel() or len(part) != len(scores):
            raise ValueError(f"keep: {name} must be {kind}, {len(scores)} rows side by side, got {part.dtype} {tuple(part.shape)}")
    if best.shape != chosen.shape:
        raise ValueError(f"keep: best and chosen must be of one shape, got {tuple(best.shape)} and {tuple(chosen.shape)}")
    sizes = (*scores.shape, first, best.shape[1], torch.get_num_threads())
    if not library().neighbors_keep(*(part.data_ptr() for _, part, _ in given), *sizes):
        raise MemoryError("keep: there is no memory")


def others(index: Tensor, places: Tensor) -> Tensor:
    """index (B, H, N, K), places (H, N, S) among the columns that are not in a row's list: these columns, (B, H, N, S)."""
    (B, H, N, _), S = index.shape, places.shape[2]
    found = index.new_empty((B, H, N, S), dtype=torch.int64)
    call("others", index=index, places=places, chosen=found)
    return found


def bag(v: Tensor, index: Tensor, weight: Tensor, factor: Tensor | None = None) -> Tensor:
    """sum_r weight[n, r] factor[r] v[index[n, r]]: (B, H, N, D), in memory (B, N, H, D), which is what a layer goes on with."""
    B, H, N, _ = index.shape
    out = v.new_empty(B, N, H, v.shape[3]).transpose(1, 2)
    call("bag", columns=v, out=out, index=index, weight=weight, factor=factor)
    return out


def spread(x: Tensor, index: Tensor, weight: Tensor, columns: int, factor: Tensor | None = None) -> Tensor:
    """out[index[n, r]] += weight[n, r] factor[r] x[n]: (B, H, columns, D)."""
    B, H, _, D = x.shape
    out = x.new_zeros(B, H, columns, D)
    call("spread", rows=x, out=out, index=index, weight=weight, factor=factor)
    return out


def pair_dot(x: Tensor, y: Tensor, index: Tensor, factor: Tensor | None = None) -> Tensor:
    """sum_d x[n] factor[r] y[index[n, r]]: (B, H, N, K)."""
    score = x.new_empty(index.shape)
    call("pair_dot", rows=x, columns=y, index=index, factor=factor, score=score)
    return score


def factor_gradient(x: Tensor, y: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """sum_n weight[n, r] x[n] y[index[n, r]] over all groups: (K, D)."""
    B, H, _, K = index.shape
    parts = x.new_zeros(B * H, K, x.shape[3])
    call("factor_gradient", rows=x, columns=y, index=index, weight=weight, score=parts)
    return parts.sum(0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor | None,
    K: int,
    scale: float,
    bias: Tensor | None = None,
    first: float | None = None,
    keep: Tensor | None = None,
    kernel: Tensor | None = None,
    among: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See layers/lists.py: sums (B, H, N, E or F), the chosen list (empty where it was given), and weights (B, H, N, K)."""
    B, H, N, _ = q.shape
    if index is None:
        room, picked = (k.shape[2], K) if among is None else (len(among) - 1, K - 1)
        picked -= 0 if places is None else places.shape[2]
        if not 1 <= picked <= room:
            raise ValueError(f"attend: from 1 to {room} columns can be selected for each row, got {picked}")
    factor, matrix = (kernel, None) if kernel is None or kernel.dim() == 2 else (None, kernel.transpose(0, 1).flatten(1))  # (F, K E)
    out, weight = v.new_empty(B, N, H, v.shape[3] if matrix is None else len(matrix)).transpose(1, 2), q.new_empty(B, H, N, K)
    chosen = q.new_empty((B, H, N, K) if index is None else (0,), dtype=torch.int64)
    parts: dict[str, Any] = {"index": index, "bias": bias, "keep": keep, "factor": factor, "matrix": matrix, "score": weight}
    parts |= {"among": among, "places": places}
    parts |= {"chosen": chosen if index is None else None, "first": None if first is None else q.new_tensor(first)}
    parts["kept"] = None if keep is None else torch.empty_like(weight)
    call("attend", rows=q, columns=k, values=v, out=out, K=K, scale=scale, **parts)
    return out, chosen, weight


def attend_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    weight: Tensor,
    scale: float,
    first: bool,
    keep: Tensor | None = None,
    kernel: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in q, k, v and the kernel (empty where there is none)."""
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    kept = weight if keep is None else weight * keep
    parts: dict[str, Any] = {"index": index, "weight": weight, "keep": keep, "first": q.new_zeros(()) if first else None}
    parts |= {"score": torch.empty_like(weight), "kept": kept, "d_rows": d_q, "d_columns": d_k, "d_values": d_v}
    if kernel is None or kernel.dim() == 2:
        call("attend_gradient", rows=q, columns=k, values=v, grad=grad, factor=kernel, scale=scale, **parts)
        return d_q, d_k, d_v, v.new_empty(0) if kernel is None else factor_gradient(grad, v, index.expand(weight.shape), kept)
    K, F, E = kernel.shape
    parts |= {"matrix": kernel.transpose(1, 2).flatten(0, 1), "turned": grad.transpose(2, 3), "d_matrix": v.new_empty(F, K * E)}
    call("attend_gradient", rows=q, columns=k, values=v, grad=grad, scale=scale, **parts)
    return d_q, d_k, d_v, parts["d_matrix"].view(F, K, E).transpose(0, 1)


def dropped(x: Tensor, keys: Tensor, numbers: Tensor, below: int, scale: float) -> Tensor:
    """Dropout of rows by their keys (B,) and numbers of places (count,), both int32; see layers/dropout.py."""
    x, keys, numbers = x.contiguous(), keys.contiguous(), numbers.contiguous()
    if x.numel() != len(keys) * len(numbers) or not keys.dtype == numbers.dtype == torch.int32:
        raise ValueError(f"dropped: {tuple(x.shape)} must be {len(keys)} rows of {len(numbers)}, by keys and numbers of int32")
    out, (rows, count) = torch.empty_like(x), (len(keys), len(numbers))
    pointers = (t.data_ptr() for t in (out, x, keys, numbers))
    library().neighbors_dropped(*pointers, rows, count, below, scale, torch.get_num_threads())
    return out


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool) -> Tensor:
    """x (B, H, N, D), each row by the mean of its channels (where `centered`) and their deviation, times weight (D,), plus bias (D,)."""
    y = x.new_empty(x.shape)
    normalize("normalized", x, epsilon, centered, y=y, weight=weight, bias=bias)
    return y


def normalized_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in x, weight and bias (empty where there is none)."""
    groups = len(x) * x.shape[1]
    d_x = x.new_empty(x.shape)
    d_weight, d_bias = (x.new_empty((0, 0) if t is None else (groups, x.shape[3])) for t in (weight, bias))
    parts = {"d_weight": d_weight if d_weight.numel() else None, "d_bias": d_bias if d_bias.numel() else None}
    normalize("normalized_gradient", x, epsilon, centered, grad=grad, d_x=d_x, weight=weight, **parts)
    return d_x, d_weight.sum(0), d_bias.sum(0)


def normalize(name: str, x: Tensor, epsilon: float, centered: bool, **parts: Tensor | None) -> None:
    sizes = dict(zip("BHND", x.shape, strict=True)) | {"centered": centered, "threads": torch.get_num_threads(), "epsilon": epsilon}
    there = {part: t if t.stride(-1) == 1 else t.contiguous() for part, t in {"x": x, **parts}.items() if t is not None}
    views = {part: View(t.data_ptr(), *t.stride()[:3]) if part in ("x", "grad") else t.data_ptr() for part, t in there.items()}
    getattr(library(), f"neighbors_{name}")(ctypes.byref(Norm(**sizes, **views)))


def distance() -> float | None:
    """Seconds that a line of memory takes from one core to another, if there is another: for who measures times."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2 or torch.get_num_threads() < 2 or not available():  # on one core, two threads would wait for each other's turns
        return None
    return statistics.median(library().neighbors_distance(2000) for _ in range(5)) or None


WRITTEN = frozenset(("out", "d_rows", "d_columns", "d_values", "d_matrix", "score", "kept", "chosen"))
WHOLE = frozenset(("index", "own", "among", "places"))


def call(name: str, *, K: int | None = None, scale: float = 1.0, **parts: Tensor | None) -> None:
    """Sizes follow from the tensors. What is not written may lie anywhere in memory, if its channels lie side by side."""
    there = {part: t if part in WRITTEN else readable(part, t) for part, t in parts.items() if t is not None}
    asked = Call.from_buffer_copy(sized(name, K, tuple((part, t.shape) for part, t in there.items())))
    asked.threads, asked.scale = torch.get_num_threads(), scale
    for part, t in there.items():
        setattr(asked, part, View(t.data_ptr(), *t.stride()[:3]) if part in VIEWS else t.data_ptr())
    if getattr(library(), f"neighbors_{name}")(ctypes.byref(asked)):
        raise IndexError(f"{name}: an index lies outside of the {asked.M} columns, or there is no memory")


def readable(part: str, t: Tensor) -> Tensor:
    """As the C code reads it."""
    if part in VIEWS:
        return t if t.stride(3) == 1 else t.contiguous()
    return (t.long() if part in WHOLE else t.float()).contiguous()


@functools.lru_cache(maxsize=1024)  # a model calls with few shapes, and often
def sized(name: str, K: int | None, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Call:
    """A call with its sizes and nothing else, once they are known to fit each other."""
    there = dict(shapes)
    of_rows, of_columns = (
        next(there[part] for part in names if part in there) for names in (("rows", "out", "index"), ("columns", "out", "index"))
    )
    (B, H, N, D), M = of_rows, of_columns[2]
    if "rows" not in there:  # `out` stands for them
        D = of_columns[3]
    E = there["values"][3] if "values" in there else D
    F = next((there[part][3] for part in ("grad", "out") if part in there and "matrix" in there), E)
    S, A = (there[part][-1] if part in there else 0 for part in ("places", "among"))
    K = K or there["index"][-1]
    lists = N * K if "index" in there and len(there["index"]) == 4 else 0
    asked = Call(B=B, H=H, N=N, M=M, D=D, E=E, F=F, K=K, A=A, S=S, lists=lists)
    check_sizes(name, asked, there)
    return asked


def check_sizes(name: str, asked: Call, shapes: dict[str, tuple[int, ...]]) -> None:
    """The C code believes its sizes: what is too small would be read beyond its end."""
    B, H, N, M, D, E, F, K, A, S = (getattr(asked, size) for size in SIZES)
    wanted = {"rows": (B, H, N, D), "columns": (B, H, M, D), "values": (B, H, M, E), "grad": (B, H, N, F), "bias": (N, K), "first": ()}
    wanted |= {"matrix": (F, K * E) if name == "attend" else (K * E, F), "turned": (B, H, F, N), "d_matrix": (F, K * E)}
    wanted |= {"d_rows": (B, H, N, D), "d_columns": (B, H, M, D), "d_values": (B, H, M, E), "own": (N,), "factor": (K, E)}
    wanted |= {"among": (A,), "places": (H, N, S)}
    wanted |= dict.fromkeys(("index", "weight", "keep", "score", "kept", "chosen"), (B, H, N, K))
    wanted["out"] = (B, H, M, D) if name == "spread" else (B, H, N, F)
    wanted["score"] = (B * H, K, D) if name == "factor_gradient" else (B, H, N, K)
    if asked.lists == 0:
        wanted["index"] = (N, K)
    if name == "scan":
        wanted["factor"] = (M,)
    if name == "others":
        wanted["chosen"] = (B, H, N, S)
    for part, shape in shapes.items():
        if shape != wanted[part]:
            raise ValueError(f"{name}: {part} must be {wanted[part]}, got {tuple(shape)}")
