"""The panel: linear, uniform, distance and attention votes side by side, on the same rows and the same neighbors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from classifiers.calibration import calibrate, opinions
from classifiers.heads import Head
from classifiers.knn import AttnKnnHead, NeighborHead
from classifiers.voters import HeadVoter, Mixture, NeighborVoter, Questions, Voter
from classifiers.votes import VOTES

PLAIN = ("uniform", "distance")  # compared with every head


class Panel(nn.Module):
    """Voters by name, each as it is and (once `calibrate` was called) calibrated. `main` is the head's own.

    Not the head's own modules but copies: the head stays as it was trained.
    """

    def __init__(self, raw: Mapping[str, Voter], main: str, mode: str, asker: NeighborHead | None) -> None:
        super().__init__()
        self.main, self.mode = main, mode
        self.raw = nn.ModuleDict({name: copy.deepcopy(voter) for name, voter in raw.items()})
        self.calibrated = nn.ModuleDict(
            {name: with_prior(voter, asker) if mode == "head" and asker else copy.deepcopy(voter) for name, voter in raw.items()}
        )

    def calibrate(self, questions: Questions, target: Tensor, seed: int) -> None:
        for name, voter in list(self.calibrated.items()):
            assert isinstance(voter, Voter)
            self.calibrated[name] = calibrate(voter, questions, target, self.mode, seed)

    @torch.no_grad()
    def log_probs(self, questions: Questions, *, calibrated: bool) -> dict[str, Tensor]:
        """Of each voter, (N, C)."""
        found = {}
        for name, voter in (self.calibrated if calibrated else self.raw).items():
            assert isinstance(voter, Voter)
            found[name] = voter.settle(opinions(voter, questions), questions.facts)
        return found

    @torch.no_grad()
    def heard(self, name: str, questions: Questions) -> float:
        """How many neighbors a voter listens to, as trained; the mean over the queries."""
        voter = self.raw[name]
        knn = voter.knn if isinstance(voter, Mixture) else voter
        if not isinstance(knn, NeighborVoter):
            return 0.0
        knn.eval()
        return torch.cat([(knn.weights(query) > 0).sum(1) for query in questions.blocks()]).double().mean().item()

    def by_k(self, questions: Questions, ks: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """As trained, with the first k neighbors for each k, all from one search; no mean over several k."""
        single = copy.deepcopy(self)
        for voter in single.raw.modules():
            if isinstance(voter, NeighborVoter):
                voter.ensemble = ()
        return {k: single.log_probs(questions.top(k), calibrated=False) for k in ks}


def averaged(views: Sequence[Tensor]) -> Tensor:
    """Of several views of the same rows, the logarithm of their mean probability."""
    return torch.logsumexp(torch.stack(list(views)), 0) - math.log(len(views))


def with_prior(voter: Voter, head: NeighborHead) -> Voter:
    """A copy whose vote has a prior: the class frequencies of the bank, where it had none."""
    voter = copy.deepcopy(voter)
    knn = voter.knn if isinstance(voter, Mixture) else voter
    if isinstance(knn, NeighborVoter) and knn.prior is None:
        knn.prior = head.new_prior()
        if head.bank is not None:
            knn.prior.start_from(head.bank.labels)
        knn.prior.to(voter.log_temperature.device)
    return voter


def panel_of(head: NeighborHead, num_classes: int, mode: str, attention: NeighborVoter | None = None) -> Panel:
    """The voters to compare with a head that has a bank: its own, its parts, the votes without parameters, and (for a head that
    has none of its own) an attention."""
    knn = head.knn
    own, device = knn.name, knn.log_temperature.device
    options = {"ensemble": head.ensemble, "adaptive": head.adaptive_k}
    plain = {name: NeighborVoter(name, VOTES[name], num_classes, **options).to(device) for name in PLAIN if name != own}  # type: ignore[arg-type]
    voters: dict[str, Voter] = {**plain, own: knn, **({"attention": attention} if attention is not None else {})}
    if isinstance(head.voter, Mixture):
        voters = {"linear": head.voter.linear, **voters, "mixture": head.voter}
    return Panel(voters, "mixture" if isinstance(head.voter, Mixture) else own, mode, head)


def asker_for(num_features: int, num_classes: int, **options: Any) -> AttnKnnHead:
    """Learned votes over rows as they are, brought to unit length: for a head that has no bank, or no attention."""
    heads = next(h for h in (4, 3, 2, 1) if num_features % h == 0)
    return AttnKnnHead(num_features, num_classes, embed_dim=0, attention_heads=heads, contrastive_weight=0.0, **options)


def panel_beside(head: Head, name: str, asker: AttnKnnHead, mode: str) -> Panel:
    """A head without a bank, and the votes over the features of its backbone."""
    others = panel_of(asker, asker.num_classes, mode).raw
    return Panel({name: HeadVoter(head), **others}, name, mode, asker)  # type: ignore[dict-item]
