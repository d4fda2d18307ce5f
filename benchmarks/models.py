"""A training step of a whole model with one layer or another, beside timm's model with timm's own step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.loop import TINY, Prepared
from benchmarks.timing import Ask, Group, Side, Watch

PART, DENSE, TIMM = "models", "Attention", "timm's model and step"
PLAIN = {"mixup_alpha": 0.0, "ema_decay": 0.0}  # as timm's step
LAYERS = {
    DENSE: "Attention",
    "KvtAttention": "KvtAttention(K=9)",
    "ConvNN depthwise": "ConvNNAttention(K=9)",
    "SampledKnn": "SampledKnnAttention(K=9)",
}


@dataclass(frozen=True)
class Sizes:
    layers: tuple[str, ...]
    options: dict[str, Any]
    batch: int
    rounds: int = 15
    seconds: float = 120


FULL = Sizes(tuple(LAYERS), TINY, 8)
QUICK = Sizes((DENSE, "KvtAttention"), TINY, 4)


def groups(ask: Ask, sizes: Sizes | None = None) -> Iterator[Group]:
    sizes = sizes or (QUICK if ask.quick else FULL)
    batch, size = ask.batch_size or sizes.batch, sizes.options["resize"]
    for dtype in ask.dtypes or ("float32",):
        sides: dict[str, Side] = {}
        for name in sizes.layers:
            given = {**sizes.options, **PLAIN, "layer": LAYERS[name], "batch_size": batch, "use_amp": dtype == "bfloat16"}
            prepared = Prepared(f"fake(train={max(200, 2 * batch)}, test=10, size=32)", 1, ask.device, **given)
            sides[name] = prepared.our_loop()
            if name == DENSE:
                sides[TIMM] = timm_step(prepared, sizes.options, dtype)
        shape = f"{sizes.options['num_layers']} blocks of {sizes.options['d_hidden']}"
        setting = f"a training step of a Vision Transformer ({shape}) at {size}, {batch} images, {dtype}"
        facts = {"image_size": size, "images": batch, "dtype": dtype}
        yield Group(PART, setting, ("training step",), (DENSE,), sides, ask.effort(sizes.rounds, sizes.seconds), ask.device, facts)


def timm_step(prepared: Prepared, options: dict[str, Any], dtype: str) -> Side:
    """Forward, loss, backward, clipping and optimizer of timm's train.py, with timm's Vision Transformer of the same size."""
    from timm.models.vision_transformer import VisionTransformer
    from timm.optim import create_optimizer_v2
    from timm.utils import dispatch_clip_grad

    training = prepared.config.training
    model = VisionTransformer(
        img_size=options["resize"],
        patch_size=options["patch_size"],
        in_chans=prepared.data.shape[0],
        num_classes=prepared.data.num_classes,
        embed_dim=options["d_hidden"],
        depth=options["num_layers"],
        num_heads=options["num_heads"],
        mlp_ratio=options["d_mlp"] / options["d_hidden"],
    ).to(prepared.device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=training.lr, weight_decay=training.weight_decay)
    (batch,) = prepared.batches

    def run(watch: Watch) -> None:
        model.train()
        watch.lap()
        with torch.autocast(prepared.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = F.cross_entropy(model(batch.x), batch.target)
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=training.clip_grad_norm, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        watch.lap()

    return run
