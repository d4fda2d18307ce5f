"""Queries with their neighbors and votes, out of a run: whose weights these are, and what each predictor makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from classifiers.calibration import opinions
from classifiers.knn import NeighborHead
from classifiers.voters import BLOCK, HeadVoter, Mixture, NeighborVoter, Query, Questions, Voter
from experiments.measuring import Judge
from experiments.run import judge_of
from explain.subject import Picked, Rebuilt, run_folder
from train_eval import autocast
from utils import BadOption

BARS, MOST_CLASSES = 12, 8  # in the chart of a query: the classes times the votes, but for classes that must be there


@dataclass(frozen=True)
class Neighbor:
    row: int  # of the training split
    label: str  # as the bank has it: with --label_noise, what the run was told
    true: bool | None  # the query's class? None: nobody knows that
    weight: float
    squared_distance: float


@dataclass(frozen=True)
class Case:
    """A query, all its neighbors with the heaviest first, and what each vote makes of them."""

    image: str
    row: int | None  # of the test split
    true: str | None
    predicted: str
    probability: float
    neighbors: list[Neighbor]
    votes: dict[str, list[float]]  # by name, a probability for each class; "prediction" is the model's own
    bars: list[int]  # classes worth a bar, the likeliest first


# ---------------------------------------------------------------- who votes


def read_predictors(rebuilt: Rebuilt, named: str) -> Predictors:
    """Those of a run, over the bank that it was evaluated with."""
    if rebuilt.compared is None and not isinstance(rebuilt.model.head, NeighborHead):
        rule = "must hold a bank: of a head that looks at neighbors, or of a finished run whose votes were compared (--compare_votes)"
        raise BadOption("checkpoint", rule, named)
    if rebuilt.data.facts["sha256"] != rebuilt.facts["data"]["sha256"]:  # the bank knows its rows by their numbers
        raise BadOption("checkpoint", "needs the rows that the run was trained on, and the data set has changed since", named)
    return Predictors(judge_of(rebuilt, run_folder(named)))


class Predictors:
    """The predictor whose output counts as the model's, and the vote over neighbors that it makes, or that was compared with it."""

    def __init__(self, judge: Judge) -> None:
        assert judge.asker is not None
        assert judge.asker.bank is not None
        panel = judge.panel
        voters = panel.calibrated if judge.calibrated else panel.raw
        own, uniform = voters[panel.main].eval(), panel.raw["uniform"].eval()
        knn = own.knn if isinstance(own, Mixture) else voters["attention"].eval() if isinstance(own, HeadVoter) else own
        assert isinstance(own, Voter)
        assert isinstance(uniform, NeighborVoter)
        assert isinstance(knn, NeighborVoter)
        self.judge, self.asker, self.bank = judge, judge.asker, judge.asker.bank
        self.own, self.uniform, self.knn = own, uniform, knn
        self.classes, self.target = judge.data.classes, judge.sets.test.target  # target: of the test rows
        self.name, self.main, self.calibrated = knn.name, panel.main, judge.calibrated

    def notes(self) -> list[str]:
        """What a reader has to know of the weights and of the prediction."""
        config, k, own, knn = self.judge.config, self.asker.k, self.own, self.knn
        notes = [f"{config.head}: {self.name} weighs the {k} nearest of {len(self.bank):,} training rows ({self.bank.dim} dimensions)"]
        how = "calibrated on the validation rows" if self.calibrated else "as trained"
        if isinstance(own, HeadVoter):
            notes += [f"the prediction is the {config.head} head's alone, {how}; the votes over its features have no part in it"]
        elif isinstance(own, Mixture):
            notes += [f"the prediction is {float(own.share):.0%} of the neighbors' vote and {1 - float(own.share):.0%} of linear's, {how}"]
        else:
            prior = "a prior mixed in and " if knn.prior is not None else ""
            notes += [f"the prediction is the {self.name} vote with {prior}a temperature, {how}"]
        if knn.ensemble:
            notes += [f"votes are the mean of those of the nearest {', '.join(map(str, knn.ensemble))}; weights are those among {k}"]
        if knn.adaptive:
            notes += ["adaptive k: of each query's neighbors, only as many have weight as its attention speaks of"]
        if knn.values is not None:
            notes += ["values are learned: what a neighbor says follows from its label and from where it lies"]
        if config.tta > 1:
            notes += [f"images are seen in one view; the run's scores are of {config.tta}"]
        if noise := self.judge.data.facts["label_noise_rate"]:
            notes += [f"neighbors have the labels that the run was told; {noise:.0%} of them were changed (--label_noise)"]
        return notes

    # ------------------------------------------------ queries

    def retrieve_test(self) -> Questions:
        return self.judge.ask(self.judge.sets.test)

    @torch.no_grad()
    def retrieve_image(self, picked: Picked) -> Questions:
        """An image of one's own as a query."""
        with autocast(picked.x.device, self.judge.config.use_amp):
            features = self.judge.model.backbone(picked.x).float()
        return self.asker.ask(features)

    @torch.no_grad()
    def predict(self, retrieved: Questions) -> Tensor:
        """The model's own probabilities, (N, C)."""
        return self.own.settle(opinions(self.own, retrieved), retrieved.facts).exp()

    # ------------------------------------------------ what is made of them

    @torch.no_grad()
    def votes(self, query: Query, weights: Tensor, prediction: Tensor) -> dict[str, Tensor]:
        """By name, probabilities (N, C)."""
        votes = {self.name: self.knn.count(weights, query)}
        if self.name != "uniform":
            votes["uniform"] = self.uniform.opinion(query)
        if isinstance(self.own, Mixture):
            linear = self.own.linear
            votes["linear"] = linear.settle(linear.opinion(query), query.facts).exp()
        return votes | {"prediction": prediction}

    @torch.no_grad()
    def cases(
        self, retrieved: Questions, titles: Sequence[str], rows: Sequence[int | None], truth: Sequence[int | None], shown: int
    ) -> list[Case]:
        """A few queries in full; `shown` neighbors of each will be seen."""
        query, prediction = retrieved.at(slice(None)), self.predict(retrieved)
        near, weights = query.neighbors, self.knn.weights(query)
        votes = self.votes(query, weights, prediction)
        # Stable: of equal weights the nearer comes first.
        order = weights.masked_fill(~near.mask, -1).argsort(dim=1, descending=True, stable=True)
        found = []
        for i, true in enumerate(truth):
            parts = (part[i, order[i]].tolist() for part in (near.index, near.label, weights, near.distance))
            there = [four for four in zip(*parts, strict=True) if four[0] >= 0]
            of_classes = {name: vote[i].cpu() for name, vote in votes.items()}
            found.append(
                Case(
                    image=titles[i],
                    row=rows[i],
                    true=None if true is None else self.classes[true],
                    predicted=self.classes[int(prediction[i].argmax())],
                    probability=short(float(prediction[i].max())),
                    neighbors=[
                        Neighbor(n, self.classes[label], None if true is None else label == true, short(weight), short(distance))
                        for n, label, weight, distance in there
                    ],
                    votes={name: [short(p) for p in vote.tolist()] for name, vote in of_classes.items()},
                    bars=worth_a_bar(torch.stack(list(of_classes.values())), true, [label for _, label, _, _ in there[:shown]]),
                )
            )
        return found

    @torch.no_grad()
    def tally(self, retrieved: Questions, target: Tensor, predicted: Tensor) -> dict[str, Tensor]:
        """Of each row: its neighbors, how many are of its true and of its predicted class, what weight the true class has, and the
        number of neighbors that the weights speak of (exp of their entropy)."""
        found: dict[str, list[Tensor]] = {name: [] for name in ("neighbors", "true", "predicted", "weight", "nearest", "effective")}
        for query, truth, guess in zip(retrieved.blocks(), target.split(BLOCK), predicted.split(BLOCK), strict=True):
            near = query.neighbors
            true = (near.label == truth[:, None]) & near.mask
            found["neighbors"].append(near.mask.sum(1))
            found["true"].append(true.sum(1))
            found["predicted"].append(((near.label == guess[:, None]) & near.mask).sum(1))
            weights = self.knn.weights(query)
            found["weight"].append((weights * true).sum(1))
            found["effective"].append(torch.special.entr(weights).sum(1).exp())
            found["nearest"].append(true[:, 0])
        return {name: torch.cat(parts).double() for name, parts in found.items()}


def short(value: float) -> float:
    """The digits that a float32 has."""
    return float(f"{value:.7g}")


def worth_a_bar(votes: Tensor, true: int | None, near: Sequence[int] = ()) -> list[int]:
    """Of (votes, C), the prediction last: the predicted and the true class, those of the neighbors that are seen, the heaviest first,
    and what else any vote thinks likely."""
    prediction, likely = votes[-1], votes.amax(0).argsort(descending=True, stable=True).tolist()
    must = dict.fromkeys([int(prediction.argmax()), *([] if true is None else [true]), *near])
    count = max(BARS // len(votes), min(len(must), MOST_CLASSES))
    chosen = list(must | dict.fromkeys(likely))[:count]
    return sorted(chosen, key=lambda c: (-float(prediction[c]), c))
