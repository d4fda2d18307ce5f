"""Predictors: retrieved rows to class probabilities.

A predictor works in two steps. Its *scores* are costly and look at the neighbors; `log_probs(scores, context)` is cheap and sets the
confidence (temperatures, prior, the share in an interpolation). Calibration computes scores once and fits the second step to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classifiers.neighbor_attention import NeighborAttention, masked_softmax
from classifiers.prior import Prior
from classifiers.retrieved import Block, Context, Retrieved
from classifiers.values import TabrValues
from classifiers.weights import LEAST, check_weights, class_probabilities, heaviest, log_probabilities
from utils import BadOption


class Predictor(nn.Module):
    """`log_probs(scores(block), block.context)` gives log-probabilities (B, C).

    `vote_part` is its part that looks at neighbors, `linear_part` the one that looks at features alone; an interpolation has both.
    """

    def __init__(self) -> None:
        super().__init__()
        # Not trained: training rows are purer than others, and would teach it to be too sure. Calibration fits it.
        self.log_temperature = nn.Parameter(torch.zeros(()), requires_grad=False)

    @property
    def vote_part(self) -> Vote | None:
        return None

    @property
    def linear_part(self) -> HeadPredictor | None:
        return None

    @property
    def vote_share(self) -> float | None:
        """The share of the vote, where a linear head has the rest."""
        return None

    def scores(self, block: Block) -> Tensor:
        raise NotImplementedError

    def log_probs(self, scores: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def forward(self, block: Block) -> Tensor:
        return self.log_probs(self.scores(block), block.context)

    @torch.no_grad()
    def all_scores(self, retrieved: Retrieved) -> Tensor:
        """Of many rows, in evaluation: (N, C), or (2, N, C) of an interpolation."""
        self.eval()
        return torch.cat([self.scores(block) for block in retrieved.blocks()], -2)

    @torch.no_grad()
    def predict(self, retrieved: Retrieved) -> Tensor:
        """Log-probabilities of many rows, (N, C)."""
        return self.log_probs(self.all_scores(retrieved), retrieved.context)

    def confidence(self) -> list[nn.Parameter]:
        """What sets the confidence and nothing else."""
        return [self.log_temperature]

    def attention(self) -> list[nn.Parameter]:
        """What the last step of calibration may change of the scores."""
        return []

    def fitted_to(self, rows: int) -> None:
        """How many rows its confidence is fitted to."""

    def tempered(self, log_probs: Tensor) -> Tensor:
        return F.log_softmax(log_probs * (-self.log_temperature).exp(), 1)


class HeadPredictor(Predictor):
    """A head that looks at features alone, such as the linear one.

    Its confidence is a temperature and a bias a class: votes have a prior over the classes, and a rival without one would be none.
    """

    def __init__(self, head: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.head = head
        self.class_bias = nn.Parameter(torch.zeros(num_classes), requires_grad=False)

    @property
    def linear_part(self) -> HeadPredictor:
        return self

    def scores(self, block: Block) -> Tensor:
        log_probs: Tensor = self.head(block.features)
        return log_probs

    def log_probs(self, scores: Tensor, context: Context) -> Tensor:
        return F.log_softmax(scores * (-self.log_temperature).exp() + self.class_bias, 1)

    def confidence(self) -> list[nn.Parameter]:
        return [self.log_temperature, self.class_bias]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.setdefault(f"{prefix}class_bias", torch.zeros_like(self.class_bias))  # it was calibrated before there were any
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Vote(Predictor):
    """Neighbors, weighed by a function of `WEIGHTS` or by NeighborAttention, vote for their labels; a prior has a share beside them.

    `ensemble`: the mean of the votes of the first k for each k. `adaptive`: only the exp(entropy) heaviest neighbors count.
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
        self.log_vote_temperature = nn.Parameter(torch.zeros(()), requires_grad=False)

    @property
    def vote_part(self) -> Vote:
        return self

    def weights(self, block: Block) -> Tensor:
        """How much each neighbor counts, (B, K)."""
        near = block.neighbors
        weights: Tensor = self.weigh(block.embedding, near.embedding, near.distance, near.label, near.mask)
        if not isinstance(self.weigh, nn.Module):
            check_weights(self.name, weights, near.mask)
        return heaviest(weights, near.mask) if self.adaptive and not self.training else weights

    @torch.no_grad()
    def neighbors_with_weight(self, retrieved: Retrieved) -> float:
        """How many neighbors count, as a mean over the queries."""
        self.eval()
        return torch.cat([(self.weights(block) > 0).sum(1) for block in retrieved.blocks()]).double().mean().item()

    def scores(self, block: Block) -> Tensor:
        return self.count(self.weights(block), block)

    def count(self, weights: Tensor, block: Block) -> Tensor:
        """Weights (B, K) to probabilities (B, C)."""
        near, width = block.neighbors, weights.shape[1]
        ks = [width] if self.training or not self.ensemble else list(self.ensemble)
        if self.values is None:
            return class_probabilities(weights, near.label, self.num_classes, ks, near.mask).mean(0)
        project = self.weigh.k_proj if isinstance(self.weigh, NeighborAttention) else nn.Identity()
        key, keys = project(block.embedding), project(near.embedding.to(block.embedding))
        of_k = []
        for k in ks:  # few
            present = near.mask & (torch.arange(width, device=weights.device) < k)
            renormalized = masked_softmax(weights.clamp_min(1e-30).log(), present)
            of_k.append(self.values(renormalized, block.embedding, key, keys, near.label, present))
        return torch.stack(of_k).mean(0)

    def log_probs(self, scores: Tensor, context: Context) -> Tensor:
        if self.prior is not None:
            sharp = F.softmax(scores.clamp_min(LEAST).log() * (-self.log_vote_temperature).exp(), 1)
            scores = self.prior(sharp, context)
        return self.tempered(log_probabilities(scores))

    def confidence(self) -> list[nn.Parameter]:
        return [self.log_temperature] if self.prior is None else [self.log_vote_temperature, *self.prior.parameters()]

    def fitted_to(self, rows: int) -> None:
        if self.prior is not None:
            self.prior.fitted_to(rows)

    def attention(self) -> list[nn.Parameter]:
        modules = [m for m in (self.weigh, self.values) if isinstance(m, nn.Module)]
        return [p for module in modules for p in module.parameters()]


class Interpolation(Predictor):
    """p = lambda p_vote + (1 - lambda) p_linear, as in kNN-LM (arXiv 1911.00172).

    `share` is lambda: fixed, or (None) fitted on validation rows, from one half.
    """

    def __init__(self, linear: HeadPredictor, vote: Vote, *, share: float | None = None) -> None:
        super().__init__()
        if share is not None and not 0 <= share <= 1:
            raise BadOption("interpolation", "must be between 0 and 1", share)
        self.linear, self.vote, self.fits_share = linear, vote, share is None
        edge = 1e-6
        start = min(max(0.5 if share is None else share, edge), 1 - edge)
        self.share_logit = nn.Parameter(torch.tensor(math.log(start / (1 - start))), requires_grad=False)

    @property
    def vote_part(self) -> Vote:
        return self.vote

    @property
    def linear_part(self) -> HeadPredictor:
        return self.linear

    @property
    def vote_share(self) -> float:
        return self.share_logit.sigmoid().item()

    def scores(self, block: Block) -> Tensor:
        return torch.stack([self.linear.scores(block), self.vote.scores(block)])  # (2, B, C)

    def log_probs(self, scores: Tensor, context: Context) -> Tensor:
        linear = self.linear.log_probs(scores[0], context)
        vote = self.vote.log_probs(scores[1], context)
        both = torch.logaddexp(vote + F.logsigmoid(self.share_logit), linear + F.logsigmoid(-self.share_logit))
        return self.tempered(both)

    def confidence(self) -> list[nn.Parameter]:
        parts = [*self.linear.confidence(), *self.vote.confidence()]
        return [*parts, self.share_logit] if self.fits_share else parts

    def attention(self) -> list[nn.Parameter]:
        return self.vote.attention()

    def fitted_to(self, rows: int) -> None:
        self.vote.fitted_to(rows)
