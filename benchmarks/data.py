"""Our image pipeline, a batch at a time, against torchvision's transforms, a sample at a time; both in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

import dataset
from benchmarks.timing import Ask, Group, Side, Watch
from inputs.batches import Batches
from inputs.rows import Data

PART, OURS, TORCHVISION = "data", "our batches", "torchvision, a sample at a time"
CPU = torch.device("cpu")
BATCH = 128


@dataclass(frozen=True)
class Sizes:
    rows: int
    side: int = 224
    rounds: int = 15
    seconds: float = 40


FULL, QUICK = Sizes(1024), Sizes(256)


def groups(ask: Ask, sizes: Sizes | None = None) -> Iterator[Group]:
    sizes = sizes or (QUICK if ask.quick else FULL)
    data = dataset.load(f"fake(train={sizes.rows}, test=10, size=32)", val_fraction=0.0)
    for train in (True, False):
        ours = Batches(data.train, data, batch_size=BATCH, device=CPU, size=(sizes.side, sizes.side), train=train, augment=train)
        sides = {TORCHVISION: torchvision(data, sizes.side, train), OURS: epoch_of(ours)}
        what = "random crop and flip, " if train else ""
        setting = f"{sizes.rows} images of 32, {what}resized to {sizes.side}, normalized"
        yield Group(PART, setting, ("epoch",), (TORCHVISION,), sides, ask.effort(sizes.rounds, sizes.seconds), facts={"rows": sizes.rows})


def epoch_of(batches: Batches) -> Side:
    def run(watch: Watch) -> None:
        watch.lap()
        for _ in batches.epoch(0):
            pass
        watch.lap()

    return run


def torchvision(data: Data, side: int, train: bool) -> Side:
    from PIL import Image
    from torchvision import transforms

    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if train else []
    finish = [transforms.Resize(side), transforms.ToTensor(), transforms.Normalize(data.fitted["mean"], data.fitted["std"])]
    transform = transforms.Compose([*augment, *finish])
    opened = [Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in data.train.x]  # its rows are (C, H, W)

    def run(watch: Watch) -> None:
        watch.lap()
        for first in range(0, len(opened), BATCH):
            torch.stack([transform(image) for image in opened[first : first + BATCH]])
        watch.lap()

    return run
