"""The rows of a run as the loop wants them: images or table rows, or, under a frozen backbone, features computed once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import dataset
from config import LAYER_OPTIONS, Config
from experiments.building import batches
from inputs import store
from inputs.batches import AnyBatches, Batches, FeatureBatches
from train_eval import Classifier, autocast, features_of, without_nan
from utils import BadOption, say


class Sets(NamedTuple):
    train: AnyBatches
    val: AnyBatches | None
    test: AnyBatches


def sets_of(config: Config, data: dataset.Data, model: Classifier, device: torch.device, folder: Path | None) -> Sets:
    """Training, validation and test rows. `folder` is the run, which keeps what it computes once; None: these rows are not the run's."""

    def images(part: str) -> AnyBatches | None:
        return batches(config, data, part, device)

    cache = Path(config.feature_cache) if config.feature_cache else folder / "features" if folder else None
    kept = Features(config, data, model, device, cache) if config.freeze_backbone else None
    train, val, test = (kept.batches(part) if kept else images(part) for part in ("train", "val", "test"))
    assert train is not None
    assert test is not None
    return Sets(train, val, test)


class Features:
    """Features of a frozen backbone, kept on disk (if there is a folder) with their checksum under the hash of all that they
    follow from."""

    def __init__(self, config: Config, data: dataset.Data, model: Classifier, device: torch.device, folder: Path | None) -> None:
        self.config, self.data, self.model, self.device, self.folder = config, data, model, device, folder
        self.weights = digest_of(*(t for _, t in sorted(model.backbone.state_dict().items())))

    def batches(self, part: str) -> FeatureBatches | None:
        images = batches(self.config, self.data, part, self.device)
        if images is None:
            return None
        if part == "train" and self.config.augment:
            plain = self.of("train", images.plain())
            views = [plain, *(self.of(f"train-augmented-{e}", images, plain, e) for e in range(self.config.views))]
        else:
            count = self.config.tta if part == "test" else 1
            views = [self.of(f"{part}-view-{v}" if v else part, images.seen_as(v)) for v in range(count)]
        config = self.config
        settings = dict(data=self.data, batch_size=config.batch_size, device=self.device, train=part == "train", seed=config.seed)
        return FeatureBatches(torch.stack(views), images.split.y, **settings)  # type: ignore[arg-type]

    def of(self, name: str, images: Batches, plain: Tensor | None = None, epoch: int = 0) -> Tensor:
        """From disk if they are there, else computed and put there. `plain` stands where an epoch leaves a row out."""
        folder = self.folder and self.folder / f"{name}-{self.key(images, epoch if plain is not None else images.view)}"
        if folder and (folder / store.INDEX).exists():
            try:
                return store.load(folder)[0]["features"]["x"].to(self.device)
            except BadOption as error:
                say(f"features: computed anew; the cache is damaged ({error.rule})")
        say(f"features: {len(images.split):,} rows of {name} through the frozen backbone")
        if plain is None:
            found = features_of(self.model, images, self.config.use_amp)
        else:
            found = plain.clone()
            self.model.eval()
            with torch.no_grad():
                for batch in images.epoch(epoch):
                    with autocast(self.device, self.config.use_amp):
                        found[batch.index] = without_nan(self.model.features(batch).float())
        if folder:
            store.save(folder, {"features": {"x": found}}, {"rows": len(found), "of": name})
        return found

    def key(self, images: Batches, view: int) -> str:
        """Of the weights, the rows, and how they are read."""
        split, config = images.split, self.config
        rows = "\n".join(stamp(path) for path in split.x) if images.files else np.ascontiguousarray(split.x)
        random = config.noise > 0 or view > 0 or images.augment
        layers = [getattr(config, name) for name in ("layer", "num_heads", "patch_size", *LAYER_OPTIONS)]  # weights don't tell them
        reading = (config.model, *layers, images.size, config.noise, config.use_amp, images.train, images.augment, self.data.flip, view)
        reading += (config.seed * random,)
        fitted = sorted(self.data.fitted.items())
        return digest_of(self.weights, rows, repr(reading), repr(fitted), repr(split.x.shape))[:16]


def stamp(path: str) -> str:
    """An image file's name and when it was written."""
    return f"{path} {Path(path).stat().st_mtime_ns}"


def digest_of(*parts: Tensor | np.ndarray | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
        else:
            digest.update(np.ascontiguousarray(part.detach().cpu().numpy() if isinstance(part, Tensor) else part).data)
    return digest.hexdigest()
