"""Dropout by rows: what is dropped follows from seed, epoch, row and place alone, and as often as it should."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.dropout import PLACES, Dropout, attention, drawing, drop_by_rows, dropped, shuffled
from models import ModelSpec, build

ROWS = torch.tensor([3, 1, 4, 15, 92])


def masks(index: Tensor, p: float = 0.3, *, seed: int = 7, epoch: int = 2, batch: int = 0, places: int = 1, width: int = 13) -> Tensor:
    """What stays of ones, (places, rows, width)."""
    with drawing(seed, epoch, batch, index):
        return torch.stack([dropped(torch.ones(len(index), width), p) for _ in range(places)])


def test_a_row_keeps_the_same_whoever_is_beside_it() -> None:
    found = masks(ROWS, places=3)
    order = torch.tensor([4, 0, 2])
    assert torch.equal(masks(ROWS[order], places=3, batch=11), found[:, order])  # in another batch, in another order
    mixed = torch.stack((ROWS, ROWS.flip(0)), 1)
    assert torch.equal(masks(mixed, places=3), found)  # of two mixed rows the first decides


def test_other_rows_places_epochs_and_seeds_drop_something_else() -> None:
    places = 2 * PLACES + 3
    found = [*masks(ROWS, places=places, width=67).flatten(0, 1), *masks(ROWS, epoch=3, width=67)[0], *masks(ROWS, seed=8, width=67)[0]]
    found += [*masks(ROWS, seed=7 + 2**40, width=67)[0]]  # seeds are 63 bits long
    assert len({tuple(row.tolist()) for row in found}) == 5 * (places + 3)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_as_much_is_dropped_as_asked_and_independently(p: float) -> None:
    rows, width = 400, 1000
    kept = masks(torch.arange(rows), p, width=width)[0]
    assert torch.equal(kept.unique(), torch.tensor([0.0, 1 / (1 - p)]))
    z = ((kept > 0).double() - (1 - p)) / (p * (1 - p)) ** 0.5  # mean 0, variance 1
    limit = 4.5
    assert abs(z.mean() * (rows * width) ** 0.5) < limit
    for axis in (0, 1):  # sums of rows and columns scatter as sums of independent draws do: chi-square over its degrees of freedom
        sums = z.mean(axis) * z.shape[axis] ** 0.5
        assert abs(sums.square().mean() - 1) < limit * (2 / len(sums)) ** 0.5
    for a, b in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[:, 32:], z[:, :-32])):  # neighbors in either direction
        assert abs((a * b).mean() * a.numel() ** 0.5) < limit


def test_heads_and_windows_belong_to_their_row() -> None:
    """A layer may fold its heads into the first dimension: (B * H, N, N)."""
    with drawing(7, 2, 0, ROWS):
        folded = dropped(torch.ones(5 * 3, 4, 4), 0.5)
    with drawing(7, 2, 1, ROWS[3:4]):
        assert torch.equal(dropped(torch.ones(3, 4, 4), 0.5), folded[9:12])


def test_the_gradient_is_that_of_what_stays() -> None:
    x = torch.randn(5, 13, dtype=torch.float64, requires_grad=True)
    with drawing(7, 2, 0, ROWS):
        dropped(x, 0.3).square().sum().backward()
    assert x.grad is not None
    scale = masks(ROWS)[0].double()
    torch.testing.assert_close(x.grad, 2 * x.detach() * scale**2, rtol=1e-6, atol=0)


def test_outside_of_a_step_it_is_that_of_torch() -> None:
    layer = Dropout(0.4)
    x = torch.randn(5, 13)
    torch.manual_seed(1)
    found = layer(x)
    torch.manual_seed(1)
    assert torch.equal(found, F.dropout(x, 0.4))
    with drawing(0, 0, 0, ROWS):
        assert torch.equal(layer.eval()(x), x)


def test_what_a_batch_draws_for_all_rows_follows_from_the_batch() -> None:
    def draw(*where: int) -> tuple[Any, ...]:
        with drawing(*where, ROWS):  # type: ignore[arg-type,call-arg]
            return torch.randperm(50).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()

    first = draw(5, 1, 3)
    torch.randn(7), random.gauss(0, 1), np.random.randn()  # what ran before changes nothing
    assert draw(5, 1, 3) == first
    assert all(a != b for other in (draw(6, 1, 3), draw(5, 2, 3), draw(5, 1, 4)) for a, b in zip(first, other, strict=True))


def test_orders_differ_by_row_and_every_place_is_as_likely() -> None:
    with drawing(7, 2, 0, torch.arange(3000)):
        found = shuffled(3000, 6, torch.device("cpu"))
    assert torch.equal(found.sort(1).values, torch.arange(6).expand(3000, 6))
    share = F.one_hot(found, 6).double().mean(0)  # place by number
    assert (share - 1 / 6).abs().max() < 4.5 * (5 / 36 / 3000) ** 0.5


# ---------------------------------------------------------------- attention and models


def test_attention_with_dropout_is_that_of_torch_on_average() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 7).double() for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    index = torch.arange(4000)
    for given in (None, mask, torch.randn(5, 5).double()):
        exact = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
        torch.testing.assert_close(attention(q, k, v, mask=given), exact)
        with drawing(1, 0, 0, index):
            many = attention(*(t.expand(4000, -1, -1, -1) for t in (q, k, v)), mask=given, dropout=0.3)
        error = many.std(0) / 4000**0.5 + 1e-12
        assert ((many.mean(0) - exact[0]) / error).abs().max() < 4.5


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.drop(x))


def test_dropouts_of_any_model_draw_by_rows() -> None:
    model = Twice()
    drop_by_rows(model)
    assert repr(model.drop) == repr(nn.Dropout(0.5))
    with drawing(7, 2, 0, ROWS):
        found = model(torch.ones(5, 40))
    with drawing(7, 2, 0, ROWS[:2]):
        assert torch.equal(model(torch.ones(2, 40)), found[:2])
    assert 0 < (found > 0).double().mean() < 0.4  # a quarter: the second use draws anew


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_model_of_timm_draws_by_rows(name: str) -> None:
    side = 32 if name.startswith("vit") else 224
    drops: dict[str, Any] = dict(dropout=0.2, attention_dropout=0.2, token_dropout=0.5 * name.startswith("vit"))
    model: Any = build(ModelSpec(name=f"timm/{name}", shape=(3, side, side), num_classes=5, **drops))
    drop_by_rows(model)
    for part in model.modules():
        if isinstance(part, timm.layers.DropPath):
            part.drop_prob = 0.3
    x = torch.randn(1, 3, side, side).expand(3, -1, -1, -1)
    with torch.no_grad(), drawing(7, 2, 0, torch.tensor([5, 9, 5])):
        first, other, again = model.train()(x)
    torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-5)
    assert (other - first).abs().max() > 0.01
    with torch.no_grad():
        assert torch.equal(model.eval()(x), model(x))
