"""Kinds of index by name or FAISS factory string, and approximate FAISS indexes that propose rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from classifiers.factory import check_factory
from classifiers.faiss_library import load_faiss, silenced
from classifiers.index import MISSING
from layers.compiled import native
from utils import BadOption, did_you_mean, say, shortened

KINDS = ("auto", "flat", "ip", "hnsw", "ivf", "ivfpq")
# auto is flat as long as 10,000 queries take a minute. Products of numbers that two cores do in a second, and how many dimensions more
# would take as long as what a scan does beside them (keeping the nearest): compiled code with AVX-512 (one core: 0.18, 0.54 and 2.0 ns for
# a query and a row of 16, 64 and 256 dimensions), FAISS.
COMPILED, FAISS = (250_000_000_000, 8), (20_000_000_000, 32)
MINUTE, QUERIES = 60, 10_000
SMALLEST_INDEX = 256  # rows, below which the named approximate kinds look at every row
RECALL, MEASURED = 0.99, 500  # share of the neighbors that an index must find, and rows that it is measured on
ENOUGH = 39  # rows for a centroid: FAISS warns below that
# The parts of a factory string that are learned by k-means: IVF8 and HNSW32_8+PQ4 have lists; PQ4 (of 8 bits), PQ4x5, RQ2x5, RQ1x6_2x4,
# PRQ2x3x4 and IMI2x5 codes. OPQ4 learns 8 bits, whatever it is followed by. LSQ needs no k-means.
LISTS = re.compile(r"(?:IVF|Residual(?!\d+x)|_(?=\d+\+PQ))(\d+)([kM]?)")
CODES = re.compile(r"(OPQ|PQ|RQ|IMI|Residual(?=\d+x))(\d+(?:x\d+)*(?:_\d+x\d+)*)")


def most_flat(dim: int) -> int:
    """Rows up to which auto looks at each of them."""
    products, beside = COMPILED if native.available() else FAISS
    return MINUTE * products // QUERIES // (dim + beside)


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


class Proposer:
    """An approximate FAISS index over the slots of a bank. A slot that is written again leaves a dead entry behind."""

    def __init__(self, text: str, rows: Tensor) -> None:
        faiss = load_faiss()
        self.text, self.trained_on = text, len(rows)
        self.slot_of = torch.empty(0, dtype=torch.long)  # of each entry; MISSING if it is dead
        try:
            self.use(faiss.index_factory(rows.shape[1], text))
            with silenced():  # it would print a line for each k-means over few rows, thousands of them; check_kind says it once
                self.index.train(rows.numpy())
                self.add(rows, torch.arange(len(rows)))
        except RuntimeError as error:
            raise BadOption("index", f"cannot be built over {len(rows)} rows ({_reason(error)})", text) from None

    def use(self, index: Any) -> None:
        faiss = load_faiss()
        self.index, self.lists, inside = index, faiss.try_extract_index_ivf(index), faiss.downcast_index(index)
        while self.lists is None and isinstance(inside, faiss.IndexPreTransform):
            inside = faiss.downcast_index(inside.index)
        self.graph = inside if hasattr(inside, "hnsw") else None
        self.efforts: dict[int, int] = {}  # for k neighbors: lists, or rows of the graph, that a search looks at

    def add(self, rows: Tensor, slots: Tensor) -> None:
        self.slot_of[torch.isin(self.slot_of, slots)] = MISSING
        self.index.add(rows.contiguous().numpy())
        self.slot_of = torch.cat([self.slot_of, slots])

    def serves(self, text: str, live: int) -> bool:
        """Whether it can go on: same kind, few dead entries, trained on as much as half of what it holds."""
        same = text == self.text or (text[:3] == self.text[:3] == "IVF") or (text.startswith("PCAR") and self.text.startswith("PCAR"))
        return same and len(self.slot_of) <= 1.25 * live and (live <= 2 * self.trained_on or self.graph is not None)

    def propose(self, queries: Tensor, count: int, live: int, effort: int) -> Tensor:
        """(B, M) slots, MISSING where the index found fewer. It looks at `effort` lists, or rows of the graph."""
        count = min(len(self.slot_of), math.ceil(count * (2 * len(self.slot_of) / live - 1)) + 1)  # some of them dead
        if self.lists is not None:
            self.lists.nprobe = min(self.lists.nlist, effort)
        elif self.graph is not None:
            self.graph.hnsw.efSearch = max(count, effort)
        entries = torch.from_numpy(self.index.search(queries.numpy(), count)[1])
        return self.slot_of[entries.clamp_min(0)].masked_fill(entries < 0, MISSING)

    def choose(self, k: int, wanted: float, shares: Callable[[int], Tensor]) -> None:
        """The least effort that finds the share `wanted` of k neighbors, by the share that an effort finds of each of some rows; said.

        Two standard errors below the mean of these rows are wanted: the least that is just enough for them is too little for others.
        """
        found: dict[int, str] = {}  # what to say of an effort

        def surely(effort: int) -> float:
            of_rows = shares(effort).double()
            mean, error = float(of_rows.mean()), float(of_rows.std(correction=0)) / math.sqrt(len(of_rows))
            found[effort] = f"recall {mean:.3f} ± {error:.3f} on {len(of_rows)} rows of the bank"
            return mean - 2 * error

        most, what = (self.lists.nlist, "lists") if self.lists is not None else (len(self.slot_of), "rows")
        changes = self.lists is not None or self.graph is not None
        least = 4 * k if self.graph is not None else 1  # what is proposed is looked at in any case
        self.efforts[k], reached = least_effort(surely, wanted, min(least, most), most if changes else 1)
        looks = f"looks at {self.efforts[k]:,} of {most:,} {what}" if changes else "looks at all codes"
        short = "" if reached >= wanted else f", not surely {wanted:g}: more would not help"
        _say_new((self.text, k), f"index: {self.text} {looks} for {k} neighbors ({found[self.efforts[k]]}{short})")


_said: dict[Any, str] = {}


def _say_new(what: Any, line: str) -> None:
    """Banks are made anew every epoch: what is as before is not said again."""
    if _said.get(what) != line:
        _said[what] = line
        say(line)


def least_effort(recall: Callable[[int], float], wanted: float, least: int, most: int) -> tuple[int, float]:
    """The effort from `least` to `most` from which on `recall`, which grows with it, is as wanted, to an eighth; and the recall there.

    Where none is enough, the least that comes within .005 of what all can do.
    """
    tried = {least: recall(least)}
    while max(tried.values()) < wanted and max(tried) < most:
        effort = min(most, 2 * max(tried))
        tried[effort] = recall(effort)
    reached = max(tried.values())
    wanted = wanted if reached >= wanted else reached - 0.005
    enough = min(effort for effort, found in tried.items() if found >= wanted)
    below = max((effort for effort in tried if effort < enough), default=enough)
    while enough - below > max(1, enough // 8):
        effort = (enough + below) // 2
        tried[effort] = recall(effort)
        enough, below = (effort, below) if tried[effort] >= wanted else (enough, effort)
    return enough, tried[enough]


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
