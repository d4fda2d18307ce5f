"""Our loop against a bare one, and our image pipeline against torchvision's. Prints ratios measured in one interleaved run.

python benchmarks/loop.py [--repeats 7] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as main.py has it

import numpy as np
import torch
import torch.nn.functional as F

import dataset
from inputs.batches import Batches
from inputs.memory import keep_memory
from run.complete import complete
from run.parts import build_model, loader
from train_eval import step
from training.state import TrainingState

CPU = torch.device("cpu")


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.3f}, {min(values):.3f} to {max(values):.3f} over {len(values)} pairs"


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def training_loop(name: str, repeats: int, **given: Any) -> None:
    """One epoch of ours (schedule, clipping, guards, losses, place) and of a bare loop, in turn, on the same model and batches."""
    data = dataset.load(name)
    config = complete({"dataset": name, **given}, data)
    train_set = loader(config, data, "train", CPU)
    assert train_set is not None
    options, model = config.training, config.model
    ours, bare = build_model(config, data, CPU), build_model(config, data, CPU)
    bare_head: Any = bare.head
    state = TrainingState(config, ours, len(train_set), CPU)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=options.lr, fused=True)  # as ours is
    ready = list(train_set.epoch(0))  # both sides read these: the pipeline has a benchmark of its own

    def epoch_of_ours() -> None:
        state.place.batch = 0
        for batch in ready:
            step(state, [batch])

    def epoch_of_bare() -> None:
        bare.train()
        for batch in ready:
            loss = F.cross_entropy(bare_head.fc(bare.backbone(batch.x)), batch.target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), options.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for warm_up in (epoch_of_ours, epoch_of_bare):
        warm_up()
    ratios, speeds = [], []
    for turn in range(repeats):
        order = (epoch_of_bare, epoch_of_ours) if turn % 2 else (epoch_of_ours, epoch_of_bare)
        taken = {call: seconds(call) for call in order}
        ratios.append(taken[epoch_of_bare] / taken[epoch_of_ours])
        speeds.append(len(data.train) / taken[epoch_of_ours])
    rows = f"{options.batch_size} rows, {model.num_layers} layers of {model.d_hidden}"
    print(f"training images/s, ours / bare loop ({name}, batches of {rows}): {spread(ratios)}; {statistics.median(speeds):,.0f} images/s")


def pipeline(repeats: int, rows: int) -> None:
    """32 x 32 to 224 x 224, random crop and flip, normalized: a batch at a time, and torchvision's transforms a sample at a time."""
    from PIL import Image
    from torchvision import transforms

    x = np.random.default_rng(0).integers(0, 256, (rows, 32, 32, 3), np.uint8)
    source = dataset.Source(x, np.arange(rows) % 10, x[:10], np.arange(10), classes=tuple("0123456789"))
    dataset.DATASETS.register("benchmark")(lambda root: source)
    data = dataset.load("benchmark", val_fraction=0.0)
    ours = Batches(data.train, data, batch_size=128, device=CPU, size=(224, 224), train=True, augment=True)
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.Resize(224),
            transforms.ToTensor(),
            transforms.Normalize(data.fitted["mean"], data.fitted["std"]),
        ]
    )
    images = [Image.fromarray(row) for row in x]

    def epoch_of_ours() -> None:
        for _ in ours.epoch(0):
            pass

    def epoch_of_torchvision() -> None:
        for i in range(0, rows, 128):
            torch.stack([transform(image) for image in images[i : i + 128]])

    for warm_up in (epoch_of_ours, epoch_of_torchvision):
        warm_up()
    ratios, speeds = [], []
    for turn in range(repeats):
        order = (epoch_of_torchvision, epoch_of_ours) if turn % 2 else (epoch_of_ours, epoch_of_torchvision)
        taken = {call: seconds(call) for call in order}
        ratios.append(taken[epoch_of_torchvision] / taken[epoch_of_ours])
        speeds.append(rows / taken[epoch_of_ours])
    what = "pipeline images/s, ours / torchvision a sample at a time in one process"
    print(f"{what}: {spread(ratios)}; {statistics.median(speeds):,.0f} images/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one small configuration")
    arguments = parser.parse_args()
    keep_memory()  # for both sides
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    training_loop("digits", arguments.repeats)
    if not arguments.quick:
        tiny = dict(resize=224, patch_size=16, num_layers=12, num_heads=3, d_hidden=192, d_mlp=768, batch_size=32)
        training_loop("fake(train=128, test=10, size=32)", arguments.repeats, **tiny)
    pipeline(arguments.repeats, 512 if arguments.quick else 2048)


if __name__ == "__main__":
    main()
