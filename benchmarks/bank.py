"""The bank beside raw FAISS: searching, its kinds of index, and making it.

As a file, with `--rows`, it measures a bank on disk (bigbank.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.faiss_apart import Apart, draws
from benchmarks.timing import Ask, Group, Side, Watch
from classifiers.bank import Bank
from classifiers.faiss_library import AVX512, CORETYPE
from layers.compiled import native

PART, K, CLASSES, QUERIES = "bank", 16, 10, 512
INSTALLED, BEST = "FAISS as installed", "FAISS at its best"
KINDS = ("flat", "ip", "hnsw", "ivf")


@dataclass(frozen=True)
class Sizes:
    rows: int
    dims: tuple[int, ...]
    kinds: bool
    queries: int = QUERIES
    rounds: int = 25
    seconds: float = 40


FULL, QUICK = Sizes(50_000, (256, 64), kinds=True), Sizes(50_000, (256, 64), kinds=False)


def clustered(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Unit vectors around one center a class, and their classes: what a trained embedder gives."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, dim, generator=generator)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return F.normalize(centers[labels] + torch.randn(rows, dim, generator=generator), dim=1), labels


def of_run(checkpoint: str) -> tuple[Tensor, Tensor]:
    """The embeddings and classes in the bank of a trained run."""
    from run import load
    from utils import BadOption

    retriever = load(checkpoint).retriever
    if retriever is None or retriever.bank is None:
        raise BadOption("checkpoint", "must be of a run with a bank (a head with neighbors, or baselines)", checkpoint)
    return retriever.bank.embeddings.clone(), retriever.bank.labels.clone()


def groups(ask: Ask, sizes: Sizes | None = None) -> Iterator[Group]:
    sizes = sizes or (QUICK if ask.quick else FULL)
    if ask.checkpoint:
        x, labels = of_run(ask.checkpoint)
        banks = [("embeddings of a trained run", x, labels)]
    else:
        banks = [("clustered unit vectors", *clustered(sizes.rows, dim)) for dim in sizes.dims]
    for what, x, labels in banks:
        yield from searching(ask, sizes, what, x, labels)
    if sizes.kinds:
        _, x, labels = banks[0]
        yield kinds(ask, sizes, x, labels)
        yield making(ask, sizes, x, labels)


def facts_of(x: Tensor) -> dict[str, int]:
    return {"rows": len(x), "dim": x.shape[1]}


# ---------------------------------------------------------------- searching


def searching(ask: Ask, sizes: Sizes, what: str, x: Tensor, labels: Tensor) -> Iterator[Group]:
    """Ours leaves each query's own row out, and proves that what it found is the nearest; FAISS does neither."""
    bank = Bank(x.shape[1], kind="flat")
    bank.add(x, labels)
    queries = min(sizes.queries, len(x))
    sides: dict[str, Side] = {"Bank.search": by_ids(x, queries, lambda ids: bank.search(x[ids], K, exclude=ids))}
    absent = {}
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        np.save(folder / "rows.npy", x.numpy())
        for name, core in {INSTALLED: "", BEST: best_core()}.items():
            if core is None:
                absent[name] = "no AVX-512: what is installed is the best"
                continue
            process = Apart(folder / "rows.npy", K, queries, ask.threads, ask.clock, environment(core, ask.threads))
            ends.callback(process.end)
            sides[name] = partial(told, process)
        setting = f"{len(x):,} {what} of {x.shape[1]} dimensions, k = {K}, {queries} queries at a time"
        notes = {BEST: f"{CORETYPE}={best_core()}"}
        effort = ask.effort(sizes.rounds, sizes.seconds)
        yield Group(PART, setting, ("search",), (INSTALLED,), sides, effort, facts=facts_of(x), absent=absent, notes=notes, memory=False)


def best_core() -> str | None:
    """The kernels of FAISS's OpenBLAS for AVX-512. It does not know new AMD processors, and takes older ones for them."""
    return "SkylakeX" if set(native.processor().split()) >= AVX512 else None


def environment(core: str, threads: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != CORETYPE}
    return {**kept, "OMP_NUM_THREADS": str(threads), **({CORETYPE: core} if core else {})}


def told(process: Apart, watch: Watch) -> None:
    watch.took(process.seconds())


def by_ids(x: Tensor, queries: int, call: Callable[[Tensor], object]) -> Side:
    order = draws(len(x), queries)

    def run(watch: Watch) -> None:
        ids = torch.from_numpy(next(order))
        watch.lap()
        call(ids)
        watch.lap()

    return run


# ---------------------------------------------------------------- kinds of index, and a bank in the making


def kinds(ask: Ask, sizes: Sizes, x: Tensor, labels: Tensor) -> Group:
    queries = min(sizes.queries, len(x))
    sides, notes, nearest = {}, {}, None
    asked = torch.arange(min(len(x), 2048))
    for kind in KINDS:
        bank = Bank(x.shape[1], kind=kind)
        bank.add(x, labels)
        found = bank.search(x[asked], K, exclude=asked).index
        nearest = found if nearest is None else nearest
        notes[kind] = f"recall {(found[:, :, None] == nearest[:, None]).any(2).float().mean().item():.3f}"
        sides[kind] = by_ids(x, queries, lambda ids, bank=bank: bank.search(x[ids], K, exclude=ids))  # type: ignore[misc]
    setting = f"kinds of index over {len(x):,} rows of {x.shape[1]} dimensions, k = {K}, {queries} queries at a time"
    effort = ask.effort(sizes.rounds, sizes.seconds)
    return Group(PART, setting, ("search by kind",), ("flat",), sides, effort, facts={"kinds": True}, notes=notes, memory=False)


def making(ask: Ask, sizes: Sizes, x: Tensor, labels: Tensor) -> Group:
    """A bank of embeddings that come a batch at a time, as a run makes it, and of all of them at once."""
    ids = torch.arange(len(x))
    made: list[Bank] = []

    def embedded() -> Iterator[tuple[Tensor, Tensor]]:
        for part in ids.split(sizes.queries):
            yield part, F.normalize(x[part] + 0.01, dim=1)

    def a_batch_at_a_time(watch: Watch) -> None:
        made[:] = [Bank(x.shape[1], kind="flat")]
        watch.lap()
        made[0].refresh(labels, ids, embedded())
        watch.lap()

    def all_at_once(watch: Watch) -> None:
        made[:] = [Bank(x.shape[1], kind="flat")]
        watch.lap()
        made[0].add(torch.cat([block for _, block in embedded()]), labels, ids)
        watch.lap()

    sides: dict[str, Side] = {"all at once": all_at_once, "a batch at a time": a_batch_at_a_time}
    setting = f"making a bank of {len(x):,} rows, {x.nbytes / 2**20:.0f} MB"
    return Group(PART, setting, ("made",), ("all at once",), sides, ask.effort(sizes.rounds, sizes.seconds / 4), facts={"making": True})


if __name__ == "__main__":
    from benchmarks.bigbank import main

    main()
