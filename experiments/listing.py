"""`python main.py list`: what there is, with options, parameters and measured cost."""

from __future__ import annotations

import torch

import layers
from classifiers import HEADS
from dataset import DATASETS, PREFIXES
from experiments.run import load_plugin
from layers.base import TokenMixer
from models import MODELS
from models.cost import gflops, parameters, rows_per_second
from utils import BadOption, first_line, nearest, options_of

KINDS = ("layers", "models", "heads", "datasets")
TIMM_SHOWN = 40


def show(what: str, dim: int, num_heads: int, image_size: int, patch_size: int, batch_size: int, pattern: str, plugin: str | None) -> None:
    load_plugin(plugin)
    if what not in (*KINDS, "all"):
        raise BadOption("what", f"must be one of {', '.join(KINDS)}, all{nearest(what, KINDS)}", what)
    if patch_size < 1 or image_size < patch_size or image_size % patch_size:
        raise BadOption("patch_size", f"must divide the image size ({image_size})", patch_size)
    if batch_size < 1:
        raise BadOption("batch_size", "must be at least 1", batch_size)
    parts = [
        lambda: show_layers(dim, num_heads, image_size // patch_size, batch_size),
        lambda: show_models(pattern),
        lambda: show_heads(dim),
        show_datasets,
    ]
    for kind, part in zip(KINDS, parts, strict=True):
        if what in (kind, "all"):
            part()
            print()


def show_layers(dim: int, num_heads: int, side: int, batch_size: int) -> None:
    """Each layer with its default options, measured forward in turn."""
    tokens = 1 + side * side
    setting = f"{dim} channels, {num_heads} heads, {tokens} tokens, batches of {batch_size}, {torch.get_num_threads()} threads"
    print(f"LAYERS, measured with {setting}")
    common = options_of(TokenMixer)
    x = torch.randn(batch_size, tokens, dim)
    for name in layers.LAYERS:
        cost = "not measured: "
        try:
            layer = layers.build(name, dim=dim, num_heads=num_heads, grid=(side, side), num_prefix_tokens=1).eval()
            with torch.no_grad():
                speed = rows_per_second(layer, x, seconds=0.2)
            cost = f"{parameters(layer):,} parameters, {gflops(layer, x):.3f} GFLOPs, {1e3 * batch_size / speed:.1f} ms forward"
        except BadOption as error:
            cost += str(error)
        print(f"\n  {name}: {first_line(layers.LAYERS[name])}\n    {cost}")
        own = {k: v for k, v in options_of(layers.LAYERS[name]).items() if k not in common and k not in layers.CONTEXT}
        if own:
            print("    " + ", ".join(f"{k}={v!r}" for k, v in own.items()))
    print(f"\n  every layer: {', '.join(f'{k}={v!r}' for k, v in common.items())}")


def show_models(pattern: str) -> None:
    print("MODELS")
    for name in MODELS:
        print(f"  {name}: {first_line(MODELS[name])}")
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
    print("HEADS")
    for name in HEADS:
        options = ", ".join(f"{k}={v!r}" for k, v in options_of(HEADS[name]).items())
        print(f"  {name}: {first_line(HEADS[name])}\n    {options}")


def show_datasets() -> None:
    print("DATA SETS")
    for name in DATASETS:
        options = ", ".join(f"{k}={v!r}" for k, v in options_of(DATASETS[name]).items())
        print(f"  {name}: {first_line(DATASETS[name])}" + (f"\n    {options}" if options else ""))
    from dataset import read_folder, read_npz
    from tables import read_csv

    for prefix, reader in (("folder", read_folder), ("npz", read_npz), ("csv", read_csv)):
        print(f"  {PREFIXES[prefix]}: {first_line(reader)}")
