"""What the bank costs on top of FAISS: time of a search and of a vote, memory while a bank is made, and what each kind of index gives.

    python benchmarks/bank.py            50,000 rows of 256 numbers, k = 16, 512 queries at a time, 2 threads
    python benchmarks/bank.py --quick    5,000 rows

The rival is FAISS alone: `IndexFlatL2.search` or `faiss.knn`, whichever is faster. Each round times all sides once, in changing order,
on the same queries; a figure is the median over rounds of what the round gave (a ratio or a difference), with the quartiles.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from classifiers.neighbor_heads import AttnKnnHead

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as main.py has it

import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.bank import Bank, Neighbors
from classifiers.faiss_library import load_faiss
from inputs.memory import keep_memory

DIM, K, CLASSES, QUERIES, THREADS, HEADS = 256, 16, 10, 512, 2, 4
MEGABYTE = 1 << 20


def clustered(rows: int) -> tuple[Tensor, Tensor]:
    """Unit vectors around one center a class, and their classes: what a trained embedder gives."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, DIM, generator=generator)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return F.normalize(centers[labels] + torch.randn(rows, DIM, generator=generator), dim=1), labels


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(sides: dict[str, Callable[[Tensor], object]], rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, for QUERIES rows of the bank by their ids: other rows in each round."""
    generator = torch.Generator().manual_seed(1)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds + 2):
        ids = torch.randperm(rows, generator=generator)[:QUERIES]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(seconds(partial(sides[name], ids)))
    return {name: values[2:] for name, values in taken.items()}  # the first two warm up


def line(what: str, values: Sequence[float], unit: str = "", wanted: str = "") -> None:
    """The median with the quartiles (a single value stands alone), and what is wanted of it."""
    figure = f"{statistics.median(values):.3f}"
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4)
        figure += f" ({low:.3f} to {high:.3f})"
    print(f"{what:<58} {figure + ' ' + unit:<38} {wanted}".rstrip())


# ---------------------------------------------------------------- time


def search_and_vote(rows: int, rounds: int) -> None:
    faiss = load_faiss()
    x, labels = clustered(rows)
    bank = Bank(DIM, kind="flat")
    bank.add(x, labels)
    index = faiss.IndexFlatL2(DIM)
    index.add(x.numpy())
    head = AttnKnnHead(DIM, CLASSES, embed_dim=0, attention_heads=HEADS, k_train=K).eval()
    head.refresh(bank)

    @torch.no_grad()
    def vote(ids: Tensor) -> Tensor:
        """What the head does with embeddings: search, attention, class means, prior."""
        near = head.search(x[ids], K, ids)
        log_probs: Tensor = head.predictor(head.block(x[ids], x[ids], near, ids))
        return log_probs

    taken = interleaved(
        {
            "IndexFlatL2.search": lambda ids: index.search(x[ids].numpy(), K),
            "search": lambda ids: bank.search(x[ids], K, exclude=ids),
            "faiss.knn": lambda ids: faiss.knn(x[ids].numpy(), x.numpy(), K),
            "vote": vote,
        },
        rows,
        rounds,
    )
    rival = min("IndexFlatL2.search", "faiss.knn", key=lambda name: statistics.median(taken[name]))
    beyond = {name: [1e3 * (ours - raw) / QUERIES for raw, ours in zip(taken[rival], taken[name], strict=True)] for name in taken}
    line(f"raw FAISS: {rival}", [1e3 * s / QUERIES for s in taken[rival]], "ms a query")
    line("Bank.search", [1e3 * s / QUERIES for s in taken["search"]], "ms a query")
    line("raw / Bank.search", [raw / ours for raw, ours in zip(taken[rival], taken["search"], strict=True)], "", "at least 0.95")
    line("Bank.search beyond raw", beyond["search"], "ms a query")
    line("search + attention + vote with its prior, beyond raw", beyond["vote"], "ms a query", "at most 0.05")


def kinds(rows: int, rounds: int) -> None:
    x, labels = clustered(rows)
    banks = {kind: Bank(DIM, kind=kind) for kind in ("flat", "ip", "hnsw", "ivf")}
    building = {}
    for kind, bank in banks.items():
        bank.add(x, labels)
        building[kind] = seconds(partial(bank.search, x[:1], K))

    def leave_one_out(bank: Bank, ids: Tensor) -> Neighbors:
        return bank.search(x[ids], K, exclude=ids)

    taken = interleaved({kind: partial(leave_one_out, bank) for kind, bank in banks.items()}, rows, rounds)
    ids = torch.arange(min(rows, 2048))
    found = {kind: leave_one_out(bank, ids).index for kind, bank in banks.items()}
    for kind in banks:
        recall = (found[kind][:, :, None] == found["flat"][:, None]).any(2).float().mean().item()
        note = f"recall@{K} {recall:.3f}, first search {building[kind]:.1f} s"
        line(f"Bank.search, {kind}", [1e3 * s / QUERIES for s in taken[kind]], "ms a query", note)


# ---------------------------------------------------------------- memory


def resident(field: str) -> float:
    """MB; VmRSS is what the process has in memory now, VmHWM the most that it had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 1024


def peak_of(call: Callable[[], object]) -> tuple[float, float]:
    """MB at the worst moment, above what was there before, and seconds."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free but kept would hide what the call takes
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most so far becomes what there is now
    taken = seconds(call)
    return resident("VmHWM") - before, taken


def memory(rows: int, what: str) -> None:
    """A bank made of embeddings that come a batch at a time, as a run makes it. In a process of its own, so that nothing else is in it."""
    load_faiss()
    x, labels = clustered(rows)
    ids = torch.arange(rows)
    made: list[Bank] = []

    def embedded() -> Iterator[tuple[Tensor, Tensor]]:
        for part in ids.split(QUERIES):
            yield part, F.normalize(x[part] + 0.01, dim=1)

    def refresh() -> None:
        made.append(Bank(DIM, kind="flat"))
        made[0].refresh(labels, ids, embedded())

    def add() -> None:
        made.append(Bank(DIM, kind="flat"))
        made[0].add(torch.cat([block for _, block in embedded()]), labels, ids)

    peak, taken = peak_of({"refresh": refresh, "add": add}[what])
    itself = made[0].embeddings.nbytes / MEGABYTE
    line(f"{what}, peak above the bank itself ({itself:.0f} MB)", [peak - itself], "MB")
    line(f"{what}, time", [taken], "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="5,000 rows instead of 50,000")
    parser.add_argument("--memory", choices=("refresh", "add"), help="only this part, in this process")
    arguments = parser.parse_args()
    keep_memory()  # as main.py has it
    torch.set_num_threads(THREADS)
    load_faiss().omp_set_num_threads(THREADS)
    rows = 5_000 if arguments.quick else 50_000
    if arguments.memory:
        return memory(rows, arguments.memory)
    print(f"torch {torch.__version__}, FAISS {load_faiss().__version__}, {THREADS} threads; {rows:,} x {DIM}, k = {K}, {QUERIES} queries")
    search_and_vote(rows, arguments.rounds)
    kinds(rows, max(5, arguments.rounds // 4))
    sys.stdout.flush()
    for what in ("refresh", "add"):  # what a run does, and all embeddings at once
        subprocess.run([sys.executable, __file__, "--memory", what, *(["--quick"] if arguments.quick else [])], check=True)


if __name__ == "__main__":
    main()
