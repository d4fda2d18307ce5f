"""What is explained: a loaded run, and one image as its model sees it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import config as flags
from inputs import store
from inputs.batches import Batches
from inputs.images import eight_bit
from inputs.rows import Data, Split, short_name
from run.complete import complete
from run.directory import check_writable, list_files
from run.loaded import Loaded, load
from run.parts import build_model, choose_device, load_data, loader, with_published_normalization
from run.plugin import load_plugin
from run.saved import own_checkpoint, require_facts, run_of
from utils import BadOption, parse_whole_number


@dataclass(frozen=True)
class Picked:
    """The image (or table row) to explain, as the model sees it: x (1, C, H, W), normalized."""

    x: Tensor
    name: str  # of its files
    title: str
    row: int | None = None  # of the test split


# ---------------------------------------------------------------- the run


def read_run(options: Mapping[str, Any], *, tables: bool = False) -> tuple[Loaded, Path]:
    """The run that was asked for, in eval(), and where its pictures go."""
    given = {k: v for k, v in options.items() if k in ("device", "data_path", "plugin")}
    flags.check(given)
    source = own_checkpoint(options["checkpoint"])
    folder = Path(options.get("output_dir") or run_of(source))
    check_writable(folder)
    facts = store.load(source, "none")[1]
    require_facts(facts)
    if not tables and len(facts["shape"]) != 3:
        raise BadOption("checkpoint", "must be a model of images: the rows of a table have no tokens", options["checkpoint"])
    loaded = load(options["checkpoint"], given)
    loaded.model.eval()
    return loaded, folder


def read_published(given: Mapping[str, Any], pretrained: str) -> Loaded:
    """A timm model with its trained classifier. Random weights have nothing to tell, so the classes must be the weights' own."""
    load_plugin(given.get("plugin"))
    device = choose_device(given.get("device", "auto"))
    data = load_data(given)
    config = complete({**given, "pretrained": pretrained}, data)
    model = build_model(config, data, device)
    if not hasattr(model.backbone, "classifier_weights"):
        raise BadOption("pretrained", f"must be weights with a classifier for the {data.num_classes} classes of {data.name}", pretrained)
    return Loaded(config, with_published_normalization(config, data), model, device, {}, None, None, Path())


def make_folder(folder: Path, *names: str) -> None:
    """For files of these names, which become a run's own if it is one; a symlink in the place of one is not followed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        list_files(folder, names)
        for path in (folder / name for name in names):
            if path.is_symlink():
                path.unlink()
    except OSError as error:
        raise BadOption("output_dir", f"must be a directory that can be written ({error.strerror})", str(folder)) from None


def name_of(data: Data) -> str:
    """Short enough for a title."""
    return short_name(data.name)


def rows_of(loaded: Loaded, part: str) -> Batches:
    """The rows of a split, as the run's evaluation, or its bank, sees them."""
    found = loader(loaded.config, loaded.data, part, loaded.device)
    assert found is not None
    return found


# ---------------------------------------------------------------- the image


def row_of(loaded: Loaded, row: int, part: str = "test") -> Tensor:
    """One row of a split: (1, C, H, W)."""
    # Batches of one: noise depends on a row's number, so the row must keep its own.
    single = loaded.config.but(batch_size=1, workers=0, augment=False)
    return next(rows_of(loaded._replace(config=single), part).plain().epoch(0, start=row)).x


def pick_image(loaded: Loaded, text: str) -> Picked:
    """INDEX, a row of the test split, or FILE, an image file of one's own."""
    rows = len(loaded.data.test)
    rule = f"must be a row of the test split (0 to {rows - 1})"
    if re.fullmatch(r"-?\d+", text):
        try:
            row = parse_whole_number("image", text, 0, rows - 1)
        except BadOption:
            raise BadOption("image", f"{rule} or an image file", text) from None
        x, label = row_of(loaded, row), loaded.data.classes[loaded.data.test.y[row]]
        return Picked(x, str(row), f"row {row} of the test split of {name_of(loaded.data)}, class {label}", row)
    if loaded.data.kind == "table":
        raise BadOption("image", f"{rule}: this run reads the rows of a table", text)
    if not Path(text).is_file():
        raise BadOption("image", f"{rule} or an image file that exists", text)
    own = Split(_read_file(loaded.data, text), np.zeros(1, np.int64))
    try:
        x = row_of(loaded._replace(data=dataclasses.replace(loaded.data, test=own)), 0)
    except BadOption as error:
        rule = error.rule.replace("has an image that can't be read", "must be an image file that can be read")
        raise BadOption("image", rule, text) from None
    stem = re.sub(r"[^0-9A-Za-z._-]+", "_", Path(text).stem)
    return Picked(x, stem, Path(text).name)


def _read_file(data: Data, path: str) -> np.ndarray:
    """A split of one image: its path where the run reads image files; else pixels, cropped and resized to the shape of the run's."""
    if data.kind == "files":
        return np.array([path])
    from PIL import Image, ImageOps

    channels, height, width = data.shape
    modes = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise BadOption("image", f"must be a row of the test split: no image file has {channels} channels", path)
    try:
        with Image.open(path) as file:
            image = ImageOps.fit(eight_bit(file).convert(modes[channels]), (width, height), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for a damaged file
        raise BadOption("image", f"must be an image file that can be read ({type(error).__name__})", path) from None
    return np.asarray(image).reshape(1, height, width, channels).transpose(0, 3, 1, 2).copy()  # (1, C, H, W)


def pixels_of(data: Data, x: Tensor) -> np.ndarray:
    """The image that the model saw, in 0..1: (H, W, 3)."""
    mean, std = (torch.tensor(data.fitted[k]).view(-1, 1, 1) for k in ("mean", "std"))
    image = (x[0].float().cpu() * std + mean).clamp(0, 1)  # (C, H, W)
    return (image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)).permute(1, 2, 0).numpy()


def prediction_of(loaded: Loaded, x: Tensor) -> tuple[str, float]:
    """The class that the classifier predicts for one image, and its probability."""
    probability = loaded.model.predict(x)[0]  # (classes,)
    return loaded.data.classes[int(probability.argmax())], float(probability.max())
