"""`python main.py explain --what tokens`: the patches that each layer of a run selects, as a picture, a table and a record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from config import Config
from explain.draw_tokens import draw_tokens
from explain.selection import Depth, Grid, Locality, choose_queries, depth_of, mean_of
from explain.subject import Picked, make_folder, name_of, pick_image, pixels_of, prediction_of, read_run, row_of
from inputs import store
from layers import TokenMixer
from layers.attention_map import Note, noted
from models.swap import find_attention, swap_attention, token_context
from run.loaded import Loaded
from utils import BadOption, parse_whole_number, say

TABLE_IMAGES = 64  # the table is a mean over so many test images
MOST_DEPTHS = 6  # in a picture, without --all


def tokens(options: dict[str, Any]) -> None:
    """What the layers read: chosen query patches and the patches that they selected, by depth and head."""
    K = parse_whole_number("K", options["K"], 1) if "K" in options else None
    loaded, folder = read_run(options)
    expose_attention(loaded, options["checkpoint"])
    grid = token_grid(loaded.model.backbone)
    if grid is None:
        raise BadOption("checkpoint", "must be a model that tells its grid of patches", options["checkpoint"])
    picked = pick_image(loaded, options["image"])
    label, probability = prediction_of(loaded, picked.x)
    picked = dataclasses.replace(picked, title=f"{picked.title}, predicted {label} ({probability:.1%})")
    pixels = pixels_of(loaded.data, picked.x)
    queries = parse_queries(options["queries"], grid) if "queries" in options else choose_queries(pixels, grid)
    depths = depths_of(loaded, grid, picked.x, K)
    shown = shown_of(depths, options)
    here, over = Locality(grid), locality_of_test(loaded, grid, K)
    here.add(depths)

    path = folder / f"explain-tokens-{picked.name}.png"
    make_folder(folder, *(path.with_suffix(end).name for end in (".png", ".txt", ".json")))
    _draw(path, loaded, picked, pixels=pixels, grid=grid, depths=depths, queries=queries, shown=shown)
    text = _table(picked, depths, here, over, shown)
    path.with_suffix(".txt").write_text(text + "\n")
    store.write_json(path.with_suffix(".json"), _record(picked, grid, depths, queries, here, over, loaded.config))
    print(f"{text}\n\nwritten to {path}, and beside it as .txt and .json")


def parse_queries(text: str, grid: Grid) -> list[tuple[int, int]]:
    """ "r,c;r,c" as places on the grid."""
    queries = []
    try:
        for place in text.strip().removesuffix(";").split(";"):
            row, column = (parse_whole_number("queries", word.strip(), 0) for word in place.split(","))
            if row >= grid.height or column >= grid.width:
                raise ValueError
            queries.append((row, column))
    except ValueError:  # a BadOption, too
        rule = f"must be patches 'row,column;row,column', rows 0 to {grid.height - 1} and columns 0 to {grid.width - 1}"
        raise BadOption("queries", rule, text) from None
    return list(dict.fromkeys(queries))


@dataclass(frozen=True)
class Shown:
    """What of the model is in the picture: `columns`, depths; `heads`, or their mean."""

    columns: list[int]
    heads: list[int]
    mean: bool


def shown_of(depths: list[Depth], options: Mapping[str, Any]) -> Shown:
    """The mean over heads at up to 6 depths, which fits a slide; the heads that --head names; every head and depth with --all."""
    every, head = bool(options.get("all")), options.get("head", "all" if options.get("all") else "mean")
    columns = list(range(len(depths))) if every else [round(c) for c in np.linspace(0, len(depths) - 1, min(len(depths), MOST_DEPTHS))]
    if head in ("mean", "all"):
        return Shown(columns, list(range(min(d.heads for d in depths))), head == "mean")
    return Shown(columns, parse_heads(head, depths), False)


def _draw(
    path: Path,
    loaded: Loaded,
    picked: Picked,
    *,
    pixels: np.ndarray,
    grid: Grid,
    depths: list[Depth],
    queries: list[tuple[int, int]],
    shown: Shown,
) -> None:
    names = ", ".join(dict.fromkeys(d.name for d in depths))
    of_heads = "mean over heads" if shown.mean else f"head {shown.heads[0]}" if len(shown.heads) == 1 else "each head by itself"
    title = f"What patches read: {names} on {name_of(loaded.data)}", f"{picked.title}; {of_heads}"
    heads = {0: ""} if shown.mean else {h: f"head {h}: " if len(shown.heads) > 1 else "" for h in shown.heads}
    drawn = [mean_of(d) for d in depths] if shown.mean else depths
    draw_tokens(path, pixels=pixels, title=title, grid=grid, depths=drawn, columns=shown.columns, queries=queries, heads=heads)


def parse_heads(text: str, depths: list[Depth]) -> list[int]:
    last = min(d.heads for d in depths) - 1
    try:
        heads = [parse_whole_number("head", word.strip(), 0, last) for word in text.split(",")]
    except BadOption:
        raise BadOption("head", f"must be mean, all, or heads by number, 0 to {last}, with commas between", text) from None
    return list(dict.fromkeys(heads))


# ---------------------------------------------------------------- what the layers read


def expose_attention(loaded: Loaded, named: str) -> None:
    """Every attention of the model as one of our layers: timm's own are swapped for the same in place, weights and all."""
    backbone = loaded.model.backbone
    found = find_attention(backbone)
    if not found:
        raise BadOption("checkpoint", f"must be a model with attention between tokens, and {loaded.config.model.model} has none", named)
    foreign = [i for i, module in enumerate(found.values()) if not isinstance(module, TokenMixer)]
    if foreign:
        try:
            swap_attention(backbone, "Attention", blocks=foreign)
        except BadOption as error:
            raise BadOption("checkpoint", f"must be a model whose attention can be seen: {error.rule}", named) from None
        say(f"{loaded.config.model.model}: its attention is seen through the layer Attention, with the same weights")


def token_grid(backbone: nn.Module) -> Grid | None:
    """Where the model says that its tokens are."""
    told: list[dict[str, Any]] = [{name: getattr(backbone, name, None) for name in ("grid", "num_prefix_tokens")}]
    told += [token_context(backbone, path) for path in find_attention(backbone)]
    for context in told:
        if context.get("grid"):
            height, width = context["grid"]
            return Grid(height, width, context["num_prefix_tokens"] or 0)
    return None


@torch.no_grad()
def look(model: nn.Module, x: Tensor) -> list[tuple[Any, Tensor, Tensor]]:
    """Layer, queries and keys of each time that a layer mixed tokens, in the order of depth."""
    notes: list[Note] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, TokenMixer):
                stack.enter_context(noted(module, "mix", notes))
        model(x)
    return [(layer, q, k) for layer, (q, k, *_), _ in notes]


def depths_of(loaded: Loaded, grid: Grid, x: Tensor, K: int | None) -> list[Depth]:
    """What each depth read of one image."""
    seen = look(loaded.model, x)
    fits = bool(seen) and all(q.shape == k.shape and (len(q), q.shape[2]) == (1, grid.tokens) for _, q, k in seen)
    if not fits:
        counts = ", ".join(dict.fromkeys(str(q.shape[2]) for _, q, _ in seen)) or "none: no layer called its mix"
        rule = f"must be a model whose layers all see the patches of one grid, {grid.height} x {grid.width} (tokens seen: {counts})"
        raise BadOption("checkpoint", rule, loaded.config.model.model)
    return [depth_of(layer, layer.attention_map(q, k), grid, K) for layer, q, k in seen]


def locality_of_test(loaded: Loaded, grid: Grid, K: int | None) -> Locality:
    """Over test images, evenly spaced over the split."""
    found, rows = Locality(grid), len(loaded.data.test)
    for row in np.linspace(0, rows - 1, min(rows, TABLE_IMAGES)):
        found.add(depths_of(loaded, grid, row_of(loaded, round(row)), K))
    return found


# ---------------------------------------------------------------- table and record


def _table(picked: Picked, depths: list[Depth], here: Locality, over: Locality, shown: Shown) -> str:
    """What a person reads: how local each depth is, and how alike neighboring depths select."""
    grid, width = here.grid, max(16, *(len(d.name) for d in depths))
    lines = [picked.title, ""]
    if shown.mean or len(shown.columns) < len(depths) or len(shown.heads) < max(d.heads for d in depths):
        heads = "the mean over heads" if shown.mean else f"heads {', '.join(map(str, shown.heads))}"
        seen = f"depths {', '.join(str(c + 1) for c in shown.columns)} of {len(depths)}, {heads}"
        lines += [f"The picture shows {seen} (--all draws every depth and head); the table has them all.", ""]
    images = f"{over.images} test image{'s, evenly spaced over the split' if over.images > 1 else ''}"
    lines += [f"Mean over {images}; all heads, all {grid.patches} patches of the {grid.height} x {grid.width} grid:", ""]
    head = f"{'depth':<7}{'layer':<{width}}{'shown':>12}{'distance':>10}{'weighted':>10}{'agreement':>11}{'by chance':>11}"
    lines += [f"{head}   this image: {'distance':>8}{'weighted':>10}{'agreement':>11}"]
    for i, d in enumerate(depths):
        agree = [f"{a.agreement(i):.2f}" if i else "-" for a in (over, here)]
        chance = f"{over.chance(i):.2f}" if i else "-"
        read = f"{d.K} of {grid.patches}{'*' if d.cut else ' '}"
        lines += [
            f"{i + 1:<7}{d.name:<{width}}{read:>12}{over.distance(i):>10.2f}{over.weighted(i):>10.2f}{agree[0]:>11}{chance:>11}"
            f"{'':>15}{here.distance(i):>8.2f}{here.weighted(i):>10.2f}{agree[1]:>11}"
        ]
    lines += ["", *(f"{note}." for note in dict.fromkeys(d.note for d in depths) if note)]
    if any(d.cut for d in depths):
        lines += ["* a cut: the layer reads more patches than the largest weights that are shown (--K shows more or fewer)."]
    lines += [
        f"distance   patches between a patch and those it selected, itself included (at random: {grid.mean_distance:.2f});",
        "           class and register tokens are left out.",
        "weighted   the same over everything that is read, by weight.",
        "agreement  with the depth before: overlap (Jaccard) of the K patches of largest weight in the mean over heads,",
        "           K being the smaller number shown of the two; 1 is identical, 0 disjoint.",
    ]
    return "\n".join(lines)


def _record(
    picked: Picked, grid: Grid, depths: list[Depth], queries: list[tuple[int, int]], here: Locality, over: Locality, config: Config
) -> dict[str, Any]:
    """The same for programs: every number of the table, and the selections of the queries in full."""

    def selected(d: Depth, head: int, query: tuple[int, int]) -> list[dict[str, Any]]:
        row = query[0] * grid.width + query[1]
        kept = [int(p) for p, keep in zip(d.index[head, row], d.kept[head, row], strict=True) if keep]
        return [{"patch": list(divmod(p, grid.width)), "weight": round(float(d.weight[head, row, p]), 6)} for p in kept]

    def numbers(locality: Locality, i: int) -> dict[str, Any]:
        agreement = {"agreement": locality.agreement(i), "by_chance": locality.chance(i)} if i else {}
        values = {"distance": locality.distance(i), "weighted_distance": locality.weighted(i), **agreement}
        return {name: None if math.isnan(value) else round(value, 6) for name, value in values.items()}

    return {
        "image": picked.title,
        "model": config.model.model,
        "layer": config.layers.layer,
        "grid": [grid.height, grid.width],
        "prefix_tokens": grid.prefix,
        "images_in_mean": over.images,
        "distance_at_random": round(grid.mean_distance, 6),
        "depths": [
            {
                "depth": i + 1,
                "layer": d.name,
                "shown": d.K,
                "cut": d.cut,
                "note": d.note,
                "mean": numbers(over, i),
                "this_image": numbers(here, i),
                "queries": [
                    {"patch": list(q), "heads": [selected(d, h, q) for h in range(d.heads)], "mean": selected(mean_of(d), 0, q)}
                    for q in queries
                ],
            }
            for i, d in enumerate(depths)
        ],
    }
