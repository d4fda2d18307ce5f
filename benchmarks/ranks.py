"""What several processes cost: CPU time of a step, and the share of it that passes in collectives; and what dropout by rows costs.

OMP_NUM_THREADS=2 python -m benchmarks.ranks                                          one process, two threads
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.ranks                     two processes, a thread each
OMP_NUM_THREADS=1 python -m benchmarks.ranks --dropout                                dropout by rows against torch's
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as main.py has it

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dataset
import train_eval
from inputs.rows import Batch
from layers.dropout import Dropout, drawing
from ranks import here, together
from run.complete import complete
from run.parts import build_model, loader
from training.state import TrainingState

CPU = torch.device("cpu")
FAKE = "fake(train=256, test=10, size=32)"
VIT: dict[str, Any] = dict(patch_size=4, resize=32, num_layers=6, num_heads=3, d_hidden=192, d_mlp=768, dropout=0.1, batch_size=64)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits (0.13 M parameters, 32 rows a step)": ("digits", {}),
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
        self.state = TrainingState(config, self.model, len(train_set), CPU)
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


def steps(rounds: int) -> None:
    for title, (name, given) in SETTINGS.items():
        training = Training(name, given, 12)
        training.epoch()
        found = [training.epoch() for _ in range(rounds)]
        cpu = here().summed({"cpu": statistics.median(cpu for cpu, _ in found)})["cpu"]
        wall, share = statistics.median(wall for _, wall in found), training.in_collectives()
        how = f"{here().world} x {torch.get_num_threads()} threads"
        line = f"{title}, {how}: {1e3 * cpu:.2f} ms of CPU a step, {1e3 * wall:.2f} ms in all, {share:.0%} of it in collectives"
        here().only_first(partial(print, line), None)


def dropout(rounds: int) -> None:
    """The same training with all that drawing by rows takes, and with torch's dropout alone, in turn."""
    for title, (name, given) in SETTINGS.items():
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dropout", action="store_true", help="what dropout by rows costs")
    asked = parser.parse_args()
    with together(60):
        (dropout if asked.dropout else steps)(asked.rounds)


if __name__ == "__main__":
    main()
