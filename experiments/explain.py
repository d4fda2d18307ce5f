"""Pictures and tables of what a rebuilt run does: `python main.py explain --what KIND`. Here: what its layers read.

How a head over neighbors votes is in gallery.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import checkpoint
import config as flags
import dataset
from batches import eight_bit
from config import Config
from experiments import building, pictures, run
from experiments.folder import check_writable
from experiments.run import Rebuilt
from experiments.selection import Depth, Grid, Locality, choose_queries, depth_of
from layers import TokenMixer
from layers.attention_map import Note, noted
from utils import BadOption, Registry, say

TABLE_IMAGES = 64  # the table is a mean over so many test images
MOST_HEADS, MOST_DEPTHS = 6, 6  # in a picture


@dataclass(frozen=True)
class Picked:
    """The image (or table row) to explain, as the model sees it: x (1, C, H, W), normalized."""

    x: Tensor
    name: str  # of its files
    title: str
    row: int | None = None  # of the test split


KINDS: Registry[Callable[[dict[str, Any]], None]] = Registry("what", "explanation")
ONLY = {"queries": "tokens", "head": "tokens", "mistakes": "neighbors"}  # options that one kind has


def explain(options: Mapping[str, Any]) -> None:
    """What `python main.py explain` does. `options` are the flags as they were typed; None was not given."""
    from experiments import gallery  # noqa: F401 (late: it takes its tools from here, and registers itself)

    given = {name: value for name, value in options.items() if value is not None}
    what = given.pop("what")
    kind = KINDS[what]
    for name, owner in ONLY.items():
        if name in given and owner != what:
            raise BadOption(name, f"goes with --what {owner}", given[name])
    if "checkpoint" not in given:
        raise BadOption("checkpoint", "must name the run to explain")
    kind(given)


# ---------------------------------------------------------------- the run and the image


def read_run(options: Mapping[str, Any], *, tables: bool = False) -> tuple[Rebuilt, Path]:
    """The run that was asked for, in eval(), and where its pictures go."""
    given = {k: v for k, v in options.items() if k in ("device", "data_path", "plugin")}
    flags.check(given, Config)
    source = checkpoint.find(options["checkpoint"])
    folder = Path(options.get("output_dir") or (source.parent.parent if source.parent.name == "checkpoints" else source))
    check_writable(folder)
    if not tables and len(checkpoint.load(source, "none")[1]["shape"]) != 3:
        raise BadOption("checkpoint", "must be a model of images: the rows of a table have no tokens", options["checkpoint"])
    rebuilt = run.rebuild(options["checkpoint"], given)
    rebuilt.model.eval()
    return rebuilt, folder


def row_of(rebuilt: Rebuilt, row: int, part: str = "test") -> Tensor:
    """One row of a split, (1, C, H, W), as the run's evaluation, or its bank, sees it."""
    # Batches of one: noise depends on a row's number, so the row must keep its own.
    single = dataclasses.replace(rebuilt.config, batch_size=1, workers=0, augment=False)
    batches = building.batches(single, rebuilt.data, part, rebuilt.device)
    assert batches is not None
    return next(batches.plain().epoch(0, start=row)).x


def pick_image(rebuilt: Rebuilt, text: str) -> Picked:
    """INDEX, a row of the test split, or FILE, an image file of one's own."""
    rows = len(rebuilt.data.test)
    if re.fullmatch(r"-?\d+", text):
        if not 0 <= int(text) < rows:
            raise BadOption("image", f"must be a row of the test split (0 to {rows - 1}) or an image file", text)
        row = int(text)
        x, label = row_of(rebuilt, row), rebuilt.data.classes[rebuilt.data.test.y[row]]
        return Picked(x, str(row), f"row {row} of the test split of {name_of(rebuilt.data)}, class {label}", row)
    if rebuilt.data.kind == "table":
        raise BadOption("image", f"must be a row of the test split (0 to {rows - 1}): this run reads the rows of a table", text)
    if not Path(text).is_file():
        raise BadOption("image", f"must be a row of the test split (0 to {rows - 1}) or an image file that exists", text)
    own = dataset.Split(_read_file(rebuilt.data, text), np.zeros(1, np.int64))
    try:
        x = row_of(rebuilt._replace(data=dataclasses.replace(rebuilt.data, test=own)), 0)
    except BadOption as error:
        rule = error.rule.replace("has an image that can't be read", "must be an image file that can be read")
        raise BadOption("image", rule, text) from None
    stem = re.sub(r"[^0-9A-Za-z._-]+", "_", Path(text).stem)
    return Picked(x, stem, Path(text).name)


def name_of(data: dataset.Data) -> str:
    """Short enough for a title."""
    return data.name if len(data.name) <= 45 else f"...{data.name[-42:]}"


def _read_file(data: dataset.Data, path: str) -> np.ndarray:
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


@torch.no_grad()
def _prediction(rebuilt: Rebuilt, x: Tensor) -> str:
    probability = rebuilt.model(x).float().softmax(-1)[0]
    return f"predicted {rebuilt.data.classes[int(probability.argmax())]} ({float(probability.max()):.0%})"


# ---------------------------------------------------------------- what the layers read


def expose_attention(rebuilt: Rebuilt, named: str) -> None:
    """Every attention of the model as one of our layers: timm's own are swapped for the same in place, weights and all."""
    from models.swap import find_attention, swap_attention

    backbone = rebuilt.model.backbone
    found = find_attention(backbone)
    if not found:
        raise BadOption("checkpoint", f"must be a model with attention between tokens, and {rebuilt.config.model} has none", named)
    foreign = [i for i, module in enumerate(found.values()) if not isinstance(module, TokenMixer)]
    if foreign:
        try:
            swap_attention(backbone, "Attention", blocks=foreign)
        except BadOption as error:
            raise BadOption("checkpoint", f"must be a model whose attention can be seen: {error.rule}", named) from None
        say(f"{rebuilt.config.model}: its attention is seen through the layer Attention, with the same weights")


def token_grid(backbone: nn.Module) -> Grid | None:
    """Where the model says that its tokens are."""
    from models.swap import find_attention, token_context

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


def depths_of(rebuilt: Rebuilt, grid: Grid, x: Tensor, K: int | None) -> list[Depth]:
    """What each depth read of one image."""
    seen = look(rebuilt.model, x)
    fits = bool(seen) and all(q.shape == k.shape and (len(q), q.shape[2]) == (1, grid.tokens) for _, q, k in seen)
    if not fits:
        counts = ", ".join(dict.fromkeys(str(q.shape[2]) for _, q, _ in seen)) or "none: no layer called its mix"
        rule = f"must be a model whose layers all see the patches of one grid, {grid.height} x {grid.width} (tokens seen: {counts})"
        raise BadOption("checkpoint", rule, rebuilt.config.model)
    return [depth_of(layer, layer.attention_map(q, k), grid, K) for layer, q, k in seen]


# ---------------------------------------------------------------- --what tokens


@KINDS.register("tokens")
def tokens(options: dict[str, Any]) -> None:
    """What the layers read: chosen query patches and the patches that they selected, by depth and head."""
    K = flags.parse("K", options["K"]) if "K" in options else None
    flags.check({"K": K}, Config)
    rebuilt, folder = read_run(options)
    expose_attention(rebuilt, options["checkpoint"])
    grid = token_grid(rebuilt.model.backbone)
    if grid is None:
        raise BadOption("checkpoint", "must be a model that tells its grid of patches", options["checkpoint"])
    picked = pick_image(rebuilt, options["image"])
    picked = dataclasses.replace(picked, title=f"{picked.title}, {_prediction(rebuilt, picked.x)}")
    pixels = pixels_of(rebuilt.data, picked.x)
    queries = parse_queries(options["queries"], grid) if "queries" in options else choose_queries(pixels, grid)
    depths = depths_of(rebuilt, grid, picked.x, K)
    heads = parse_heads(options["head"], depths) if "head" in options else list(range(min(d.heads for d in depths)))[:MOST_HEADS]
    columns = [round(c) for c in np.linspace(0, len(depths) - 1, min(len(depths), MOST_DEPTHS))]

    here = Locality(grid)
    here.add(depths)
    rows = [round(r) for r in np.linspace(0, len(rebuilt.data.test) - 1, min(len(rebuilt.data.test), TABLE_IMAGES))]
    over = Locality(grid)
    for row in rows:
        over.add(depths_of(rebuilt, grid, row_of(rebuilt, row), K))

    make(folder)
    path = folder / f"explain-tokens-{picked.name}.png"
    pictures.draw_tokens(path, pixels=pixels, title=picked.title, grid=grid, depths=depths, columns=columns, queries=queries, heads=heads)
    text = _table(picked, depths, here, over, columns, heads)
    path.with_suffix(".txt").write_text(text + "\n")
    checkpoint.write_json(path.with_suffix(".json"), _record(picked, grid, depths, queries, here, over, rebuilt.config))
    print(f"{text}\n\nwritten to {path}, and beside it as .txt and .json")


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption("output_dir", f"must be a directory that can be written ({error.strerror})", str(folder)) from None


def pixels_of(data: dataset.Data, x: Tensor) -> np.ndarray:
    """The image that the model saw, in 0..1: (H, W, 3)."""
    mean, std = (torch.tensor(data.fitted[k]).view(-1, 1, 1) for k in ("mean", "std"))
    image = (x[0].float().cpu() * std + mean).clamp(0, 1)  # (C, H, W)
    return (image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)).permute(1, 2, 0).numpy()


def parse_queries(text: str, grid: Grid) -> list[tuple[int, int]]:
    """ "r,c;r,c" as places on the grid."""
    places = re.findall(r"(\d+)\s*,\s*(\d+)", text)
    well_formed = re.fullmatch(r"\s*\d+\s*,\s*\d+\s*(;\s*\d+\s*,\s*\d+\s*)*;?\s*", text)
    queries = list(dict.fromkeys((int(r), int(c)) for r, c in places))
    if not well_formed or any(r >= grid.height or c >= grid.width for r, c in queries):
        rule = f"must be patches 'row,column;row,column', rows 0 to {grid.height - 1} and columns 0 to {grid.width - 1}"
        raise BadOption("queries", rule, text)
    return queries


def parse_heads(text: str, depths: list[Depth]) -> list[int]:
    most = min(d.heads for d in depths)
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) or any(int(h) >= most for h in text.split(",")):
        raise BadOption("head", f"must be heads by number, 0 to {most - 1}, with commas between", text)
    return list(dict.fromkeys(int(h) for h in text.split(",")))


def _table(picked: Picked, depths: list[Depth], here: Locality, over: Locality, columns: list[int], heads: list[int]) -> str:
    """What a person reads: how local each depth is, and how alike neighboring depths select."""
    grid, width = here.grid, max(16, *(len(d.name) for d in depths))
    lines = [picked.title, ""]
    if len(columns) < len(depths) or len(heads) < max(d.heads for d in depths):
        shown = f"depths {', '.join(str(c + 1) for c in columns)} of {len(depths)}, heads {', '.join(map(str, heads))}"
        lines += [f"The picture shows {shown}; the table has them all.", ""]
    images = f"{over.images} test image{'s, evenly spaced over the split' if over.images > 1 else ''}"
    lines += [f"Mean over {images}; all heads, all {grid.patches} patches of the {grid.height} x {grid.width} grid:", ""]
    head = f"{'depth':<7}{'layer':<{width}}{'shown':>12}{'distance':>10}{'weighted':>10}{'agreement':>11}{'by chance':>11}"
    lines += [f"{head}   this image: {'distance':>8}{'weighted':>10}{'agreement':>11}"]
    for i, d in enumerate(depths):
        agree = [f"{a.agreement(i):.2f}" if i else "-" for a in (over, here)]
        chance = f"{over.chance(i):.2f}" if i else "-"
        shown = f"{d.K} of {grid.patches}{'*' if d.cut else ' '}"
        lines += [
            f"{i + 1:<7}{d.name:<{width}}{shown:>12}{over.distance(i):>10.2f}{over.weighted(i):>10.2f}{agree[0]:>11}{chance:>11}"
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
        return [{"patch": list(divmod(p, grid.width)), "share": round(float(d.share[head, row, p]), 6)} for p in kept]

    def numbers(locality: Locality, i: int) -> dict[str, Any]:
        agreement = {"agreement": locality.agreement(i), "by_chance": locality.chance(i)} if i else {}
        values = {"distance": locality.distance(i), "weighted_distance": locality.weighted(i), **agreement}
        return {name: None if math.isnan(value) else round(value, 6) for name, value in values.items()}

    return {
        "image": picked.title,
        "model": config.model,
        "layer": config.layer,
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
                "queries": [{"patch": list(q), "heads": [selected(d, h, q) for h in range(d.heads)]} for q in queries],
            }
            for i, d in enumerate(depths)
        ],
    }
