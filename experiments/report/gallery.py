"""Pictures that ask the model: which training rows decided, and which patches each layer reads. Only where model and data can be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.metrics import Answers
from experiments.report.ink import COLORS, TEXT, WIDTH, Picture, Table, cut
from experiments.report.material import Material, Run
from utils import BadOption, shortened

MOST_ARMS = 3  # that are asked: a model and its data are loaded for each
EACH, NEAR = 2, 5  # queries of a kind, and neighbors of each
SIDE = 48  # pixels of an image in a page of many
INCH = 0.53  # of a small image
QUERIES, DEPTHS, PATCHES = 3, 4, 9
SIZES = 8  # of dots


@dataclass(frozen=True)
class Gallery:
    """`lines`: what is not there, and why."""

    pictures: Sequence[Picture] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Case:
    """A query: what it shows, its pixels, and its neighbors with theirs. `true`: is a neighbor of the query's class?"""

    kind: str
    row: int
    said: str
    pixels: np.ndarray
    near: list[tuple[Any, np.ndarray]] = field(default_factory=list)


def pictures(material: Material, given: Mapping[str, str]) -> Gallery:
    arms = [arm for arm in material.arms if material.of(arm)]
    found: list[Picture] = []
    lines: list[str] = []
    if len(arms) > MOST_ARMS:
        told = "explain --what neighbors and --what tokens show the others"
        lines += [f"Of the first {MOST_ARMS} of {len(arms)} arms, because each model is loaded and asked; {told}."]
    for number, arm in enumerate(arms[:MOST_ARMS], 1):
        cell = material.of(arm)[0]
        said = cell.said.get("calibrated") or cell.said.get("raw")
        if said is None:
            continue
        try:
            found += asked(cell.run, said, number, given, lines)
        except BadOption as error:
            lines.append(f"{arm}: the model can't be asked: {error}")
        except Exception as error:  # what a plugin or a damaged file raises: the rest of the page is worth having
            lines.append(f"{arm}: the model can't be asked: {type(error).__name__}: {shortened(error, 200)}")
    if not arms:
        lines.append("No run has finished.")
    found.sort(key=lambda picture: picture.name.partition("-")[0])
    return Gallery(found, lines)


def asked(run: Run, said: Answers, number: int, given: Mapping[str, str], lines: list[str]) -> list[Picture]:
    from run.loaded import load  # late: torch takes its time

    loaded = load(str(run.folder), given)
    loaded.model.eval()
    if len(loaded.data.test) != len(said.label) or not np.array_equal(loaded.data.test.y, said.label):
        raise BadOption("checkpoint", "has other test rows than the predictions of the run", str(run.folder))
    if loaded.data.kind == "table":
        told = f"python main.py explain --what neighbors --checkpoint {run.folder}"
        lines.append(f"{run.name}: the rows of a table are no pictures; '{told}' tells their neighbors in words.")
        return []
    found: list[Picture] = []
    for part in (neighbors, tokens):
        try:
            found.append(part(run, loaded, said, number))
        except BadOption as error:
            lines.append(f"{run.name}: no picture of {part.__name__}: {error}")
    return found


# ---------------------------------------------------------------- neighbors


def chosen(said: Answers) -> list[tuple[str, int]]:
    """Rows worth looking at: right ones, wrong ones that were not sure, and the mistakes of which the model was surest."""
    order = np.argsort(said.confidence, kind="stable")
    right, wrong = order[said.right[order]], order[~said.right[order]]
    surest = wrong[::-1][:EACH].tolist()
    hesitant = [row for row in wrong.tolist() if row not in surest][:EACH]
    spread = right[((np.arange(EACH) + 0.5) * len(right) / EACH).astype(int)].tolist() if len(right) else []
    kinds = (("right", list(dict.fromkeys(spread))), ("wrong, not sure", hesitant), ("surest mistake", surest))
    return [(kind, row) for kind, rows in kinds for row in rows]


def neighbors(run: Run, loaded: Any, said: Answers, number: int) -> Picture:
    from explain.cases import read_votes
    from explain.subject import Picked, pixels_of, row_of

    votes = read_votes(loaded, str(run.folder))
    classes = loaded.data.classes
    cases, rows = [], []
    for kind, row in chosen(said):
        x = row_of(loaded, row)
        retrieved = votes.retrieve_image(Picked(x, str(row), "", row))
        (case,) = votes.cases(retrieved, [f"row {row}"], [row], [int(said.label[row])], NEAR)
        near = [(n, small(pixels_of(loaded.data, row_of(loaded, n.row, "train")))) for n in case.neighbors[:NEAR]]
        words = f"{kind}: {cut(case.true or '', 16)}, predicted {cut(case.predicted, 16)} ({case.probability:.0%})"
        cases.append(Case(kind, row, words, small(pixels_of(loaded.data, x)), near))
        true = classes[said.label[row]]
        first = (kind, row, true, case.predicted, round(100 * case.probability, 2))
        rows += [(*first, i, n.row, n.label, round(100 * n.weight, 2), n.squared_distance) for i, (n, _) in enumerate(near, 1)]
    heads = ["kind", "test row", "true class", "predicted", "probability (%)", "neighbor", "training row", "its class"]
    heads += ["weight (%)", "squared distance"]
    about = (
        f"{cut(run.name, 200)}: test images at the left, then the training images with the most weight in the vote. A blue frame is of the "
        f"query's true class, a broken orange one of another; below it its class and weight. {'; '.join(votes.notes())}."
    )
    tall = tallest([case.pixels for case in cases])
    height = len(cases) * (tall + 0.85) * INCH + 0.1
    draw = partial(draw_cases, cases=cases, tall=tall)
    title = f"Neighbors that decided: {cut(run.name, 80)}"
    return Picture(name=f"neighbors-{number}", title=title, about=about, table=Table(heads, rows), draw=draw, height=height)


def tallest(images: Sequence[np.ndarray]) -> float:
    """Height of the images in their width."""
    return min(2.0, max(0.5, max(image.shape[0] / image.shape[1] for image in images)))


def small(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) in 0..1 as bytes, at most SIDE pixels wide and high."""
    from PIL import Image

    image = Image.fromarray((pixels * 255).round().astype(np.uint8))
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return np.asarray(image)


def draw_cases(figure: Figure, *, cases: Sequence[Case], tall: float) -> None:
    axes = figure.add_subplot()
    step = tall + 0.85
    for i, case in enumerate(cases):
        top = i * step
        axes.text(0, top + 0.14, case.said, fontsize=7, va="center")
        picture_at(axes, case.pixels, 0, top + 0.3, tall, TEXT, "-")
        for j, (n, pixels) in enumerate(case.near):
            left = 1.25 + j * 1.04
            color, line = (COLORS[0], "-") if n.true else (COLORS[1], (0, (2, 1)))
            picture_at(axes, pixels, left, top + 0.3, tall, color, line)
            words = f"{cut(n.label, 9)} ({n.weight:.0%})"
            axes.text(left + 0.48, top + 0.3 + tall + 0.16, words, fontsize=min(6.0, 60 / max(1, len(words))), ha="center", va="center")
    axes.set(xlim=(-0.05, 1.25 + NEAR * 1.04), ylim=(len(cases) * step, 0), aspect="equal")
    axes.axis("off")


def picture_at(axes: Any, pixels: np.ndarray, left: float, top: float, tall: float, color: str, line: Any) -> None:
    axes.imshow(pixels, extent=(left, left + 0.96, top + tall * 0.96, top), interpolation="none", aspect="auto")
    axes.add_patch(Rectangle((left, top), 0.96, tall * 0.96, fill=False, edgecolor=color, linestyle=line, linewidth=1.3))


# ---------------------------------------------------------------- tokens


def tokens(run: Run, loaded: Any, said: Answers, number: int) -> Picture:
    from explain.selection import choose_queries
    from explain.subject import pixels_of, row_of
    from explain.tokens import depths_of, expose_attention, token_grid

    expose_attention(loaded, str(run.folder))
    grid = token_grid(loaded.model.backbone)
    if grid is None:
        raise BadOption("checkpoint", "must be a model that tells its grid of patches", str(run.folder))
    row = next((row for kind, row in chosen(said) if kind == "right"), 0)
    x = row_of(loaded, row)
    pixels = pixels_of(loaded.data, x)
    depths = depths_of(loaded, grid, x, None)
    columns = sorted({round(c) for c in np.linspace(0, len(depths) - 1, min(len(depths), DEPTHS))})
    queries = choose_queries(pixels, grid, QUERIES)
    weights = [[depths[c].weight.mean(0)[r * grid.width + k].numpy() for c in columns] for r, k in queries]  # (P,) each
    rows = []
    for query, of_depths in zip(queries, weights, strict=True):
        for c, weight in zip(columns, of_depths, strict=True):
            for patch in np.argsort(-weight, kind="stable")[:PATCHES]:
                if weight[patch] > 0:
                    place = divmod(int(patch), grid.width)
                    rows.append((c + 1, depths[c].name, *(f"{a},{b}" for a, b in (query, place)), round(100 * float(weight[patch]), 3)))
    heads = ("depth", "layer", "patch that reads", "patch that is read", "weight (%)")
    true = loaded.data.classes[said.label[row]]
    tall = min(2.0, max(0.5, grid.height / grid.width))
    layout = Layout(len(queries), len(columns), tall)
    about = (
        f"{cut(run.name, 200)}: test row {row}, class {cut(true, 60)}. {layout.words}; "
        "the area of a dot is the attention weight of the patch under it, mean over heads."
    )
    titles = [f"depth {c + 1} of {len(depths)}" for c in columns]
    draw = partial(draw_tokens, image=small(pixels), grid=grid, queries=queries, weights=weights, titles=titles, layout=layout)
    height = layout.height * WIDTH / (layout.across * 1.08)
    title = f"What patches read: {cut(run.name, 80)}"
    return Picture(name=f"tokens-{number}", title=title, about=about, table=Table(heads, rows), draw=draw, height=height)


@dataclass(frozen=True)
class Layout:
    """Where the picture of a query and a depth stands: in a row for each query or, of few depths, in a column for each."""

    queries: int
    depths: int
    tall: float  # a picture, in its width

    @property
    def upright(self) -> bool:
        return self.depths < self.queries

    @property
    def words(self) -> str:
        one, other = ("column", "row") if self.upright else ("row", "column")
        return f"Each {one} is a patch that reads (framed), each {other} a depth"

    @property
    def across(self) -> int:
        return self.queries if self.upright else self.depths

    @property
    def height(self) -> float:
        return self.place(self.queries - 1, self.depths - 1)[1] + self.tall + 0.1

    def place(self, query: int, depth: int) -> tuple[float, float]:
        if self.upright:
            return query * 1.08, 0.3 + depth * (self.tall + 0.34)
        return depth * 1.08, 0.3 + query * (self.tall + 0.12)


def draw_tokens(
    figure: Figure, *, image: np.ndarray, grid: Any, queries: Sequence[tuple[int, int]], weights: Any, titles: Sequence[str], layout: Layout
) -> None:
    """Dots on the image, which stays to be seen between them."""
    axes, tall = figure.add_subplot(), layout.tall
    dots: list[list[tuple[float, float]]] = [[] for _ in range(SIZES + 1)]  # by size: a page has room for a few shapes, not for each dot
    for i, (query, of_depths) in enumerate(zip(queries, weights, strict=True)):
        for j, weight in enumerate(of_depths):
            left, top = layout.place(i, j)
            axes.imshow(image, extent=(left, left + 1, top + tall, top), interpolation="none", aspect="auto")
            row, column = np.divmod(np.arange(len(weight)), grid.width)
            size = np.ceil(SIZES * np.sqrt(weight / max(float(weight.max()), 1e-9))).astype(int)
            for patch in np.flatnonzero(size > 1).tolist():  # the least are too small to be seen
                dots[size[patch]].append((left + (column[patch] + 0.5) / grid.width, top + (row[patch] + 0.5) / grid.height * tall))
            place = left + query[1] / grid.width, top + query[0] / grid.height * tall
            for color, line in (("white", "-"), (COLORS[0], (0, (2, 1)))):  # seen on bright and dark patches
                frame = Rectangle(place, 1 / grid.width, tall / grid.height, fill=False, edgecolor=color, linestyle=line, linewidth=1.6)
                axes.add_patch(frame)
    largest = 0.62 * WIDTH * 72 / (layout.across * 1.08 * grid.width)  # points
    for size, places in enumerate(dots):
        if places:
            x, y = zip(*places, strict=True)
            (points,) = axes.plot(x, y, marker="o", linestyle="none", color="#ff8c1a")
            points.set(markersize=largest * size / SIZES, markeredgecolor="black", markeredgewidth=0.4)
    for j, title in enumerate(titles):
        left, top = layout.place(0, j)
        axes.text(left + 0.5, top - 0.14, title, ha="center", va="center", fontsize=7)
    axes.set(xlim=(-0.02, layout.across * 1.08 - 0.06), ylim=(layout.height, 0), aspect="equal")
    axes.axis("off")
