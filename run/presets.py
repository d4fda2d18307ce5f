"""What a run takes that says nothing else: the presets of the data sets, over those for its kind of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from utils import say

_SMALL = dict(num_layers=6, num_heads=3, d_hidden=96, d_mlp=192, num_epochs=20, batch_size=128, lr=1e-3, weight_decay=0.05)
_DIGITS = dict(patch_size=2, num_layers=4, num_heads=4, d_hidden=64, d_mlp=128)
_TINY = dict(patch_size=16, resize=224, num_layers=12, num_heads=3, d_hidden=192, d_mlp=768, dropout=0.1, attention_dropout=0.1)
_PAPER = dict(num_epochs=150, batch_size=256, lr=1e-4, weight_decay=0.01, scheduler="none", warmup_epochs=0)  # arXiv 2511.14137

_PLAIN = dict(resize=0, augment=False, mixup_alpha=0.0, ema_decay=0.0, dropout=0.0, attention_dropout=0.0)
IMAGES: dict[str, Any] = dict(_PLAIN, model="vit", scheduler="cosine", warmup_epochs=2, **_SMALL)
TABLES: dict[str, Any] = dict(
    IMAGES, model="mlp", patch_size=1, num_layers=2, num_heads=1, d_hidden=128, d_mlp=256, dropout=0.1, num_epochs=40, batch_size=64
)
PRESETS: dict[str, dict[str, Any]] = {
    # 1,295 rows learn by heart: mixing and averaging, chosen on validation rows over three seeds, take a third of the errors away.
    "digits": dict(_DIGITS, num_epochs=60, batch_size=32, lr=2e-3, warmup_epochs=4, dropout=0.1, mixup_alpha=0.3, ema_decay=0.995),
    "mnist": dict(patch_size=4),
    "fashion-mnist": dict(patch_size=4),
    "cifar10": {**_TINY, **_PAPER},
    "cifar100": {**_TINY, **_PAPER},
    "imagenet": {**_TINY, **_PAPER, "num_epochs": 300, "batch_size": 1024, "lr": 1e-3, "augment": True, "warmup_epochs": 5},
    "fake": dict(num_epochs=2),
}


def patch_size_for(height: int, width: int) -> int:
    """The smallest patch that divides both sides and leaves at most 196 patches (224 gives 16), of images up to 64 x 64 at most
    64 (28 and 32 give 4); or the largest there is."""
    largest, most = math.gcd(height, width), 64 if max(height, width) <= 64 else 196
    fitting = (p for p in range(1, largest + 1) if largest % p == 0 and height * width <= most * p * p)
    return next(fitting, largest)


def with_presets(given: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """What was given, over the data set's preset, over the defaults for its kind of rows."""
    images = len(shape) == 3
    name = given.get("dataset", "digits").partition(":")[0].partition("(")[0]
    preset = {**(IMAGES if images else TABLES), **PRESETS.get(name, {})}
    values: dict[str, Any] = {**preset, **given}
    if values["model"].startswith("timm/") and "resize" not in given:
        values["resize"] = model_size(values["model"])
    if images and "patch_size" not in values:
        side = values["resize"]
        values["patch_size"] = patch_size_for(*((side, side) if side else shape[1:]))
    if "warmup_epochs" not in given:  # a preset's warm-up, but never most of a short run
        values["warmup_epochs"] = min(values["warmup_epochs"], values["num_epochs"] / 5)
    return values


def model_size(name: str) -> int:
    """The image side that a timm model is made for; 0 where it takes images as they are."""
    from models.backbones import default_size  # late: timm takes its time

    if size := default_size(name):
        say(f"resize: {size} (the input size of {name})")
    return size
