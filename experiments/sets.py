"""The rows of a run as the loop wants them: images or table rows, or, under a frozen backbone, features computed once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from config import LAYER_OPTIONS, Config
from experiments.building import batches
from inputs.batches import AnyBatches
from inputs.features import Features, Reading, digest_of
from inputs.rows import Batch, Data
from train_eval import Classifier, autocast, without_nan


class Sets(NamedTuple):
    train: AnyBatches
    val: AnyBatches | None
    test: AnyBatches


def sets_of(config: Config, data: Data, model: Classifier, device: torch.device, folder: Path | None) -> Sets:
    """Training, validation and test rows. `folder` is the run, which keeps what it computes once; None: these rows are not the run's."""
    cache = Path(config.feature_cache) if config.feature_cache else folder / "features" if folder else None
    kept = features_in(config, model, device, cache) if config.freeze_backbone else None

    def rows(part: str) -> AnyBatches | None:
        images = batches(config, data, part, device)
        if images is None or kept is None:
            return images
        return kept.batches(part, images, views=config.tta if part == "test" else 1, epochs=config.views if images.augment else 0)

    train, val, test = (rows(part) for part in ("train", "val", "test"))
    assert train is not None
    assert test is not None
    return Sets(train, val, test)


def features_in(config: Config, model: Classifier, device: torch.device, folder: Path | None) -> Features:
    def embed(batch: Batch) -> Tensor:
        model.eval()
        with autocast(device, config.use_amp):
            return without_nan(model.features(batch).float())

    layer = tuple(getattr(config, name) for name in ("layer", "num_heads", "patch_size", *LAYER_OPTIONS))
    weights = digest_of(*(tensor for _, tensor in sorted(model.backbone.state_dict().items())))
    return Features(embed, weights, Reading(config.model, layer, config.use_amp), folder)
