"""What `benchmarks/growth.py` measures: calls of the toolkit in which one thing grows and all else stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bank import by_ids
from benchmarks.loop import Prepared
from benchmarks.timing import CPU, Effort, Group, Side, Watch
from classifiers import HEADS, Bank
from classifiers.calibration import calibrate
from evaluation.evaluator import scores
from layers.linear import speed_up_linear
from run.parts import build_model

PART, K, CLASSES = "growth", 16, (10, 100, 1000, 10_000, 21_841)
SURFACE = 16  # dimensions
PATCHES: dict[str, Any] = {"patch_size": 4, "val_fraction": 0.0, "calibrate": "none"}


@dataclass(frozen=True)
class Sizes:
    """Points of each series, and what stays."""

    rows: tuple[int, ...] = (10_000, 20_000, 40_000, 80_000, 160_000, 320_000)
    dims: tuple[int, ...] = (64, 128, 256, 512)
    classes: tuple[int, ...] = CLASSES
    ks: tuple[int, ...] = (4, 16, 64, 256)
    images: tuple[int, ...] = (8, 16, 32, 64, 128)
    sides: tuple[int, ...] = (16, 32, 64, 128)  # of an image, whose patches have a side of 4
    judged: tuple[int, ...] = (250, 500, 1000, 2000, 4000)  # rows of metrics and calibration
    calibrated: tuple[int, ...] = (10, 30, 100, 300, 1000)  # classes
    dim: int = 128
    middle: int = 40_000  # rows while dimensions grow
    queries: int = 256
    batch: int = 128  # rows of a training step of a head
    features: int = 768
    some_classes: int = 1000
    rounds: int = 5


@dataclass(frozen=True)
class Series:
    """One thing grows. `per`: how many `unit`s a call works on, so that costs are those of one."""

    name: str
    axis: str
    unit: str
    per: int
    points: tuple[int, ...]
    group: Group


def all_series(sizes: Sizes) -> Iterator[Series]:
    """One after the other: the banks of one are gone when the next is made."""
    yield from banks(sizes)
    yield by_dimension(sizes)
    yield from steps_of_heads(sizes)
    yield from vision_transformers(sizes)
    yield from metrics(sizes)
    yield from calibrations(sizes)


def series(
    name: str,
    axis: str,
    unit: str,
    per: int,
    sides: dict[int, Side],
    *,
    setting: str = "",
    effort: Effort,
    memory: bool = False,
) -> Series:
    named = {str(point): side for point, side in sides.items()}
    group = Group(PART, setting, ("call",), tuple(named), named, effort, memory=memory)
    return Series(name, axis, unit, per, tuple(sides), group)


def timed(call: Callable[[], object]) -> Side:
    def run(watch: Watch) -> None:
        watch.lap()
        call()
        watch.lap()

    return run


# ---------------------------------------------------------------- banks


def banks(sizes: Sizes) -> Iterator[Series]:
    """Made, looked at as a whole, and through lists as many as `auto` makes of them when rows are too many to be looked at."""
    x = embedded(max(sizes.rows), sizes.dim)
    labels = torch.arange(len(x)) % 10
    effort, of = Effort(sizes.rounds, 60), f"{sizes.dim} dimensions"
    made = {rows: partial(make, x[:rows], labels[:rows]) for rows in sizes.rows}
    building = {rows: timed(call) for rows, call in made.items()}
    yield series("a bank is made, a batch at a time", "rows", "bank", 1, building, setting=of, effort=effort, memory=True)
    asked = f"{of}, k = {K}, {sizes.queries} queries at a time, each left out"
    flat = {rows: searching(call(), sizes.queries) for rows, call in made.items()}
    yield series("exact search", "rows", "query", sizes.queries, flat, setting=asked, effort=effort)
    del flat
    lists = {rows: Bank(sizes.dim, kind=f"IVF{math.isqrt(rows)},Flat") for rows in sizes.rows}
    for rows, bank in lists.items():
        bank.add(x[:rows], labels[:rows])
    once = Effort(1, 0, warm_up=0, fewest=1)
    learning = {rows: timed(bank._prepare) for rows, bank in lists.items()}
    yield series("lists of a bank are made", "rows", "bank", 1, learning, setting=of, effort=once)
    through = {rows: searching(bank, sizes.queries) for rows, bank in lists.items()}
    yield series("search through lists", "rows", "query", sizes.queries, through, setting=f"{asked}, recall .99", effort=effort)


def embedded(rows: int, dim: int) -> Tensor:
    """Unit vectors near a surface of a few dimensions, as embeddings are. NOTE: how many lists must be asked depends on that alone;
    what looks at every row does not care."""
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(rows, SURFACE, generator=generator) @ torch.randn(SURFACE, dim, generator=generator)
    return F.normalize(inside + 0.1 * SURFACE**0.5 * torch.randn(rows, dim, generator=generator), dim=1)


def make(x: Tensor, labels: Tensor) -> Bank:
    bank, ids = Bank(x.shape[1], kind="flat"), torch.arange(len(x))
    bank.refresh(labels, ids, ((part, x[part]) for part in ids.split(512)))
    return bank


def searching(bank: Bank, queries: int) -> Side:
    x = bank.embeddings
    return by_ids(x, min(queries, len(x)), lambda ids: bank.search(x[ids], K, exclude=ids))


def by_dimension(sizes: Sizes) -> Series:
    sides = {}
    for dim in sizes.dims:
        sides[dim] = searching(make(embedded(sizes.middle, dim), torch.arange(sizes.middle) % 10), sizes.queries)
    of = f"{sizes.middle:,} rows, k = {K}, {sizes.queries} queries at a time, each left out"
    return series("exact search", "dimensions", "query", sizes.queries, sides, setting=of, effort=Effort(sizes.rounds, 60))


# ---------------------------------------------------------------- training steps


def steps_of_heads(sizes: Sizes) -> Iterator[Series]:
    """Loss and gradient over a bank that stays as large, whatever the classes are."""
    effort, dim = Effort(sizes.rounds, 60), 256
    x = embedded(2 * max(sizes.classes), dim)
    of = f"{sizes.batch} rows of {sizes.features} features"
    over = f"{of}, embeddings of {dim} in a bank of {len(x):,}"
    learned = {n: step_of("attn-knn", n, sizes, x, K) for n in sizes.classes}
    setting = f"{over}, k = {K}"
    yield series("a training step of attn-knn", "classes", "step", 1, learned, setting=setting, effort=effort, memory=True)
    linear = {n: step_of("linear", n, sizes, x, K) for n in sizes.classes}
    yield series("a training step of linear", "classes", "step", 1, linear, setting=of, effort=effort, memory=True)
    by_k = {k: step_of("attn-knn", sizes.some_classes, sizes, x, k) for k in sizes.ks}
    setting = f"{over}, {sizes.some_classes:,} classes"
    yield series("a training step of attn-knn", "neighbors", "step", 1, by_k, setting=setting, effort=effort, memory=True)


def step_of(name: str, classes: int, sizes: Sizes, x: Tensor, k: int) -> Side:
    torch.manual_seed(0)
    known = {"embed_dim": x.shape[1], "k_train": k} if HEADS[name].wants_bank else {}
    head: Any = HEADS[name](sizes.features, classes, **known)
    if known:
        head.refresh(make(x, torch.arange(len(x)) % classes))
    speed_up_linear(head)  # as every classifier's
    features = torch.randn(sizes.batch, sizes.features, requires_grad=True)
    target, index = torch.randint(classes, (sizes.batch,)), torch.arange(sizes.batch)

    def step() -> None:
        head.train()
        head.zero_grad(set_to_none=True)
        features.grad = None
        torch.stack(list(head.loss(features, target, index).values())).sum().backward()

    return timed(step)


def vision_transformers(sizes: Sizes) -> Iterator[Series]:
    """The default ViT for small images, with a linear head; patches of 4 x 4."""
    effort = Effort(sizes.rounds, 60)
    rows = 2 * max(sizes.images)
    many = {n: Prepared(f"fake(train={rows}, test=10, size=32)", 1, CPU, **PATCHES, batch_size=n) for n in sizes.images}
    few = min(sizes.images)
    long = {
        (side // 4) ** 2 + 1: Prepared(f"fake(train={4 * few}, test=10, size={side})", 1, CPU, **PATCHES, batch_size=few)
        for side in sizes.sides
    }
    for axis, prepared, setting in (
        ("images", many, f"6 blocks of width 96, {(32 // 4) ** 2 + 1} tokens"),
        ("tokens", long, f"6 blocks of width 96, {few} images"),
    ):
        forward = {n: forward_of(made) for n, made in prepared.items()}
        yield series("the ViT forward", axis, "call", 1, forward, setting=setting, effort=effort)
        steps = {n: made.our_loop() for n, made in prepared.items()}
        yield series("a training step of the ViT", axis, "step", 1, steps, setting=setting, effort=effort, memory=True)


def forward_of(prepared: Prepared) -> Side:
    model, x = build_model(prepared.config, prepared.data, CPU).eval(), prepared.batches[0].x
    return timed(torch.no_grad()(lambda: model(x)))


# ---------------------------------------------------------------- evaluation


def metrics(sizes: Sizes) -> Iterator[Series]:
    """All scores of an evaluation: NLL, ECE by class, area under the risk-coverage curve, ..."""
    effort, few = Effort(max(2, sizes.rounds - 2), 60), min(500, max(sizes.judged))
    of_rows = {n: judged(n, sizes.some_classes) for n in sizes.judged}
    yield series("metrics", "rows", "call", 1, of_rows, setting=f"{sizes.some_classes:,} classes", effort=effort, memory=True)
    del of_rows
    of_classes = {n: judged(few, n) for n in sizes.classes}
    yield series("metrics", "classes", "call", 1, of_classes, setting=f"{few} rows", effort=effort, memory=True)


def judged(rows: int, classes: int) -> Side:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(rows, classes, generator=generator).log_softmax(1)
    target = torch.randint(classes, (rows,), generator=generator)
    return timed(lambda: scores(log_probs, target))


def calibrations(sizes: Sizes) -> Iterator[Series]:
    """All that sets the confidence of a vote with a prior is fitted to validation rows. How many steps that takes, the rows decide."""
    effort = Effort(2, 60, warm_up=0, fewest=2)
    few, classes = min(500, max(sizes.judged)), min(sizes.calibrated)
    of_rows = {n: fitted(n, classes) for n in sizes.judged}
    yield series("calibration of a vote", "rows", "fit", 1, of_rows, setting=f"{classes} classes", effort=effort, memory=True)
    of_classes = {n: fitted(few, n) for n in sizes.calibrated}
    yield series("calibration of a vote", "classes", "fit", 1, of_classes, setting=f"{few} rows", effort=effort, memory=True)


def fitted(rows: int, classes: int, *, dim: int = 32, each: int = 6) -> Side:
    """Rows around centers that lie so near to each other that a vote of their neighbors errs now and then."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(classes, dim, generator=generator)

    def drawn(labels: Tensor) -> Tensor:
        return F.normalize(centers[labels] + torch.randn(len(labels), dim, generator=generator), dim=1)

    known = torch.arange(max(classes * each, 10 * K)) % classes
    head: Any = HEADS["knn"](dim, classes, k_train=K, standardize=False)
    head.eval().refresh(make(drawn(known), known))
    target = torch.randint(classes, (rows,), generator=generator)
    with torch.no_grad():
        retrieved = head.retrieve(drawn(target))
    return timed(lambda: calibrate(head.predictor, retrieved, target, "head"))
