"""Small trainings, one after the other in the same processes: `torchrun --nproc-per-node N -m tests.many FOLDER UNTIL` leaves the numbers
of each in FOLDER. In float64, so that what is left of a difference is one of meaning, not of rounding."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from inputs.batches import AnyBatches
from inputs.rows import Batch, Data
from ranks import here, together
from run.complete import complete
from run.parts import Kept, build_model, features_at_rest, load_data, loader, loaders
from tests import sharded
from train_eval import evaluate, train, train_head
from training.checkpoint import Checkpoints
from training.progress import Log, Silent, Tracker
from utils import Stopped

CPU = torch.device("cpu")
SMALL: dict[str, Any] = dict(dataset="digits", subset=0.1, batch_size=28, num_epochs=3, num_layers=2, d_hidden=16, num_heads=2, d_mlp=24)
PLAIN: dict[str, Any] = dict(head_epochs=0, mixup_alpha=0.0, dropout=0.0, ema_decay=0.0, warmup_epochs=1, patch_size=2)
NEAR: dict[str, Any] = dict(k_train=5, embed_dim=8)
CASES: dict[str, dict[str, Any]] = {
    "linear": dict(augment=True, noise=0.1),
    "knn": dict(head="knn", k_train=5),
    "attn-knn": dict(head="attn-knn", **NEAR),
    "linear+knn": dict(head="linear+knn", k_train=5, mixup_alpha=0.4),
    "linear+attn-knn": dict(head="linear+attn-knn", **NEAR, contrastive_form="margin", hard_negatives=1.0, entropy_reg=0.1),
    "mixup": dict(head="attn-knn", **NEAR, mixup_alpha=0.4, label_smoothing=0.1, bank_cap=50, memory_update_freq=0.5),
    "cutmix": dict(cutmix_alpha=1.0, criterion="MSE", ema_decay=0.9, optimizer="sgd"),
    "accumulation": dict(mixup_alpha=0.4, label_smoothing=0.1, accumulate=2, clip_grad_norm=0.1),
    "plateau": dict(scheduler="plateau", lr_step=1, num_epochs=5, lr=0.2, warmup_epochs=0),
    "patience": dict(patience=1, num_epochs=9, lr=0.05, select="nll"),
    "last batch of two rows": dict(head="attn-knn", **NEAR, batch_size=32),  # of 130: of three processes, two have none of its rows
    "dropout": dict(dropout=0.2, attention_dropout=0.2, token_dropout=0.3, mixup_alpha=0.4),
    "dropout in windows": dict(dropout=0.2, attention_dropout=0.2, layer="LocalAttention(window=4),SparseAttention"),
    "random candidates": dict(layer="SampledKnnAttention(K=3),ConvNNAttention(K=3, sampling_type='random', num_samples=8)", dropout=0.2),
    "sampled bank": dict(head="attn-knn", **NEAR, neighbor_sample=0.5, values="tabr", dropout=0.2, dropout_ramp=True),
    "bank in parts": dict(head="attn-knn", **NEAR, batch_size=32, shard_bank=True),
    "sampled bank in parts": dict(
        head="linear+attn-knn", **NEAR, mixup_alpha=0.4, neighbor_sample=0.5, memory_update_freq=0.5, shard_bank=True
    ),
    "timm": dict(model="timm/vit_tiny_patch16_224", resize=16, num_epochs=1, dropout=0.2, attention_dropout=0.2, token_dropout=0.5),
    "resnet": dict(model="timm/resnet10t", resize=8, num_epochs=1, accumulate=2, batch_size=32),
    "head alone": dict(head="attn-knn", **NEAR, num_epochs=1, head_epochs=2),
    "frozen": dict(head="attn-knn", **NEAR, freeze_backbone=True, augment=True, views=2),
}


class Doubled(AnyBatches):
    """The same rows in float64."""

    def __init__(self, rows: AnyBatches) -> None:
        vars(self).update(vars(rows))
        self.rows = rows

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        return (replace(batch, x=batch.x.double()) for batch in self.rows.epoch(epoch, start))

    def check_view(self, view: int) -> None:
        self.rows.check_view(view)

    def seen_as(self, view: int) -> Doubled:
        return Doubled(self.rows.seen_as(view))


@cache
def data_of(subset: float) -> Data:
    return load_data({"dataset": "digits", "subset": subset})


def trained(given: dict[str, Any], folder: Path, until: int = 0, resume: bool = False) -> dict[str, Any]:
    """A training in `folder`: the lines of its epochs, and the loss of each step."""
    data = data_of(given["subset"])
    config = complete(given, data)
    model = build_model(config, data, CPU)
    kept = Kept() if config.model.freeze_backbone else None
    train_set, val_set = loaders(config, data, model, CPU, kept)[:2] if kept else (loader(config, data, p, CPU) for p in ("train", "val"))
    assert train_set is not None
    assert val_set is not None
    model.double()
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[bool, type[Log]] = {True: Log, False: Silent}
    kind = kinds[here().only_first(lambda: True, bool)]
    log = kind(folder, Tracker(folder, {}), epochs=config.training.num_epochs, batches=len(train_set))
    checkpoints = Checkpoints(folder)
    until = until or config.training.num_epochs
    try:
        train(config, model, Doubled(train_set), Doubled(val_set), log=log, checkpoints=checkpoints, until=until, resume=resume)
    except Stopped:
        assert until < config.training.num_epochs
    alone = None
    if config.training.head_epochs:
        rest = features_at_rest(config, data, model.float(), CPU)  # in float32, so that rows which are copies stay so
        assert rest[1] is not None
        train_head(config, model.double(), Doubled(rest[0]))
        alone = evaluate(model, Doubled(rest[1]))
    lines = [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in checkpoints.lines]
    return {"lines": lines, "alone": alone, "weights": float(sum(p.detach().abs().sum() for p in model.parameters()))}


AGAIN = dict(head="attn-knn", **NEAR, dropout=0.2, mixup_alpha=0.4, ema_decay=0.9, accumulate=2, neighbor_sample=0.5)
GOES_ON = {"goes on": AGAIN, "goes on in parts": {**AGAIN, "shard_bank": True, "memory_update_freq": 1.5}}  # with a bank of earlier weights


def goes_on(name: str, folder: Path, until: int) -> dict[str, Any]:
    """One training up to an epoch, from where others may have left it."""
    given, place = {**SMALL, **PLAIN, **GOES_ON[name]}, folder / name
    return trained(given, place, until, resume=(place / "checkpoints" / "last").exists())


def main(folder: Path, until: int) -> dict[str, Any]:
    with together(60):
        found = {name: trained({**SMALL, **PLAIN, **given}, folder / name) for name, given in CASES.items()}
        found |= {name: goes_on(name, folder, until) for name in GOES_ON}
        found["bank"] = sharded.compared()
        here().only_first(lambda: (folder / "found.json").write_text(json.dumps(found)), int)
        return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
