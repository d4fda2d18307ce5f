"""Calibration: what sets a predictor's confidence, fitted on rows that the embedder never saw (the validation split), and nowhere else.

Training rows lie among neighbors that the embedder was taught to put there, so they say nothing about how sure to be.
Parameters are fitted by maximum a posteriori around where they start, so that a hundred rows move them a little and thousands
as far as they like. How far they may go, and whether and for how long the attention itself is fitted too, is decided by
cross-validation.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classifiers.fit import NotFinite, Scored, fit_confidence, values_of
from classifiers.predictors import HeadPredictor, Interpolation, Predictor, Vote
from classifiers.retrieved import Retrieved
from utils import fold_in, one_of, warn

MODES = ("none", "head", "temperature")
SPREADS = (0.1, 0.3, 1.0)  # how far parameters may go; the first hardly lets them
WIDER = (3.0, 10.0)  # tried if the last of these was best and there are many rows; a few that are all right would ask for certainty
MANY = 500  # rows
CLEARLY = 0.01  # nats
HELD = 1.0  # spread of a temperature that is fitted alone
FOLDS, EPOCHS, BATCH, RATE = 3, 8, 256, 3e-3  # of the final fit of the attention
TRAINING_EPOCHS = 3  # of an attention over a bank that has none
ROUGHLY = 1e-6  # nats: where a search ends that only chooses among fits. With 1e-5, losses of rows left out are up to 1e-3 off


def calibrate(predictor: Predictor, retrieved: Retrieved, target: Tensor, mode: str, seed: int = 0) -> Predictor:
    """A calibrated copy. temperature: one number. head: temperatures, prior, interpolation share, and a short fit of the attention.

    A fit that is not finite gives way to a narrower one, then to a temperature, then to none, and says so.
    """
    one_of("calibrate", mode, MODES)
    fitted = copy.deepcopy(predictor).eval().requires_grad_(False)
    if mode == "none" or not len(retrieved):
        return fitted
    if mode == "head":
        try:
            return fit_all(copy.deepcopy(fitted), retrieved, target, seed)
        except NotFinite:
            _tell(fitted, "a fit of all that sets its confidence is not finite; one temperature is fitted instead")
    try:
        # NOTE: held to 1 a little. Where a few rows are all right, the most likely temperature is 0, and one error costs everything.
        return fit_narrower(fitted, Scored.by(fitted, retrieved, target), [fitted.log_temperature], spread=HELD)
    except NotFinite:
        _tell(fitted, "no fit is finite; its confidence stays as trained")
        return fitted


def fit_all(fitted: Predictor, retrieved: Retrieved, target: Tensor, seed: int) -> Predictor:
    fitted.fitted_to(len(retrieved))
    epochs, spread = choose_fit(fitted, retrieved, target, seed)
    starts, half = values_of(fitted.confidence()), from_half(fitted)
    before = copy.deepcopy(fitted)
    for _ in fit_attention(fitted, retrieved, target, epochs, seed):
        pass
    if not all(p.isfinite().all() for p in (*fitted.attention(), *fitted.confidence())):
        _tell(fitted, "a fit of the attention is not finite; the attention stays as trained")
        fitted = before
    tried: list[tuple[float, list[Tensor] | None]] = [(spread, None)]
    if len(target) >= MANY:
        tried += [(spread, half)] if half else []
        tried += [(s, None) for s in (*SPREADS, *WIDER) if s < spread][-1:]
    return lowest(fitted, Scored.by(fitted, retrieved, target), starts, tried)


def lowest(predictor: Predictor, rows: Scored, starts: list[Tensor], tried: list[tuple[float, list[Tensor] | None]]) -> Predictor:
    """The first of the fits (spread, and where it begins), unless another one is clearly better on the rows that all are fitted to.

    NOTE: none has more room than rows left out allow, so a lower loss is a better search, not a looser fit. The loss has several valleys:
    between a vote that is rarely right and one that leaves most to the class means lies a hill, and from a prior's share of a few percent
    a fit ended 0.1 nats above what it found from one half. And where float32 shows no way down it may stop above a fit with less room.
    """
    best, least = predictor, math.inf
    for spread, begin in tried:
        trial = copy.deepcopy(predictor)
        with contextlib.suppress(NotFinite) if best is not predictor else contextlib.nullcontext():
            fit_narrower(trial, rows, starts=starts, begin=begin, spread=spread)
            if (loss := rows.nll(trial)) < least - CLEARLY:
                best, least = trial, loss
    return best


def from_half(predictor: Predictor) -> list[Tensor] | None:
    """Another place to begin: vote and prior have one half each. None where there is no prior."""
    prior = None if predictor.vote_part is None else predictor.vote_part.prior
    if prior is None:
        return None
    return [torch.zeros_like(p) if p is prior.share_logit else p.detach().clone() for p in predictor.confidence()]


def fit_narrower(
    predictor: Predictor,
    rows: Scored,
    parameters: list[nn.Parameter] | None = None,
    *,
    starts: list[Tensor] | None = None,
    begin: list[Tensor] | None = None,
    spread: float,
) -> Predictor:
    """`fit_confidence`, again with less room where it is not finite."""
    for room in (spread, *(s for s in reversed(SPREADS) if s < spread)):
        try:
            fit_confidence(predictor, rows, parameters, starts=starts, begin=begin, spread=room)
        except NotFinite:
            continue
        if room < spread:
            _tell(predictor, f"a fit with spread {spread:g} is not finite; one with {room:g} is taken")
        return predictor
    raise NotFinite


def _tell(predictor: Predictor, what: str) -> None:
    warn(f"calibrate: {type(predictor).__name__} on validation rows: {what}")


def no_worse_than_parts(fitted: Interpolation, linear: Predictor, vote: Predictor, retrieved: Retrieved, target: Tensor) -> Interpolation:
    """The better of an interpolation that was fitted as a whole and one of its calibrated parts, on the rows that both were fitted to.

    The share of the second starts from one half and from either end, so that it is at least as good as the better part alone.
    """
    if not fitted.fits_share or not isinstance(linear, HeadPredictor) or not isinstance(vote, Vote):
        return fitted
    best, lowest = fitted, Scored.by(fitted, retrieved, target).nll(fitted)
    for start in (0.5, 0.0, 1.0):
        trial = Interpolation(copy.deepcopy(linear), copy.deepcopy(vote), share=start).to(fitted.share_logit.device).eval()
        trial.fits_share = True
        rows = Scored.by(trial, retrieved, target)
        if start == 0.5:
            with contextlib.suppress(NotFinite):
                fit_confidence(trial, rows, [trial.share_logit])
        if (loss := rows.nll(trial)) < lowest:
            best, lowest = trial, loss
    return best.requires_grad_(False)


def fit_attention(
    predictor: Predictor, retrieved: Retrieved, target: Tensor, epochs: int, seed: int, *, confidence: bool = True
) -> Iterator[int]:
    """The attention, and with it the confidence, an epoch at a time."""
    if not epochs or not predictor.attention():
        return
    parameters = [*predictor.attention(), *(predictor.confidence() if confidence else ())]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    for epoch in range(epochs):
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)
            order = torch.randperm(len(target), generator=torch.Generator().manual_seed(fold_in(seed, epoch)))
            for rows in order.split(BATCH):
                rows = rows.to(target.device)
                optimizer.zero_grad()
                F.nll_loss(predictor(retrieved.block(rows)), target[rows]).backward()
                optimizer.step()
        predictor.requires_grad_(False)
        yield epoch + 1


def choose_fit(predictor: Predictor, retrieved: Retrieved, target: Tensor, seed: int) -> tuple[int, float]:
    """Epochs of the final fit (0 keeps the attention as it is) and spread, by the NLL of rows left out of a fit."""
    folds = torch.randperm(len(target), generator=torch.Generator().manual_seed(fold_in(seed, 1))) % FOLDS
    starts = values_of(predictor.confidence())
    losses = torch.zeros(EPOCHS + 1, len(SPREADS), dtype=torch.float64)
    fits: list[list[Predictor]] = [[] for _ in range(EPOCHS + 1)]
    parts = []
    for fold in range(FOLDS):
        inside, outside = (rows.nonzero()[:, 0].to(target.device) for rows in (folds != fold, folds == fold))
        if not len(inside) or not len(outside):
            return 0, SPREADS[0]
        part = retrieved.subset(inside), target[inside], retrieved.subset(outside), target[outside]
        parts.append(part)
        trial, begins = copy.deepcopy(predictor), dict[float, list[Tensor]]()
        for epoch in itertools.chain([0], fit_attention(trial, *part[:2], EPOCHS, seed)):
            losses[epoch] += held_out(trial, starts, *part, SPREADS, begins)
            if len(target) >= MANY:
                fits[epoch].append(copy.deepcopy(trial))
    if not predictor.attention():
        losses = losses[:1]
    epochs, at = divmod(int(losses.argmin()), len(SPREADS))
    if SPREADS[at] < SPREADS[-1] or len(target) < MANY:
        return epochs, SPREADS[at]
    wider = sum((held_out(fit, starts, *part, WIDER, {}) for fit, part in zip(fits[epochs], parts, strict=True)), torch.zeros(()))
    all_of_them = torch.cat([losses[epochs, -1:], wider])
    return epochs, (SPREADS[-1], *WIDER)[int(all_of_them.argmin())]


def held_out(
    predictor: Predictor,
    starts: list[Tensor],
    known: Retrieved,
    target: Tensor,
    others: Retrieved,
    truth: Tensor,
    spreads: tuple[float, ...],
    begins: dict[float, list[Tensor]],
) -> Tensor:
    """Summed NLL of rows left out, with the confidence fitted to the others, for each spread.

    `begins`: where the search of a spread begins, if not at the start; afterwards, where it ended. An epoch of the attention changes
    little, so the next search is a short one.
    """
    rows, left_out = Scored.by(predictor, known, target), Scored.by(predictor, others, truth)
    parameters = predictor.confidence()
    before, losses = values_of(parameters), []
    for spread in spreads:
        try:
            fit_confidence(predictor, rows, starts=starts, begin=begins.get(spread), spread=spread, least=ROUGHLY)
        except NotFinite:
            losses.append(torch.tensor(math.inf, dtype=torch.float64))
            continue
        begins[spread] = values_of(parameters)
        with torch.no_grad():
            loss = F.nll_loss(left_out.log_probs(predictor), truth, reduction="sum").double()
            losses.append(loss.nan_to_num(math.inf).cpu())
    for parameter, value in zip(parameters, before, strict=True):
        parameter.data.copy_(value)
    return torch.stack(losses)


def train_attention(predictor: Vote, retrieved: Retrieved, target: Tensor, seed: int) -> None:
    """Trains an attention on the bank's own rows, each with its neighbors but without itself. The embeddings stay."""
    predictor.train()
    # Not its confidence: that training rows lie where they were taught to says nothing about others.
    for _ in fit_attention(predictor, retrieved, target, TRAINING_EPOCHS, seed, confidence=False):
        pass
    predictor.eval()
