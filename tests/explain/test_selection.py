"""Distances and overlaps of selected patches by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from explain.selection import Depth, Grid, Locality, choose_queries, depth_of, overlap, overlap_by_chance


class Layer:
    """Stands for a layer of heads 7 wide."""

    head_dim = 7


def depth(rows: Any, grid: Grid, K: int | None = None) -> Depth:
    """One head with these weights."""
    return depth_of(Layer(), torch.tensor(rows)[None, None], grid, K)


def locality(grid: Grid, *depths: Depth) -> Locality:
    found = Locality(grid)
    found.add(list(depths))
    return found


def test_distances_by_hand() -> None:
    """2 x 2 patches after a class token. Patch 0 reads 1 and 3 and the class token, the others read themselves."""
    rows = [
        [1.0, 0, 0, 0, 0],
        [0.5, 0, 0.3, 0, 0.2],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    grid = Grid(2, 2, 1)
    d = depth(rows, grid)
    assert (d.K, d.cut, d.heads) == (2, False, 1)
    assert d.index[0, 0].tolist() == [1, 3]
    assert d.kept.sum() == 5
    found = locality(grid, d)
    assert found.distance(0) == pytest.approx((1 + math.sqrt(2)) / 5)
    assert found.weighted(0) == pytest.approx((0.3 + 0.2 * math.sqrt(2)) / 3.5)
    assert grid.mean_distance == pytest.approx((8 * 1 + 4 * math.sqrt(2)) / 16)


def test_agreement_by_hand() -> None:
    """A row of 4 patches: the same selection, none in common, and one of three."""
    grid = Grid(1, 4)
    a = depth([[0.6, 0.4, 0, 0]] * 4, grid)
    b = depth([[0, 0, 0.9, 0.1]] * 4, grid)
    c = depth([[0, 0.2, 0.8, 0]] * 4, grid)
    assert overlap(a, a).tolist() == [1] * 4
    assert overlap(a, b).tolist() == [0] * 4
    assert overlap(b, c).tolist() == [pytest.approx(1 / 3)] * 4
    found = locality(grid, a, a, b, c)
    assert [round(found.agreement(i), 6) for i in (1, 2, 3)] == [1, 0, round(1 / 3, 6)]
    assert found.chance(1) == pytest.approx((4 * 1 / 3 + 1 * 1) / 6)  # of the 6 pairs, 4 share one patch with {0, 1}, and 1 both


def test_agreement_is_over_the_mean_of_the_heads_and_the_smaller_count() -> None:
    grid = Grid(1, 5)
    weight = torch.zeros(1, 2, 5, 5)
    weight[0, 0, :, 0], weight[0, 1, :, 0], weight[0, 1, :, 3] = 1, 0.1, 0.9  # mean: patch 0 most, then 3
    two = depth_of(Layer(), weight, grid)
    one = depth([[1.0, 0, 0, 0, 0]] * 5, grid)
    assert (two.K, one.K) == (2, 1)
    assert overlap(two, one).tolist() == [1] * 5


def test_chance_against_draws() -> None:
    rng = np.random.default_rng(0)
    draws = [(set(rng.permutation(13)[:5]), set(rng.permutation(13)[:5])) for _ in range(4000)]
    assert overlap_by_chance(5, 13) == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in draws]), abs=0.01)
    assert overlap_by_chance(13, 13) == 1


def test_a_layer_that_reads_everything_is_cut() -> None:
    grid = Grid(3, 5)
    dense = depth((torch.rand(15, 15, generator=torch.Generator().manual_seed(0)) + 0.1).tolist(), grid)
    assert (dense.K, dense.cut) == (9, True)
    assert depth((torch.ones(15, 15)).tolist(), grid, 4).K == 4
    assert depth((torch.ones(15, 15)).tolist(), grid, 99).K == 15
    selecting = torch.zeros(15, 15)
    selecting[:, :11] = 1
    assert (depth(selecting.tolist(), grid).K, depth(selecting.tolist(), grid).cut) == (11, False)
    assert (depth(selecting.tolist(), grid, 4).K, depth(selecting.tolist(), grid, 4).cut) == (4, True)


def test_raw_weights_count_by_their_size() -> None:
    d = depth([[-3.0, 1, 0]] * 3, Grid(1, 3))
    assert d.index[0, 0].tolist() == [0, 1]
    assert d.weight[0, 0].tolist() == [0.75, 0.25, 0]


def test_queries_are_where_something_is_and_spread_out() -> None:
    pixels = np.zeros((12, 20, 3))
    pixels[0, 0] = pixels[11, 19] = pixels[0, 2] = 1  # patches 0,0 and 2,4 and, near the first, 0,0 again
    pixels[1, 4] = 0.5  # patch 0,1
    queries = choose_queries(pixels, Grid(3, 5))
    assert {(0, 0), (2, 4)} < set(queries)
    assert len(set(queries)) == 3
    assert choose_queries(np.zeros((2, 2, 3)), Grid(1, 2)) == [(0, 0), (0, 1)]
