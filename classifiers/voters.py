"""Voters: a query and its neighbors to log-probabilities.

A voter has two parts. Its *opinion* is costly and looks at the neighbors; what it *settles* on is cheap and sets the confidence
(temperature, prior, the share of a mixture). Calibration fits the second to many opinions that were asked for once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classifiers.bank import Bank, Neighbors
from classifiers.neighbor_attention import NeighborAttention, masked_softmax
from classifiers.values import TabrValues
from classifiers.votes import Prior, adaptive, log_probabilities, probabilities_at
from utils import BadOption

BLOCK = 1024  # queries whose neighbors' embeddings are held at once
NOBODY = Neighbors(*(torch.empty(0, 0) for _ in range(5)))


@dataclass(frozen=True)
class Query:
    """Rows to be classified, and who their neighbors are."""

    features: Tensor  # (B, F) of the backbone
    embedding: Tensor  # (B, D)
    neighbors: Neighbors


@dataclass(frozen=True)
class Questions:
    """Many queries. Which neighbors they have is known; the neighbors' embeddings are taken from the bank when they are needed."""

    features: Tensor  # (N, F)
    embedding: Tensor  # (N, D)
    distance: Tensor  # (N, K) squared
    index: Tensor  # (N, K) ids
    bank: Bank | None  # None: nobody asks for neighbors

    def __len__(self) -> int:
        return len(self.features)

    def at(self, rows: Any) -> Query:
        """Some rows, by a slice or by their numbers."""
        if self.bank is None:
            return Query(self.features[rows], self.embedding[rows], NOBODY)
        embedding, label, mask = self.bank.take(self.index[rows])
        return Query(self.features[rows], self.embedding[rows], Neighbors(self.distance[rows], self.index[rows], label, embedding, mask))

    def blocks(self) -> Iterator[Query]:
        return (self.at(slice(start, start + BLOCK)) for start in range(0, len(self), BLOCK))

    def top(self, k: int) -> Questions:
        return Questions(self.features, self.embedding, self.distance[:, :k], self.index[:, :k], self.bank)

    @property
    def mask(self) -> Tensor:
        return self.index >= 0


class Voter(nn.Module):
    """`settle(opinion(query), distance, mask)` gives log-probabilities (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        # Not trained: training rows are purer than others, and would teach it to be too sure. Calibration fits it.
        self.log_temperature = nn.Parameter(torch.zeros(()), requires_grad=False)

    def opinion(self, query: Query) -> Tensor:
        raise NotImplementedError

    def settle(self, opinion: Tensor, distance: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, query: Query) -> Tensor:
        return self.settle(self.opinion(query), query.neighbors.distance, query.neighbors.mask)

    def confidence(self) -> list[nn.Parameter]:
        """What sets the confidence and nothing else."""
        return [self.log_temperature]

    def attention(self) -> list[nn.Parameter]:
        """What a short final fit may change of the opinion."""
        return []

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

    def settle(self, opinion: Tensor, distance: Tensor, mask: Tensor) -> Tensor:
        return self.tempered(opinion)


class NeighborVoter(Voter):
    """Neighbors weighed by a function of `VOTES` or by NeighborAttention, each for its label; a prior for what none of them is.

    `ensemble`: the mean of the votes of the first k for each k. `adaptive`: as many neighbors as the attention speaks of.
    """

    def __init__(
        self,
        weigh: Any,
        num_classes: int,
        *,
        prior: Prior | None = None,
        values: TabrValues | None = None,
        ensemble: Sequence[int] = (),
        adaptive: bool = False,
    ) -> None:
        super().__init__()
        self.weigh, self.num_classes, self.prior, self.values = weigh, num_classes, prior, values
        self.ensemble, self.adaptive = tuple(ensemble), adaptive

    def weights(self, query: Query) -> Tensor:
        """How much each neighbor has to say, (B, K)."""
        near = query.neighbors
        weights: Tensor = self.weigh(query.embedding, near.embedding, near.distance, near.label, near.mask)
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

    def settle(self, opinion: Tensor, distance: Tensor, mask: Tensor) -> Tensor:
        if self.prior is not None:
            opinion = self.prior(opinion, distance, mask)
        return self.tempered(log_probabilities(opinion))

    def confidence(self) -> list[nn.Parameter]:
        return [self.log_temperature, *(self.prior.parameters() if self.prior is not None else ())]

    def attention(self) -> list[nn.Parameter]:
        modules = [m for m in (self.weigh, self.values) if isinstance(m, nn.Module)]
        return [p for module in modules for p in module.parameters()]


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

    def settle(self, opinion: Tensor, distance: Tensor, mask: Tensor) -> Tensor:
        linear = self.linear.settle(opinion[0], distance, mask)
        knn = self.knn.settle(opinion[1], distance, mask)
        mixed = torch.logaddexp(knn + F.logsigmoid(self.share_logit), linear + F.logsigmoid(-self.share_logit))
        return self.tempered(mixed)

    def confidence(self) -> list[nn.Parameter]:
        parts = [*self.linear.confidence(), *self.knn.confidence()]
        return [*parts, self.share_logit] if self.learned else parts

    def attention(self) -> list[nn.Parameter]:
        return self.knn.attention()
