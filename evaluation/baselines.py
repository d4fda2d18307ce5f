"""Baselines: the predictors shown beside a head's own, on the same rows and the same neighbors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from classifiers.calibration import calibrate, no_worse_than_parts
from classifiers.heads import Head
from classifiers.neighbor_heads import AttnKnnHead, NeighborHead
from classifiers.predictors import Interpolation, Predictor, Vote
from classifiers.retrieved import Retrieved
from classifiers.weights import WEIGHTS

PLAIN = ("uniform", "distance")  # weights of the votes that stand beside every head


class Predictors(nn.Module):
    """A head's own predictor and its baselines by name, each as trained (`raw`) and, once `calibrate` was called, calibrated.

    Not the head's own modules but copies: the head stays as it was trained.
    """

    def __init__(self, raw: Mapping[str, Predictor], own: str, mode: str, retriever: NeighborHead | None) -> None:
        super().__init__()
        self.own, self.mode = own, mode
        self.raw = nn.ModuleDict({name: copy.deepcopy(predictor) for name, predictor in raw.items()})
        self.calibrated = nn.ModuleDict({name: to_calibrate(predictor, mode, retriever) for name, predictor in raw.items()})

    @property
    def names(self) -> list[str]:
        return list(self.raw)

    def of(self, name: str, *, calibrated: bool) -> Predictor:
        predictor: Any = (self.calibrated if calibrated else self.raw)[name]
        found: Predictor = predictor
        return found

    def calibrate(self, retrieved: Retrieved, target: Tensor, seed: int) -> None:
        for name in self.names:  # an interpolation comes after what it is made of
            fitted = calibrate(self.of(name, calibrated=True), retrieved, target, self.mode, seed)
            if self.mode == "head" and isinstance(fitted, Interpolation):
                linear, vote = (self.of(part, calibrated=True) for part in ("linear", fitted.vote.name))
                fitted = no_worse_than_parts(fitted, linear, vote, retrieved, target)
            self.calibrated[name] = fitted

    def log_probs(self, name: str, retrieved: Retrieved, *, calibrated: bool) -> Tensor:
        """(N, C)"""
        return self.of(name, calibrated=calibrated).predict(retrieved)

    def by_k(self, retrieved: Retrieved, ks: Sequence[int], *, calibrated: bool) -> dict[int, dict[str, Tensor]]:
        """With the first k neighbors for each k, all from one search; no mean over several k. What was calibrated, was for one k."""
        single = copy.deepcopy(self)
        for name in single.names:
            if vote := single.of(name, calibrated=calibrated).vote_part:
                vote.ensemble = ()
        return {k: {name: single.log_probs(name, retrieved.nearest(k), calibrated=calibrated) for name in single.names} for k in ks}


def averaged(views: Sequence[Tensor]) -> Tensor:
    """Of several views of the same rows, the logarithm of their mean probability."""
    return torch.logsumexp(torch.stack(list(views)), 0) - math.log(len(views))


def to_calibrate(predictor: Predictor, mode: str, retriever: NeighborHead | None) -> Predictor:
    """A copy for calibration. Where all that sets confidence is fitted (mode head), its vote has a prior: the class frequencies of the
    bank, where it had none."""
    predictor = copy.deepcopy(predictor)
    vote = predictor.vote_part
    if mode == "head" and retriever is not None and vote is not None and vote.prior is None:
        vote.prior = retriever.new_prior()
        if retriever.bank is not None:
            vote.prior.start_from(retriever.bank.labels)
        vote.prior.to(predictor.log_temperature.device)
    return predictor


# ---------------------------------------------------------------- which baselines a head has


def own_name(head: Head, name: str) -> str:
    """What the head's own predictor is called among its baselines; `name` is the head's."""
    if not isinstance(head, NeighborHead):
        return name
    return head.vote.name if head.predictor.linear_part is None else "interpolation"


def calibrated_form(head: Head, num_classes: int, mode: str) -> Predictor:
    """The head's own predictor with the parts that it has after calibration, for values that were saved."""
    return to_calibrate(head.as_predictor(num_classes), mode, head if isinstance(head, NeighborHead) else None)


def baseline_head(num_features: int, num_classes: int, **options: Any) -> AttnKnnHead:
    """Attention over rows as they are, brought to unit length: for a head that has no bank, or no attention."""
    heads = next(h for h in (4, 3, 2, 1) if num_features % h == 0)
    return AttnKnnHead(num_features, num_classes, embed_dim=0, attention_heads=heads, contrastive_weight=0.0, proxy_weight=0.0, **options)


def beside_neighbors(head: NeighborHead, mode: str, attention: Vote | None = None) -> Predictors:
    """Beside a head that has a bank: its parts, the votes without parameters, and `attention`, for a head without one of its own."""
    vote = head.vote
    device = vote.log_temperature.device
    options: dict[str, Any] = {"ensemble": head.ensemble, "adaptive": head.adaptive_k}
    raw: dict[str, Predictor] = {name: Vote(name, WEIGHTS[name], head.num_classes, **options) for name in PLAIN if name != vote.name}
    raw = {name: plain.to(device) for name, plain in raw.items()} | {vote.name: vote}
    if attention is not None:
        raw["attention"] = attention
    if linear := head.predictor.linear_part:
        raw = {"linear": linear, **raw, "interpolation": head.predictor}
    return Predictors(raw, own_name(head, vote.name), mode, head)


def beside_features(head: Head, name: str, retriever: AttnKnnHead, mode: str) -> Predictors:
    """Beside a head without a bank: the votes over the features of its backbone."""
    # NOTE: this draws start values of priors that are not used. Without these draws the later ones would differ, and with them the
    # last digits of every figure that was published with this program.
    votes = beside_neighbors(retriever, mode)
    others = {vote: votes.of(vote, calibrated=False) for vote in votes.names}
    own = head.as_predictor(retriever.num_classes)
    return Predictors({name: own, **others}, name, mode, retriever)


def alone(head: Head, num_classes: int, name: str, mode: str) -> Predictors:
    """No baselines."""
    return Predictors({name: head.as_predictor(num_classes)}, name, mode, None)
