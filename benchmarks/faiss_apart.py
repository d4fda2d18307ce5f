"""FAISS in a process of its own, because its BLAS reads OPENBLAS_CORETYPE when it is loaded.

python -m benchmarks.faiss_apart ROWS.npy K QUERIES THREADS CLOCK     for each line that it reads: a search, and its seconds on a line
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SEED = 1


def draws(rows: int, queries: int) -> Iterator[np.ndarray]:
    """Rows of the bank that ask, other ones in each round; the same for all who count from here."""
    generator = np.random.default_rng(SEED)
    while True:
        yield generator.permutation(rows)[:queries]


class Apart:
    """The process, from outside."""

    def __init__(self, rows: Path, k: int, queries: int, threads: int, clock: str, environment: dict[str, str]) -> None:
        words = [sys.executable, "-m", "benchmarks.faiss_apart", str(rows), *map(str, (k, queries, threads)), clock]
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)

    def seconds(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("search\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"FAISS ended with exit code {self.process.wait()}")
        return float(line)

    def end(self) -> None:
        self.process.communicate()


def main(rows: str, k: str, queries: str, threads: str, clock: str) -> None:
    import faiss

    from benchmarks.timing import CLOCKS

    x, now = np.load(rows), CLOCKS[clock]
    faiss.omp_set_num_threads(int(threads))
    index = faiss.IndexFlatL2(x.shape[1])
    index.add(x)
    ways: tuple[Callable[[np.ndarray], Any], ...] = (lambda q: index.search(q, int(k)), lambda q: faiss.knn(q, x, int(k)))
    order = draws(len(x), int(queries))
    for _ in sys.stdin:
        ids, taken = next(order), []
        for way in ways:
            start = now()
            way(x[ids])
            taken.append(now() - start)
        print(min(taken), flush=True)  # the faster of both ways to ask it


if __name__ == "__main__":
    main(*sys.argv[1:])
