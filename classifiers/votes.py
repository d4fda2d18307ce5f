"""Votes: neighbors to class probabilities.

A vote without parameters is called like `NeighborAttention`: (query, neighbors, sq_distance, labels, mask) to weights (B, K).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from classifiers.neighbor_attention import masked_softmax
from utils import BadOption, Registry

Vote = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
VOTES: Registry[Vote] = Registry("vote", "vote")
LEAST = 1e-20  # weight of a neighbor that is there: it decides only where all weights round to 0
DINO_TEMPERATURE = 0.07
TILT = 5.0  # of the prior to the classes near the query, at the start: a cosine of 1 weighs e^5 times a cosine of 0


# ---------------------------------------------------------------- weights


@VOTES.register("uniform")
def uniform(query: Tensor, neighbors: Tensor, sq_distance: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Every neighbor has the same say."""
    return masked_softmax(torch.zeros_like(sq_distance), mask)


@VOTES.register("distance")
def inverse_distance(query: Tensor, neighbors: Tensor, sq_distance: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """One over the distance; neighbors at distance 0 have all the say (scikit-learn's weights="distance")."""
    squared = sq_distance.float().clamp_min(0)
    there = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    zero = squared == 0
    safe = squared.masked_fill(zero | ~there, 1)
    nearest = squared.masked_fill(~there, math.inf).amin(1, keepdim=True)  # (B, 1)
    # NOTE: relative to the nearest, nothing overflows; clamped before the root, whose gradient at 0 is infinite.
    relative = (nearest.masked_fill(nearest.isinf(), 1) / safe).masked_fill(zero, 1).clamp_min(1e-14).sqrt() * there
    return relative / relative.sum(1, keepdim=True).clamp_min(LEAST)


@VOTES.register("softmax-cosine")
def softmax_cosine(
    query: Tensor,
    neighbors: Tensor,
    sq_distance: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = DINO_TEMPERATURE,
) -> Tensor:
    """Softmax of the cosine over a temperature (DINO: 0.07, with k = 20)."""
    neighbors = neighbors if mask is None else neighbors.masked_fill(~mask[..., None], 0)
    cosine = nn.functional.cosine_similarity(query.float()[:, None], neighbors.float(), dim=2)
    return masked_softmax(cosine / temperature, mask)


# ---------------------------------------------------------------- probabilities


def probabilities(weights: Tensor, labels: Tensor, num_classes: int, mask: Tensor | None = None) -> Tensor:
    """(B, K) weights and labels to (B, C) probabilities that sum to 1. A query without neighbors knows nothing: 1/C each."""
    return probabilities_at(weights, labels, num_classes, [weights.shape[1]], mask)[0]


def probabilities_at(weights: Tensor, labels: Tensor, num_classes: int, ks: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """The votes of the first k neighbors for each k, (len(ks), B, C), from the weights of all: one pass over the neighbors."""
    width = weights.shape[1]
    for k in ks:
        if not 1 <= k <= width:
            raise BadOption("k", f"must be from 1 to the number of neighbors ({width})", k)
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    labels = labels.masked_fill(~mask, 0)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise BadOption("labels", f"of neighbors must be from 0 to {num_classes - 1}", int(labels.max()))
    weights = (weights.float().masked_fill(~mask, 0) + LEAST) * mask
    votes = weights.new_zeros(len(weights), num_classes)
    done, found = 0, {}
    for k in sorted(set(ks)):
        votes = votes.scatter_add(1, labels[:, done:k], weights[:, done:k])  # (B, C)
        # NOTE: renormalized. Weights over all neighbors cut at k do not sum to 1.
        total = votes.sum(1, keepdim=True)
        found[k] = torch.where(total > 0, votes / total.clamp_min(LEAST / 2), 1 / num_classes)
        done = k
    return torch.stack([found[k] for k in ks])


def adaptive(weights: Tensor, mask: Tensor | None = None, *, smallest: int = 1) -> Tensor:
    """Weights (B, K) of as many neighbors as each query's attention speaks of: the exp(entropy) heaviest (rounded up), renormalized.

    Attention that is sure of one neighbor leaves one; attention that is the same for all leaves all.
    """
    weights = weights.float() if mask is None else weights.float().masked_fill(~mask, 0)
    total = weights.sum(1, keepdim=True)
    share = weights / total.clamp_min(LEAST)
    # a little below the next whole number: exp(log K) may round to above K
    count = (torch.special.entr(share.detach()).sum(1, keepdim=True).exp() - 1e-4).ceil().clamp(smallest, weights.shape[1])
    order = share.detach().argsort(dim=1, descending=True, stable=True)  # stable: of equal weights the nearer stays
    place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    share = share * (place < count)
    return share / share.sum(1, keepdim=True).clamp_min(LEAST)


def log_probabilities(probs: Tensor) -> Tensor:
    """Logarithm that is finite at 0 (a vote without a prior has zeros), with finite gradients.

    0 counts as the rounding of float32, as in scikit-learn's log_loss: 15.9 nats. A smaller number would only make the votes
    that have no prior look worse.
    """
    return probs.clamp_min(torch.finfo(torch.float32).eps).log()


# ---------------------------------------------------------------- the prior


class Prior(nn.Module):
    """Mixes a learned distribution over the classes into a vote: k neighbors of one class are no proof that the others are impossible.

    The share of the prior is a learned constant, or a learned function of the distance to the nearest neighbor, of the mean
    distance, and of the entropy of the vote: a vote of near neighbors that agree needs less of it. What it says is learned
    frequencies of the classes, tilted by a learned strength to those whose mean embedding is near the query: a shirt that has
    only shirts around it may be a coat, hardly a boot.
    """

    BOUND = 12.0  # of the share's logit: the share stays between 6e-6 and 1 - 6e-6

    def __init__(self, num_classes: int, *, constant: bool = False, share: float = 0.05, hidden: int = 16) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise BadOption("share", "of the prior must be above 0 and below 1", share)
        self.class_logits = nn.Parameter(torch.zeros(num_classes))
        self.share_logit = nn.Parameter(torch.tensor(math.log(share / (1 - share))))
        self.tilt = nn.Parameter(torch.tensor(TILT))
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

    def share(self, probs: Tensor, sq_distance: Tensor, mask: Tensor | None = None) -> Tensor:
        """What part of the outcome is the prior's, (B, 1): all of it for a query without neighbors."""
        there = torch.ones_like(sq_distance, dtype=torch.bool) if mask is None else mask
        logit = self.share_logit.expand(len(probs), 1)
        if self.net is not None:
            # NOTE: detached. The share reads the vote; it must not teach the embedder to look sure.
            root = sq_distance.detach().float().masked_fill(~there, 0).clamp_min(0).sqrt()  # (B, K)
            nearest = root.masked_fill(~there, math.inf).amin(1)
            nearest = nearest.masked_fill(nearest.isinf(), 0)
            entropy = torch.special.entr(probs.detach().float()).sum(1)
            facts = torch.stack([nearest.log1p(), (root.sum(1) / there.sum(1).clamp_min(1)).log1p(), entropy], 1)
            logit = logit + self.net(facts).float()
        share = self.least + (1 - self.least) * logit.clamp(-self.BOUND, self.BOUND).sigmoid()
        return torch.where(there.any(1, keepdim=True), share, 1.0)

    def fitted_to(self, rows: int) -> None:
        """Rows without an error don't show that errors never happen: Laplace's rule of succession bounds the share from below."""
        self.least.fill_(1 / (rows + 2))

    def forward(self, probs: Tensor, sq_distance: Tensor, mask: Tensor | None = None, means: Tensor | None = None) -> Tensor:
        """(B, C) probabilities of a vote, and its neighbors' squared distances (B, K), to (B, C) probabilities above 0.

        means: cosine of the query with the mean embedding of each class (B, C).
        """
        share = self.share(probs, sq_distance, mask)
        logits = self.class_logits.float() if means is None else self.class_logits.float() + self.tilt * means.detach().float()
        return (1 - share) * probs + share * logits.softmax(-1)
