"""The search of calibration: L-BFGS, over all rows, for the few numbers that set a predictor's confidence.

A calibration makes hundreds of these fits, of a hundred steps each over some hundred rows, so what counts is how many operations a step
takes, not how large they are: parameters are one vector, what holds them to their start is differentiated by hand, and what does not
change is computed once (`Context`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from classifiers.index import blocks
from classifiers.predictors import Predictor
from classifiers.retrieved import Context, Retrieved

NUMBERS = 1 << 22  # probabilities whose gradient is computed at one time


class NotFinite(ArithmeticError):
    """A fit that has stepped to infinity, or whose probabilities are not numbers. Its parameters are where they started."""


class Scored(NamedTuple):
    """Rows as the cheap step of a predictor reads them: with scores that were computed once."""

    scores: Tensor  # (N, C), or (2, N, C) of an interpolation
    context: Context
    target: Tensor

    @classmethod
    def by(cls, predictor: Predictor, retrieved: Retrieved, target: Tensor) -> Scored:
        return cls(predictor.all_scores(retrieved), retrieved.context, target)

    def log_probs(self, predictor: Predictor) -> Tensor:
        return predictor.log_probs(self.scores, self.context)

    @torch.no_grad()
    def nll(self, predictor: Predictor) -> float:
        return F.nll_loss(self.log_probs(predictor).double(), self.target).item()


def fit_confidence(
    predictor: Predictor,
    rows: Scored,
    parameters: list[nn.Parameter] | None = None,
    *,
    starts: list[Tensor] | None = None,
    begin: list[Tensor] | None = None,
    spread: float = math.inf,
    least: float = 1e-9,
) -> Predictor:
    """L-BFGS on all rows. `spread`: standard deviation of the Gaussian that holds each parameter to its start; `begin`: where the search
    begins, if not there; `least`: it ends when a step changes the loss, or each parameter, by less. Raises NotFinite."""
    parameters = predictor.confidence() if parameters is None else parameters
    starts = starts or values_of(parameters)
    for parameter, value in zip(parameters, begin or starts, strict=True):
        parameter.data.copy_(value)
        parameter.requires_grad_(True)
    loss = Loss(predictor, rows, parameters, starts, spread)
    ended = minimized(loss, least)
    loss.set_parameters()  # the search need not end where it looked last
    for parameter in parameters:
        parameter.requires_grad_(False)
    with torch.no_grad():
        if not ended or not rows.log_probs(predictor).gather(1, rows.target[:, None]).isfinite().all():
            for parameter, start in zip(parameters, starts, strict=True):
                parameter.copy_(start)
            raise NotFinite
    return predictor


def values_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


class Loss:
    """Called, the mean NLL of the rows, and half the squared distance to the starts over rows x spread^2. `values`: all parameters as one
    vector, from which they are set before, and whose gradient is set afterwards."""

    def __init__(self, predictor: Predictor, rows: Scored, parameters: list[nn.Parameter], starts: list[Tensor], spread: float) -> None:
        scores, context, target = rows
        self.predictor, self.parameters, self.start = predictor, parameters, parameters_to_vector(starts)
        self.values = parameters_to_vector(values_of(parameters))
        # NOTE: set from these by copies, not parts of one memory: a product of matrices may round otherwise where memory begins elsewhere.
        self.sizes, self.scale = [start.numel() for start in starts], 2 * spread**2 * len(target)
        self.views = [part.view_as(parameter) for parameter, part in zip(parameters, self.values.split(self.sizes), strict=True)]
        # What a gradient needs takes a hundred bytes and more a probability, hence some rows after the others.
        at_once = [*blocks(len(target), NUMBERS // scores.shape[-1])]
        self.parts = [(scores[..., at, :], context[at], target[at], (at.stop - at.start) / len(target)) for at in at_once]

    def __call__(self) -> Tensor:
        self.set_parameters()
        away = self.values - self.start
        total = torch.zeros((), device=away.device)
        for scores, context, target, share in self.parts:
            value = F.nll_loss(self.predictor.log_probs(scores, context), target) * share
            value.backward()
            total = total + value.detach()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.values.grad = parameters_to_vector(grads) + away * 2 * (torch.ones_like(total) / self.scale)
        return total + sum((part.sum() for part in away.square().split(self.sizes)), torch.zeros_like(total)) / self.scale

    def set_parameters(self) -> None:
        for parameter, value in zip(self.parameters, self.views, strict=True):
            parameter.data.copy_(value)
            parameter.grad = None


def minimized(loss: Loss, least: float) -> bool:
    """Whether the search came to an end."""
    optimizer = torch.optim.LBFGS([loss.values], lr=1, max_iter=100, tolerance_change=least, history_size=20, line_search_fn="strong_wolfe")
    try:
        with torch.enable_grad():
            optimizer.step(loss)
    except RuntimeError as error:  # NOTE: where few rows can be told apart, the line search can step to infinity, and raises
        if "overflow" not in str(error):
            raise
        return False
    except (OverflowError, ZeroDivisionError, ValueError):  # so does its arithmetic in Python
        return False
    return True
