"""Voters: a query and its neighbors to log-probabilities.

A voter has two parts. Its *opinion* is costly and looks at the neighbors; what it *settles* on is cheap and sets the confidence
(temperature, prior, the share of a mixture). Calibration fits the second to many opinions that were asked for once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classifiers.bank import Bank, Neighbors
from classifiers.neighbor_attention import NeighborAttention, masked_softmax
from classifiers.values import TabrValues
from classifiers.votes import LEAST, Prior, adaptive, log_probabilities, probabilities_at
from utils import BadOption

BLOCK = 1024  # queries whose neighbors' embeddings are held at once
NOBODY = Neighbors(*(torch.empty(0, 0) for _ in range(5)))


class Facts(NamedTuple):
    """What confidence may look at."""

    distance: Tensor  # (B, K) squared
    mask: Tensor  # (B, K)
    means: Tensor  # (B, C) cosine of the query with the mean embedding of each class


@dataclass(frozen=True)
class Query:
    """Rows to be classified, who their neighbors are, and how near they are to the mean of each class."""

    features: Tensor  # (B, F) of the backbone
    embedding: Tensor  # (B, D)
    neighbors: Neighbors
    means: Tensor  # (B, C) cosines

    @property
    def facts(self) -> Facts:
        return Facts(self.neighbors.distance, self.neighbors.mask, self.means)


@dataclass(frozen=True)
class Questions:
    """Many queries. Which neighbors they have is known; the neighbors' embeddings are taken from the bank when they are needed."""

    features: Tensor  # (N, F)
    embedding: Tensor  # (N, D)
    distance: Tensor  # (N, K) squared
    index: Tensor  # (N, K) ids
    means: Tensor  # (N, C)
    bank: Bank | None  # None: nobody asks for neighbors

    def __len__(self) -> int:
        return len(self.features)

    def at(self, rows: Any) -> Query:
        """Some rows, by a slice or by their numbers."""
        if self.bank is None:
            return Query(self.features[rows], self.embedding[rows], NOBODY, self.means[rows])
        embedding, label, mask = self.bank.take(self.index[rows])
        near = Neighbors(self.distance[rows], self.index[rows], label, embedding, mask)
        return Query(self.features[rows], self.embedding[rows], near, self.means[rows])

    def blocks(self) -> Iterator[Query]:
        return (self.at(slice(start, start + BLOCK)) for start in range(0, len(self), BLOCK))

    def top(self, k: int) -> Questions:
        return replace(self, distance=self.distance[:, :k], index=self.index[:, :k])

    def subset(self, rows: Tensor) -> Questions:
        names = ("features", "embedding", "distance", "index", "means")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def mask(self) -> Tensor:
        return self.index >= 0

    @property
    def facts(self) -> Facts:
        return Facts(self.distance, self.mask, self.means)


class Voter(nn.Module):
    """`settle(opinion(query), query.facts)` gives log-probabilities (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        # Not trained: training rows are purer than others, and would teach it to be too sure. Calibration fits it.
        self.log_temperature = nn.Parameter(torch.zeros(()), requires_grad=False)

    def opinion(self, query: Query) -> Tensor:
        raise NotImplementedError

    def settle(self, opinion: Tensor, facts: Facts) -> Tensor:
        raise NotImplementedError

    def forward(self, query: Query) -> Tensor:
        return self.settle(self.opinion(query), query.facts)

    def confidence(self) -> list[nn.Parameter]:
        """What sets the confidence and nothing else."""
        return [self.log_temperature]

    def attention(self) -> list[nn.Parameter]:
        """What a short final fit may change of the opinion."""
        return []

    def fitted_to(self, rows: int) -> None:
        """How many rows its confidence is fitted to."""

    def tempered(self, log_probs: Tensor) -> Tensor:
        return F.log_softmax(log_probs * (-self.log_temperature).exp(), 1)


class HeadVoter(Voter):
    """A head that looks at features alone, such as the linear one."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def opinion(self, query: Query) -> Tensor:
        log_probs: Tensor = self.head(query.features)
        return log_probs

    def settle(self, opinion: Tensor, facts: Facts) -> Tensor:
        return self.tempered(opinion)


class NeighborVoter(Voter):
    """Neighbors weighed by a function of `VOTES` or by NeighborAttention, each for its label; a prior for what none of them is.

    `ensemble`: the mean of the votes of the first k for each k. `adaptive`: as many neighbors as the attention speaks of.
    """

    def __init__(
        self,
        name: str,
        weigh: Any,
        num_classes: int,
        *,
        prior: Prior | None = None,
        values: TabrValues | None = None,
        ensemble: Sequence[int] = (),
        adaptive: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.weigh, self.num_classes, self.prior, self.values = name, weigh, num_classes, prior, values
        self.ensemble, self.adaptive = tuple(ensemble), adaptive
        # Of the vote alone. NOTE: the prior comes after it: a temperature below 1 would take away what the prior gave.
        self.log_sharpness = nn.Parameter(torch.zeros(()), requires_grad=False)

    def weights(self, query: Query) -> Tensor:
        """How much each neighbor has to say, (B, K)."""
        near = query.neighbors
        weights: Tensor = self.weigh(query.embedding, near.embedding, near.distance, near.label, near.mask)
        if not isinstance(self.weigh, nn.Module):
            check_weights(self.name, weights, near.mask)
        return adaptive(weights, near.mask) if self.adaptive and not self.training else weights

    def opinion(self, query: Query) -> Tensor:
        return self.count(self.weights(query), query)

    def count(self, weights: Tensor, query: Query) -> Tensor:
        """Weights (B, K) to probabilities (B, C)."""
        near, width = query.neighbors, weights.shape[1]
        ks = [width] if self.training or not self.ensemble else list(self.ensemble)
        if self.values is None:
            return probabilities_at(weights, near.label, self.num_classes, ks, near.mask).mean(0)
        project = self.weigh.k_proj if isinstance(self.weigh, NeighborAttention) else nn.Identity()
        key, keys = project(query.embedding), project(near.embedding)
        of_k = []
        for k in ks:  # few
            there = near.mask & (torch.arange(width, device=weights.device) < k)
            share = masked_softmax(weights.clamp_min(1e-30).log(), there)  # renormalized
            of_k.append(self.values(share, query.embedding, key, keys, near.label, there))
        return torch.stack(of_k).mean(0)

    def settle(self, opinion: Tensor, facts: Facts) -> Tensor:
        if self.prior is not None:
            sharp = F.softmax(opinion.clamp_min(LEAST).log() * self.log_sharpness.exp(), 1)
            opinion = self.prior(sharp, facts.distance, facts.mask, facts.means)
        return self.tempered(log_probabilities(opinion))

    def confidence(self) -> list[nn.Parameter]:
        return [self.log_temperature] if self.prior is None else [self.log_sharpness, *self.prior.parameters()]

    def fitted_to(self, rows: int) -> None:
        if self.prior is not None:
            self.prior.fitted_to(rows)

    def attention(self) -> list[nn.Parameter]:
        modules = [m for m in (self.weigh, self.values) if isinstance(m, nn.Module)]
        return [p for module in modules for p in module.parameters()]


def check_weights(name: str, weights: Tensor, mask: Tensor) -> None:
    """Of a function that a user may have written."""
    if weights.shape != mask.shape:
        raise BadOption("vote", f"{name} must return weights (queries, neighbors), here {tuple(mask.shape)}", tuple(weights.shape))
    if not (weights.masked_fill(~mask, 0) >= 0).all() or weights.isinf().any():
        raise BadOption("vote", f"{name} must return weights that are numbers of at least 0")


class Mixture(Voter):
    """p = lambda p_knn + (1 - lambda) p_linear. `share` is lambda: fixed, or (None) learned on validation rows, from one half."""

    def __init__(self, linear: HeadVoter, knn: NeighborVoter, *, share: float | None = None) -> None:
        super().__init__()
        if share is not None and not 0 <= share <= 1:
            raise BadOption("mix_lambda", "must be between 0 and 1", share)
        self.linear, self.knn, self.learned = linear, knn, share is None
        edge = 1e-6
        start = min(max(0.5 if share is None else share, edge), 1 - edge)
        self.share_logit = nn.Parameter(torch.tensor(math.log(start / (1 - start))), requires_grad=False)

    @property
    def share(self) -> Tensor:
        return self.share_logit.sigmoid()

    def opinion(self, query: Query) -> Tensor:
        return torch.stack([self.linear.opinion(query), self.knn.opinion(query)])  # (2, B, C)

    def settle(self, opinion: Tensor, facts: Facts) -> Tensor:
        linear = self.linear.settle(opinion[0], facts)
        knn = self.knn.settle(opinion[1], facts)
        mixed = torch.logaddexp(knn + F.logsigmoid(self.share_logit), linear + F.logsigmoid(-self.share_logit))
        return self.tempered(mixed)

    def confidence(self) -> list[nn.Parameter]:
        parts = [*self.linear.confidence(), *self.knn.confidence()]
        return [*parts, self.share_logit] if self.learned else parts

    def attention(self) -> list[nn.Parameter]:
        return self.knn.attention()

    def fitted_to(self, rows: int) -> None:
        self.knn.fitted_to(rows)
