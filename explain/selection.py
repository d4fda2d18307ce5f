"""Which patches a layer selected, how far away they are, and how alike two depths select. Pure functions and sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHOWN = 9  # patches shown of a layer that reads them all


@dataclass(frozen=True)
class Grid:
    """height x width patches, after `prefix` class and register tokens."""

    height: int
    width: int
    prefix: int = 0

    @property
    def patches(self) -> int:
        return self.height * self.width

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    @property
    def distances(self) -> Tensor:
        """Euclidean, in patches: (P, P)."""
        place = torch.cartesian_prod(torch.arange(self.height), torch.arange(self.width)).float()  # (P, 2)
        return (place[:, None] - place).norm(dim=-1)

    @property
    def mean_distance(self) -> float:
        """Between two patches drawn at random."""
        return float(self.distances.mean())


@dataclass(frozen=True)
class Depth:
    """What one layer read of one image: P patches that look at P patches, in H heads."""

    name: str
    weight: Tensor  # (H, P, P) attention weight between patches; what a row lacks to 1 lies on class and register tokens
    index: Tensor  # (H, P, K) patches of the largest weights, best first
    kept: Tensor  # (H, P, K) False where a patch reads fewer
    cut: bool  # are there patches that are read and not among the K?
    channels: tuple[int, int]  # a head: how many select neighbors, of how many. In a branch the others mix in another way

    @property
    def heads(self) -> int:
        return len(self.weight)

    @property
    def note(self) -> str:
        near, width = self.channels
        others = f"the other {width - near} mix in their own way"
        return "" if near == width else f"{self.name}: {near} of {width} channels a head select neighbors and are shown; {others}"

    @property
    def K(self) -> int:
        return self.index.shape[-1]


def depth_of(layer: Any, attention_map: Tensor, grid: Grid, K: int | None = None) -> Depth:
    """An attention map (1, H, N, N) of one image as selections: all that the layer selects, or the largest K if it reads everything."""
    size = attention_map[0].detach().float().abs().cpu()  # (H, N, N); raw similarities may be negative, and are read all the same
    weight = (size / size.sum(-1, keepdim=True).clamp(min=1e-30))[:, grid.prefix :, grid.prefix :]  # (H, P, P)
    most = max(1, int((weight > 0).sum(-1).max()))
    shown = min(K or (SHOWN if most == grid.patches else most), most)
    ordered, index = weight.sort(dim=-1, descending=True, stable=True)
    channels = getattr(layer, "near_dim", layer.head_dim) or layer.head_dim, layer.head_dim
    return Depth(type(layer).__name__, weight, index[..., :shown], ordered[..., :shown] > 0, shown < most, channels)


def mean_of(d: Depth) -> Depth:
    """The mean over heads as if it were one: as many patches as a head has, those of its largest weights."""
    weight = d.weight.mean(0, keepdim=True)  # (1, P, P)
    ordered, index = weight.sort(dim=-1, descending=True, stable=True)
    cut = int((weight > 0).sum(-1).max()) > d.K
    return Depth(d.name, weight, index[..., : d.K], ordered[..., : d.K] > 0, cut, d.channels)


def overlap(a: Depth, b: Depth) -> Tensor:
    """Jaccard overlap of the patches of largest weight in the mean over heads, each patch's for itself: (P,)."""
    count = min(a.K, b.K)
    one, two = (_largest(d.weight.mean(0), count) for d in (a, b))  # (P, P)
    both, either = (one & two).sum(-1), (one | two).sum(-1)
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def _largest(weight: Tensor, count: int) -> Tensor:
    """True at the `count` largest of each row, as far as they are above 0: (P, P)."""
    ordered, index = weight.sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(weight, dtype=torch.bool).scatter(-1, index[:, :count], ordered[:, :count] > 0)


def overlap_by_chance(count: int, patches: int) -> float:
    """The expected Jaccard overlap of two sets of `count` patches drawn at random."""
    shared = range(max(0, 2 * count - patches), count + 1)
    return sum(comb(count, s) * comb(patches - count, count - s) * s / (2 * count - s) for s in shared) / comb(patches, count)


@dataclass
class Locality:
    """Sums over images, so that every selected patch and every query counts the same."""

    grid: Grid
    images: int = 0
    near: list[np.ndarray] = field(default_factory=list)  # a depth: (sum of distances, selected)
    mass: list[np.ndarray] = field(default_factory=list)  # a depth: (sum of weight * distance, sum of weight)
    alike: list[np.ndarray] = field(default_factory=list)  # a depth, with the one before: (overlap, by chance, queries)

    def add(self, depths: list[Depth]) -> None:
        if not self.images:
            self.near, self.mass, self.alike = ([np.zeros(size) for _ in depths] for size in (2, 2, 3))
        self.images += 1
        far = self.grid.distances
        for i, d in enumerate(depths):
            selected = far.expand_as(d.weight).gather(-1, d.index)  # (H, P, K)
            self.near[i] += (float(selected[d.kept].sum()), int(d.kept.sum()))
            self.mass[i] += (float((d.weight * far).sum()), float(d.weight.sum()))
            if i:
                chance = overlap_by_chance(min(d.K, depths[i - 1].K), self.grid.patches)
                self.alike[i] += (float(overlap(depths[i - 1], d).sum()), chance * self.grid.patches, self.grid.patches)

    def distance(self, depth: int) -> float:
        return _ratio(*self.near[depth])

    def weighted(self, depth: int) -> float:
        return _ratio(*self.mass[depth])

    def agreement(self, depth: int) -> float:
        return _ratio(self.alike[depth][0], self.alike[depth][2])

    def chance(self, depth: int) -> float:
        return _ratio(self.alike[depth][1], self.alike[depth][2])


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else nan


def choose_queries(pixels: np.ndarray, grid: Grid, count: int = 3) -> list[tuple[int, int]]:
    """Patches where much is to be seen, spread out: the most contrast, then contrast times the distance to those chosen."""
    height, width = (pixels.shape[i] // (grid.height, grid.width)[i] for i in (0, 1))
    patches = pixels[: grid.height * height, : grid.width * width].reshape(grid.height, height, grid.width, width, -1)
    contrast = patches.std((1, 3)).mean(-1).ravel()  # (P,)
    far = grid.distances.numpy()
    chosen = [int(contrast.argmax())]
    while len(chosen) < min(count, grid.patches):
        spread = np.minimum(far[chosen].min(0), max(grid.height, grid.width) / 2)  # further apart than this is no better
        score = (contrast + 1e-6) * spread
        chosen.append(int(score.argmax()))
    return [divmod(p, grid.width) for p in sorted(chosen)]
