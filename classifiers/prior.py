"""The prior: what is mixed into a vote, because k neighbors are few."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from classifiers.retrieved import Context
from layers.functional import full_precision
from utils import BadOption

CLASS_MEAN_WEIGHT = 5.0  # at the start: a class whose mean lies at a cosine of 1 weighs e^5 times one at a cosine of 0


class Prior(nn.Module):
    """A learned distribution over the classes as a share of a vote: k neighbors of one class are no proof that the others are impossible.

    The share of the prior is a learned constant, or a learned function of the distance to the nearest neighbor, of the mean
    distance, and of the entropy of the vote: a vote of near neighbors that agree needs less of it. The prior itself is made of
    learned frequencies of the classes, times exp(class-mean weight x cosine of the query with the mean embedding of the class): a
    shirt that has only shirts around it may be a coat, hardly a boot.
    """

    BOUND = 12.0  # of the share's logit: the share stays between 6e-6 and 1 - 6e-6

    def __init__(self, num_classes: int, *, constant: bool = False, share: float = 0.05, hidden: int = 16) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise BadOption("share", "of the prior must be above 0 and below 1", share)
        self.class_logits = nn.Parameter(torch.zeros(num_classes))
        self.share_logit = nn.Parameter(torch.tensor(math.log(share / (1 - share))))
        self.class_mean_weight = nn.Parameter(torch.tensor(CLASS_MEAN_WEIGHT))
        self.least: Tensor
        self.register_buffer("least", torch.tensor(0.0))  # share that no fit goes below
        self.net: nn.Sequential | None = None
        if not constant:
            last = nn.Linear(hidden, 1, bias=False)
            nn.init.normal_(last.weight, std=0.02)
            self.net = nn.Sequential(nn.Linear(3, hidden), nn.GELU(), last)

    def start_from(self, labels: Tensor) -> None:
        """The prior becomes the class frequencies (with one row more for each class)."""
        counts = labels.bincount(minlength=len(self.class_logits)).to(self.class_logits) + 1
        with torch.no_grad():
            self.class_logits.copy_((counts / counts.sum()).log())

    def share(self, probs: Tensor, context: Context) -> Tensor:
        """The part of the probabilities that the prior contributes, (B, 1): all of it for a query without neighbors."""
        logit = self.share_logit.expand(len(probs), 1)
        if self.net is not None:
            # NOTE: detached. The share reads the vote; it must not teach the embedder to look sure.
            entropy = torch.special.entr(full_precision(probs.detach())).sum(1)
            logit = logit + full_precision(self.net(torch.stack([*context.nearness, entropy], 1)))
        share = self.least + (1 - self.least) * logit.clamp(-self.BOUND, self.BOUND).sigmoid()
        return torch.where(context.has_neighbors, share, 1.0)

    def fitted_to(self, rows: int) -> None:
        """Rows without an error don't show that errors never happen: Laplace's rule of succession bounds the share from below."""
        self.least.fill_(1 / (rows + 2))

    def forward(self, probs: Tensor, context: Context) -> Tensor:
        """(B, C) probabilities of a vote to (B, C) probabilities above 0."""
        share = self.share(probs, context)
        logits = full_precision(self.class_logits)
        if context.class_cosines is not None:
            logits = logits + self.class_mean_weight * full_precision(context.class_cosines.detach())
        return (1 - share) * probs + share * logits.softmax(-1)
