"""What several processes cost: CPU time of a step, and the share of it that passes in collectives; what dropout by rows costs; what a
bank in parts takes of memory, messages and time; and whether processes end as well as they begin.

OMP_NUM_THREADS=2 python -m benchmarks.ranks                                          one process, two threads
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.ranks                     two processes, a thread each
OMP_NUM_THREADS=1 python -m benchmarks.ranks --dropout                                dropout by rows against torch's
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.ranks --bank 200000x128   a bank in parts (with one process, whole)
OMP_NUM_THREADS=1 python -m benchmarks.ranks --starts 100                             two processes begin, train and end, again and again
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as main.py has it

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dataset
import train_eval
from classifiers.bank import Bank
from classifiers.faiss_library import load_faiss
from classifiers.sharded_bank import ShardedBank
from inputs.rows import Batch
from layers.dropout import Dropout, drawing
from ranks import here, together
from run.complete import complete
from run.parts import build_model, loader
from training.bank import BankRefresher

CPU = torch.device("cpu")
FAKE = "fake(train=256, test=10, size=32)"
VIT: dict[str, Any] = dict(patch_size=4, resize=32, num_layers=6, num_heads=3, d_hidden=192, d_mlp=768, dropout=0.1, batch_size=64)
Settings = dict[str, tuple[str, dict[str, Any]]]
SETTINGS: Settings = {
    "digits (0.13 M parameters, 32 rows a step)": ("digits", {}),
    "digits, attn-knn": ("digits", {"head": "attn-knn"}),
    "digits, attn-knn, bank in parts": ("digits", {"head": "attn-knn", "shard_bank": True}),
    "ViT of 6 blocks at 32 pixels (2.7 M parameters, 64 rows a step)": (FAKE, VIT),
}


class Training:
    """Steps on batches that wait in memory."""

    def __init__(self, name: str, given: dict[str, Any], most: int) -> None:
        data = dataset.load(name)
        config = complete({"dataset": name, **given}, data)
        train_set = loader(config, data, "train", CPU)
        assert train_set is not None
        self.model = build_model(config, data, CPU)
        self.state = train_eval.begun(config, self.model, train_set)
        BankRefresher(self.state, train_set.plain(), 1.0).for_training()
        self.batches: list[Batch] = list(train_set.epoch(0))[:most]

    def epoch(self) -> tuple[float, float]:
        """CPU and wall seconds a step of this process."""
        self.state.place.batch = 0
        cpu, wall = time.process_time(), time.perf_counter()
        for batch in self.batches:
            train_eval.step(self.state, [batch])
        return (time.process_time() - cpu) / len(self.batches), (time.perf_counter() - wall) / len(self.batches)

    def in_collectives(self) -> float:
        """Share of the time of an epoch in which this process sends or waits for others."""
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            wall = self.epoch()[1] * len(self.batches)
        return sum(event.cpu_time_total for event in seen.key_averages() if event.key.startswith("gloo:")) / 1e6 / wall


def steps(rounds: int, settings: Settings) -> None:
    for title, (name, given) in settings.items():
        training = Training(name, given, 12)
        training.epoch()
        found = [training.epoch() for _ in range(rounds)]
        cpu = here().summed({"cpu": statistics.median(cpu for cpu, _ in found)})["cpu"]
        wall, share = statistics.median(wall for _, wall in found), training.in_collectives()
        how = f"{here().world} x {torch.get_num_threads()} threads"
        line = f"{title}, {how}: {1e3 * cpu:.2f} ms of CPU a step, {1e3 * wall:.2f} ms in all, {share:.0%} of it in collectives"
        here().only_first(partial(print, line), lambda: None)


def dropout(rounds: int, settings: Settings) -> None:
    """The same training with all that drawing by rows takes, and with torch's dropout alone, in turn."""
    for title, (name, given) in settings.items():
        training = Training(name, given, 12)
        drops = [part for part in training.model.modules() if isinstance(part, nn.Dropout)]
        taken: dict[type, list[float]] = {Dropout: [], nn.Dropout: []}
        for _ in range(rounds + 1):
            for kind, times in taken.items():
                for part in drops:
                    part.__class__ = kind
                train_eval.drawing = drawing if kind is Dropout else lambda *_: nullcontext()  # type: ignore[assignment]
                times.append(training.epoch()[0])
        train_eval.drawing = drawing
        ratios = [ours / theirs for ours, theirs in zip(taken[Dropout][1:], taken[nn.Dropout][1:], strict=True)]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{title}: a step by rows takes {ratio} of one by torch's generator")


ENDED = "two steps taken"
K, QUERIES = 16, 256  # neighbors, and queries of each process


def bank(rounds: int, rows: int, dim: int) -> None:
    """Unit rows around 100 centers, each process making its own; queries are rows, which may not find themselves."""
    part, labels = here().part(rows), torch.arange(rows) % 100
    centers = F.normalize(torch.randn(100, dim, generator=torch.Generator().manual_seed(0)))
    mine = torch.arange(part.start, part.stop)
    load_faiss()  # not the bank's
    before = resident()
    own = Bank(dim, kind="flat")
    own.refresh(labels[mine], mine, ((ids, unit_rows(ids, centers)) for ids in mine.split(10_000)))
    held = resident() - before
    queries = mine[:: len(mine) // QUERIES][:QUERIES]
    searched, sent = ShardedBank(own, labels) if here().world > 1 else own, Sent()
    times = []
    with sent:
        for _ in range(rounds + 1):
            sent.count, start = 0, time.process_time()
            searched.search(own.embeddings[queries - part.start], K, queries)
            times.append(time.process_time() - start)
    cpu = here().summed({"cpu": statistics.median(times[1:])})["cpu"] / (here().world * QUERIES)
    line = (
        f"{rows:,} x {dim} on {here().world} processes: each holds {own.embeddings.nbytes / 1e6:,.1f} MB of rows (its memory grew by "
        f"{held / 1e6:,.1f} MB); {1e3 * cpu:.3f} ms of CPU a query, of all together; each sends {sent.count / QUERIES:,.0f} bytes a query"
    )
    here().only_first(partial(print, line), lambda: None)


def unit_rows(ids: Tensor, centers: Tensor) -> Tensor:
    drawn = torch.randn(len(ids), centers.shape[1], generator=torch.Generator().manual_seed(int(ids[0])))
    return F.normalize(centers[ids % len(centers)] + 0.05 * drawn)


def resident() -> int:
    """Bytes of this process's own memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Sent:
    """Counts the bytes that this process sends to others in `exchanged`."""

    def __enter__(self) -> None:
        self.count, self.ranks = 0, here()
        self.exchanged = self.ranks.exchanged

        def counted(parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
            self.count += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.ranks.rank)
            return self.exchanged(parts, counts)

        self.ranks.exchanged = counted  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        self.ranks.exchanged = self.exchanged  # type: ignore[method-assign]


def starts(count: int) -> None:
    """Each time torchrun begins two processes, which take two steps and end. An abort at the end, after all was well, has a code, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.ranks", "--once"]
    bad = 0
    for number in range(1, count + 1):
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode or ended.stdout.count(ENDED) != 2:
            bad += 1
            print(f"start {number}: code {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
        if number % 10 == 0 or number == count:
            print(f"{number} starts of two processes: {number - bad} ended well, {bad} did not", flush=True)


def once() -> None:
    Training("digits", {}, 2).epoch()
    print(ENDED, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="settings with this word in their name")
    parser.add_argument("--dropout", action="store_true", help="what dropout by rows costs")
    parser.add_argument("--bank", metavar="ROWSxDIM", help="a bank in parts")
    parser.add_argument("--starts", type=int, default=0, help="so many times two processes, from beginning to end")
    parser.add_argument("--once", action="store_true", help="one process of such a start")
    asked = parser.parse_args()
    if asked.starts:
        return starts(asked.starts)
    with together(60):
        if asked.once:
            once()
        elif asked.bank:
            bank(asked.rounds, *map(int, asked.bank.split("x")))
        else:
            settings = {title: setting for title, setting in SETTINGS.items() if asked.only in title}
            (dropout if asked.dropout else steps)(asked.rounds, settings)


if __name__ == "__main__":
    main()
