"""The search of calibration: its loss and gradient against autograd of the plain formula, and where it leaves the parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers import Bank, calibration
from classifiers.fit import Loss, Scored, fit_confidence, values_of
from classifiers.neighbor_heads import LinearAttnKnnHead
from classifiers.predictors import Interpolation
from classifiers.retrieved import Context, Retrieved
from tests.classifiers.test_calibration import C, D, K, clusters

N, SPREAD = 211, 0.7
Found = tuple[Interpolation, Retrieved, Tensor]
Fitting = tuple[Interpolation, Scored]


@pytest.fixture
def found_rows() -> Found:
    """A linear head and a vote with a prior; rows with their neighbors, and their classes."""
    torch.manual_seed(0)
    head = LinearAttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1)
    bank = Bank(D)
    bank.add(*clusters(97, 0))
    head.eval().refresh(bank)
    features, target = clusters(N, 1)
    with torch.no_grad():
        retrieved = head.retrieve(features)
    predictor: Any = head.as_predictor(C)
    return predictor.requires_grad_(False), retrieved, target


@pytest.fixture
def fitting(found_rows: Found) -> Fitting:
    """The first row has no neighbor."""
    predictor, retrieved, target = found_rows
    retrieved.index[0] = -1
    return predictor, Scored.by(predictor, retrieved, target)


def moved(predictor: Interpolation) -> list[Tensor]:
    """Starts; the parameters are then elsewhere."""
    starts = values_of(predictor.confidence())
    with torch.no_grad():
        for parameter in predictor.confidence():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return starts


def plain(predictor: Interpolation, rows: Scored, starts: list[Tensor]) -> Tensor:
    """What holds the parameters comes first, so that autograd adds its gradient last: a share is in the formula twice besides."""
    squares = [(p - start).square().sum() for p, start in zip(predictor.confidence(), starts, strict=True)]
    held = sum(squares, torch.zeros(())) / (2 * SPREAD**2 * len(rows.target))
    return F.nll_loss(rows.log_probs(predictor), rows.target) + held


def test_loss_and_gradient_are_those_of_the_plain_formula(fitting: Fitting) -> None:
    """To the last bit: a search takes another way where one differs."""
    predictor, rows = fitting
    assert predictor.fits_share
    starts, parameters = moved(predictor), predictor.confidence()
    for parameter in parameters:
        parameter.requires_grad_(True)
    loss = Loss(predictor, rows, parameters, starts, SPREAD)
    found = loss()
    assert loss.values.grad is not None
    gradient = loss.values.grad.clone()
    for parameter in parameters:
        parameter.grad = None
    wanted = plain(predictor, rows, starts)
    wanted.backward()
    assert torch.equal(found, wanted)
    assert torch.equal(gradient, torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]))
    assert all(part.abs().max() > 1e-5 for part in gradient.split(loss.sizes))


def test_a_fit_ends_where_torch_ends_without_help(fitting: Fitting) -> None:
    """The same search over the parameters one by one, with all of the gradient by autograd. It often looks farther than it goes."""
    predictor, rows = fitting
    starts = moved(predictor)
    other = copy.deepcopy(predictor)
    fit_confidence(predictor, rows, starts=starts, begin=values_of(predictor.confidence()), spread=SPREAD)
    parameters = other.confidence()
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.LBFGS(parameters, lr=1, max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        value = plain(other, rows, starts)
        value.backward()
        return value

    optimizer.step(step)
    for found, wanted in zip(predictor.confidence(), parameters, strict=True):
        assert torch.equal(found, wanted)
        assert (found.requires_grad, found.grad) == (False, None)


def test_searches_that_only_choose_are_short_and_find_the_losses_of_long_ones(found_rows: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows left out, for each spread; and from where the last search ended, in a few looks."""
    predictor, retrieved, target = found_rows
    looks, look = [], Loss.__call__

    def counted(self: Loss) -> Tensor:
        looks.append(1)
        return look(self)

    monkeypatch.setattr(Loss, "__call__", counted)
    inside, outside = torch.arange(N) % 3 > 0, torch.arange(N) % 3 == 0
    part = retrieved.subset(inside), target[inside], retrieved.subset(outside), target[outside]
    starts, found, taken = values_of(predictor.confidence()), [], []
    begins: dict[float, list[Tensor]] = {}
    for least, where in ((1e-9, {}), (calibration.ROUGHLY, begins), (calibration.ROUGHLY, begins)):
        monkeypatch.setattr(calibration, "ROUGHLY", least)
        looks.clear()
        found.append(calibration.held_out(predictor, starts, *part, calibration.SPREADS, where) / outside.sum())
        taken.append(len(looks))
    exact, rough, again = found
    assert (rough - exact).abs().max() < 1e-3
    assert (again - exact).abs().max() < 1e-3
    assert exact.max() - exact.min() > 1e-2  # there is something to choose
    assert taken[0] > taken[1] > 2 * taken[2]
    assert all(torch.equal(now, before) for now, before in zip(predictor.confidence(), starts, strict=True))


def test_nearness_by_hand() -> None:
    """Distances 3 and 4, one of them, and none."""
    mask = torch.tensor([[True, True], [False, True], [False, False]])
    context = Context(torch.tensor([[9.0, 16], [9, 16], [9, 16]]), mask)
    nearest, mean = context.nearness
    assert nearest.tolist() == pytest.approx([math.log(4), math.log(5), 0])
    assert mean.tolist() == pytest.approx([math.log(4.5), math.log(5), 0])
    assert context.has_neighbors[:, 0].tolist() == [True, True, False]
    part = context[1:]
    assert [x.tolist() for x in part.nearness] == [nearest[1:].tolist(), mean[1:].tolist()]
    assert Context(torch.ones(2, 3)).has_neighbors.all()
