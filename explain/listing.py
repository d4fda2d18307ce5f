"""`python main.py list`: what there is, with options, parameters and measured cost."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import layers
from classifiers import HEADS
from classifiers.weights import WEIGHTS
from dataset import DATASETS, PREFIXES
from evaluation.cost import ROUNDS, gflops, load, load_of, parameters, rows_per_second
from inputs.arrays import read_npz
from inputs.folders import read_folder
from inputs.tables import read_csv
from layers.base import TokenMixer
from models import MODELS, ModelSpec
from run.parts import random_bank
from run.plugin import load_plugin
from utils import BadOption, first_line, one_of, options_of

KINDS = ("layers", "models", "heads", "datasets")
TIMM_SHOWN = 40
BANK_ROWS = 10_000
MEASURED = f"median and quartiles of at least {ROUNDS} rounds"


def show(
    what: str, pattern: str, plugin: str | None, *, d_hidden: int, num_heads: int, image_size: int, patch_size: int, batch_size: int
) -> None:
    load_plugin(plugin)
    if plugin:
        show_added(plugin)
    one_of("WHAT", what, (*KINDS, "all"))
    if image_size % patch_size:
        raise BadOption("patch_size", f"must divide the image size ({image_size})", patch_size)
    parts = [
        lambda: show_layers(d_hidden, num_heads, image_size // patch_size, batch_size),
        lambda: show_models(d_hidden, num_heads, image_size, patch_size, batch_size, pattern),
        lambda: show_heads(d_hidden),
        show_datasets,
    ]
    for kind, part in zip(KINDS, parts, strict=True):
        if what in (kind, "all"):
            part()
            print()


def show_added(plugin: str) -> None:
    """What a user's file registered, each with its options; below, these stand among the others."""
    own = f"PLUGIN {Path(plugin).name} adds"
    print(own if (added := added_by(plugin)) else f"{own} nothing: no part is registered in it")
    for kind, name, part in added:
        options = ", ".join(f"{k}={v!r}" for k, v in options_of(part).items())
        print(f"  {kind} {name}: {first_line(part)}" + (f"\n    {options}" if options else ""))
    print()


def added_by(plugin: str) -> list[tuple[str, str, Any]]:
    """Kind, name and part."""
    of_kind: dict[str, Any] = {"layer": layers.LAYERS, "model": MODELS, "head": HEADS, "vote": WEIGHTS, "data set": DATASETS}
    file = Path(plugin).resolve()
    parts = [(kind, name, registry[name]) for kind, registry in of_kind.items() for name in registry]
    return [(kind, name, part) for kind, name, part in parts if file_of(part) == file]


def file_of(part: Any) -> Path | None:
    """Where a part is defined."""
    file = getattr(sys.modules.get(getattr(part, "__module__", "")), "__file__", None)
    return Path(file).resolve() if file else None


def cost_of(module: nn.Module, x: torch.Tensor) -> str:
    """Parameters, FLOPs of one row, and measured time of a batch."""
    slow, median, fast = (1e3 * len(x) / speed for speed in rows_per_second(module.eval(), x, most=0.2))
    return f"{parameters(module):,} parameters, {gflops(module, x):.3f} GFLOPs, {median:.3g} ms forward ({fast:.3g} to {slow:.3g})"


def show_layers(dim: int, num_heads: int, side: int, batch_size: int) -> None:
    """Each layer with its default options, measured forward in turn."""
    tokens = 1 + side * side
    setting = f"{dim} channels, {num_heads} heads, {tokens} tokens, batches of {batch_size}, {torch.get_num_threads()} threads"
    print(f"LAYERS, measured with {setting}; {MEASURED}; {load_of(load())}")
    common = options_of(TokenMixer)
    x = torch.randn(batch_size, tokens, dim)
    for name in layers.LAYERS:
        try:
            cost = cost_of(layers.build(name, dim=dim, num_heads=num_heads, grid=(side, side), num_prefix_tokens=1), x)
        except BadOption as error:
            cost = f"not measured: {error}"
        print(f"\n  {name}: {first_line(layers.LAYERS[name])}\n    {cost}")
        own = {k: v for k, v in options_of(layers.LAYERS[name]).items() if k not in common and k not in layers.CONTEXT}
        if own:
            print("    " + ", ".join(f"{k}={v!r}" for k, v in own.items()))
    print(f"\n  every layer: {', '.join(f'{k}={v!r}' for k, v in common.items())}")


def show_models(dim: int, num_heads: int, image_size: int, patch_size: int, batch_size: int, pattern: str) -> None:
    """Our models at the sizes asked for, and those of timm's whose names fit the pattern, at their own."""
    image = ModelSpec(
        name="", shape=(3, image_size, image_size), num_classes=10, dim=dim, num_heads=num_heads, d_mlp=4 * dim, patch_size=patch_size
    )
    sizes = f"{image.depth} blocks of {dim} channels, images of {image_size}, tables of 16 columns, batches of {batch_size}"
    print(f"MODELS, measured with {sizes}; {load_of(load())}")
    for name in MODELS:
        cost = "not measured: it refuses images and tables"
        for spec in (image, dataclasses.replace(image, shape=(16,))):
            with contextlib.suppress(BadOption):
                cost = cost_of(MODELS[name](dataclasses.replace(spec, name=name)), torch.randn(batch_size, *spec.shape))
                break
        print(f"  {name}: {first_line(MODELS[name])}\n    {cost}")
    import timm

    names = timm.list_models(pattern) if pattern else []
    print(f"  timm/NAME: any of timm's {len(timm.list_models())} models (--filter 'vit_tiny*' shows some)")
    for name in names[:TIMM_SHOWN]:
        with torch.device("meta"):
            model = timm.create_model(name)
        print(f"    timm/{name}: {parameters(model) / 1e6:.2f} M parameters")
    if len(names) > TIMM_SHOWN:
        print(f"    and {len(names) - TIMM_SHOWN} more")


def show_heads(dim: int) -> None:
    setting = f"{dim} features, 10 classes and, for those that look at neighbors, a bank of {BANK_ROWS:,} rows"
    print(f"HEADS, measured with {setting}; {load_of(load())}")
    for name in HEADS:
        options = ", ".join(f"{k}={v!r}" for k, v in options_of(HEADS[name]).items())
        head: Any = HEADS[name](dim, 10)
        if head.wants_bank:
            head.refresh(random_bank(head.embed(torch.zeros(1, dim)).shape[1], BANK_ROWS, 10))
        print(f"  {name}: {first_line(HEADS[name])}\n    {cost_of(head, torch.randn(512, dim))} of 512 rows\n    {options}")


def show_datasets() -> None:
    print("DATA SETS")
    for name in DATASETS:
        options = ", ".join(f"{k}={v!r}" for k, v in options_of(DATASETS[name]).items())
        print(f"  {name}: {first_line(DATASETS[name])}" + (f"\n    {options}" if options else ""))
    for prefix, reader in (("folder", read_folder), ("npz", read_npz), ("csv", read_csv)):
        print(f"  {PREFIXES[prefix]}: {first_line(reader)}")
