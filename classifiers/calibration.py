"""Calibration: what sets a voter's confidence, fitted on rows that the embedder never saw (the validation split), and nowhere else.

Training rows lie among neighbors that the embedder was taught to put there, so they say nothing about how sure to be.
Parameters are fitted by maximum a posteriori around where they start, so that a hundred rows move them a little and thousands
as far as they like. Whether the attention itself is fitted too, and for how long, is decided by cross-validation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.neighbor_attention import NeighborAttention
from classifiers.voters import NeighborVoter, Questions, Voter
from utils import mix, one_of

MODES = ("none", "head", "temperature")
SPREAD = 1.0  # standard deviation of the Gaussian prior on each parameter, around its start
FOLDS, EPOCHS, BATCH, RATE = 3, 8, 256, 1e-3  # of the final fit of the attention


@torch.no_grad()
def opinions(voter: Voter, questions: Questions) -> Tensor:
    """(N, C), or (2, N, C) of a mixture."""
    voter.eval()
    return torch.cat([voter.opinion(query) for query in questions.blocks()], -2)


def calibrate(voter: Voter, questions: Questions, target: Tensor, mode: str, seed: int = 0) -> Voter:
    """A calibrated copy. temperature: one number. head: temperature, prior, mixing share, and a short final fit of the attention."""
    one_of(mode, MODES, "calibrate")
    fitted = copy.deepcopy(voter).eval().requires_grad_(False)
    if mode == "none" or not len(questions):
        return fitted
    if mode == "temperature":
        return fit_confidence(fitted, opinions(fitted, questions), questions, target, only_temperature=True)
    epochs = best_epochs(fitted, questions, target, seed) if fitted.attention() else 0
    starts = [p.detach().clone() for p in fitted.confidence()]
    for _ in fit_attention(fitted, questions, target, epochs, seed):
        pass
    return fit_confidence(fitted, opinions(fitted, questions), questions, target, starts=starts)


def fit_confidence(
    voter: Voter,
    opinion: Tensor,
    questions: Questions,
    target: Tensor,
    *,
    only_temperature: bool = False,
    starts: list[Tensor] | None = None,
) -> Voter:
    """Fits what is cheap to opinions that were asked for once (L-BFGS on all rows). `starts`: what the parameters are held to."""
    parameters = [voter.log_temperature] if only_temperature else voter.confidence()
    starts = starts or [p.detach().clone() for p in parameters]
    distance, mask = questions.distance, questions.mask
    optimizer = torch.optim.LBFGS(parameters, lr=1, max_iter=100, history_size=20, line_search_fn="strong_wolfe")
    penalty = 0.0 if only_temperature else 1 / (2 * SPREAD**2 * len(target))

    def loss() -> Tensor:
        optimizer.zero_grad()
        away = sum(((p - start).square().sum() for p, start in zip(parameters, starts, strict=True)), torch.zeros(()))
        value = F.nll_loss(voter.settle(opinion, distance, mask), target) + penalty * away.to(opinion.device)
        value.backward()
        return value

    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer.step(loss)
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.requires_grad_(False)
        if not parameter.isfinite().all():  # a line search that failed
            parameter.copy_(start)
    return voter


def fit_attention(voter: Voter, questions: Questions, target: Tensor, epochs: int, seed: int) -> Iterator[int]:
    """The attention and the confidence together, an epoch at a time."""
    if not epochs:
        return
    parameters = [*voter.attention(), *voter.confidence()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    for epoch in range(epochs):
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)
            order = torch.randperm(len(target), generator=torch.Generator().manual_seed(mix(seed, epoch)))
            for rows in order.split(BATCH):
                rows = rows.to(target.device)
                optimizer.zero_grad()
                F.nll_loss(voter(questions.at(rows)), target[rows]).backward()
                optimizer.step()
        voter.requires_grad_(False)
        yield epoch + 1


def best_epochs(voter: Voter, questions: Questions, target: Tensor, seed: int) -> int:
    """Epochs of the final fit after which rows left out of it were predicted best; 0 keeps the attention as it is."""
    folds = torch.randperm(len(target), generator=torch.Generator().manual_seed(mix(seed, 1))) % FOLDS
    losses = torch.zeros(EPOCHS + 1, dtype=torch.float64)
    for fold in range(FOLDS):
        inside, outside = (rows.nonzero()[:, 0].to(target.device) for rows in (folds != fold, folds == fold))
        if not len(inside) or not len(outside):
            return 0
        known, asked = subset(questions, inside), subset(questions, outside)
        trial = copy.deepcopy(voter)
        starts = [p.detach().clone() for p in voter.confidence()]
        losses[0] += held_out(trial, starts, known, target[inside], asked, target[outside])
        for epoch in fit_attention(trial, known, target[inside], EPOCHS, seed):
            losses[epoch] += held_out(trial, starts, known, target[inside], asked, target[outside])
    return int(losses.argmin())


def held_out(voter: Voter, starts: list[Tensor], known: Questions, target: Tensor, asked: Questions, truth: Tensor) -> float:
    """Summed NLL of rows left out, with the confidence fitted to the others."""
    fitted = fit_confidence(copy.deepcopy(voter), opinions(voter, known), known, target, starts=starts)
    with torch.no_grad():
        log_probs = fitted.settle(opinions(fitted, asked), asked.distance, asked.mask)
    return float(F.nll_loss(log_probs, truth, reduction="sum"))


def subset(questions: Questions, rows: Tensor) -> Questions:
    q = questions
    return Questions(q.features[rows], q.embedding[rows], q.distance[rows], q.index[rows], q.bank)


def leave_one_out(voter: NeighborVoter, questions: Questions, target: Tensor, epochs: int, seed: int) -> None:
    """Trains an attention on the bank's own rows, each with its neighbors but without itself. The embeddings stay."""
    assert isinstance(voter.weigh, NeighborAttention)
    voter.train()
    for _ in fit_attention(voter, questions, target, epochs, seed):
        pass
    voter.eval()
