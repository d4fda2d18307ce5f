"""A bank on disk that is larger than memory: what building costs, what it finds, time of a query, memory.

    python benchmarks/bigbank.py --rows 1000000                      clustered rows of 128 numbers, lists of int8 codes
    python benchmarks/bigbank.py --rows 1000000 --dim 256 --codes none   every row is looked at: exact
    python benchmarks/bigbank.py --rows 10000000 --checkpoint RUN    the embeddings of a run's bank again and again, with noise

The truth is an exact search of all rows. Seconds are CPU time of all threads. Memory is what the process holds itself, at its worst
moment: pages of the files in memory are given back when somebody else needs them, and are shown beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bank import of_run
from classifiers.disk_bank import CODES, DiskBank, build_bank, given_back
from classifiers.faiss_library import load_faiss
from inputs.memory import keep_memory

K, QUERIES, BLOCK, CLUSTERS = 16, 512, 10_000, 1000


class Worst:
    """The most memory, in MB, that the process itself held, and with the pages of files, looked at twenty times a second."""

    def __init__(self) -> None:
        self.own = self.all = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            held = {line.split(":")[0]: line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "kB" in line}
            self.own = max(self.own, int(held["RssAnon"]) / 1024)
            self.all = max(self.all, int(held["VmRSS"]) / 1024)

    def __enter__(self) -> Worst:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def clustered(rows: int, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Unit vectors around centers, each block from a seed of its own."""
    centers = torch.randn(CLUSTERS, dim, generator=torch.Generator().manual_seed(0))
    for number, first in enumerate(range(0, rows, BLOCK)):
        generator = torch.Generator().manual_seed(number + 1)
        labels = torch.randint(CLUSTERS, (min(BLOCK, rows - first),), generator=generator)
        yield F.normalize(centers[labels] + torch.randn(len(labels), dim, generator=generator), dim=1), labels


def repeated(rows: int, embeddings: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows with other noise each time, a tenth of how far a row lies from its mean."""
    size = 0.1 * float((embeddings - embeddings.mean(0)).norm(dim=1).mean()) / embeddings.shape[1] ** 0.5
    for number, first in enumerate(range(0, rows, len(embeddings))):
        count = min(len(embeddings), rows - first)
        noise = torch.randn(count, embeddings.shape[1], generator=torch.Generator().manual_seed(number))
        yield F.normalize(embeddings[:count] + size * noise, dim=1), labels[:count]


def measured(bank: DiskBank) -> tuple[float, float, float]:
    """Recall of rows of the bank that it was not tuned on, and milliseconds of a query, through the lists and exactly."""
    own = torch.from_numpy(np.random.default_rng(1).choice(len(bank), QUERIES, replace=False))
    queries = bank.embeddings[own]
    bank.search(queries[:64], K, own[:64])  # chooses how many lists are looked at
    start = time.process_time()
    found = bank.search(queries, K, own)
    middle = time.process_time()
    bank._proposer, proposer = None, bank._proposer
    nearest = bank.search(queries, K, own)
    end = time.process_time()
    bank._proposer = proposer
    recall = (found.index[:, :, None] == nearest.index[:, None]).any(2).float().mean().item()
    return recall, 1e3 * (middle - start) / len(own), 1e3 * (end - middle) / len(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--codes", choices=tuple(CODES), default="int8")
    parser.add_argument("--recall", type=float, default=0.99)
    parser.add_argument("--checkpoint", help="a run whose embeddings are repeated")
    parser.add_argument("--folder", help="where the bank goes (default: a temporary folder)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    keep_memory()  # as main.py has it
    torch.set_num_threads(arguments.threads)
    load_faiss().omp_set_num_threads(arguments.threads)
    dim, stream = arguments.dim, clustered(arguments.rows, arguments.dim)
    if arguments.checkpoint:
        embeddings, labels = of_run(arguments.checkpoint)
        dim, stream = embeddings.shape[1], repeated(arguments.rows, embeddings, labels)
    with Worst() as before:
        time.sleep(0.2)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        with Worst() as building:
            start = time.process_time()
            bank = build_bank(Path(folder) / "bank", dim, stream, codes=arguments.codes, recall=arguments.recall)
            built = time.process_time() - start
        given_back(bank._file)
        ctypes.CDLL(None).malloc_trim(0)  # what is free but kept is not what searching takes
        with Worst() as searching:
            recall, through, exact = measured(bank)
        disk = sum(path.stat().st_size for path in (Path(folder) / "bank").iterdir()) / (1 << 20)
    print(
        f"rows      {arguments.rows:,} x {dim}, {arguments.codes}; {arguments.rows * dim * 4 >> 20:,} MB in float32, {disk:,.0f} MB on disk"
    )
    print(f"before    {before.own:,.0f} MB of its own ({before.all:,.0f} with pages of files: torch and FAISS)")
    print(f"build     {built:.1f} s of CPU, {building.own:,.0f} MB of its own ({building.all:,.0f} with pages of files)")
    print(f"search    {through:.3f} ms of CPU a query, recall@{K} {recall:.4f} on {QUERIES} rows; exact {exact:.3f} ms")
    print(f"memory    {searching.own:,.0f} MB of its own while searching ({searching.all:,.0f} with pages of files)")


if __name__ == "__main__":
    main()
