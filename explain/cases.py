"""Queries with their neighbors and votes, out of a run: whose weights these are, and what each predictor makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from classifiers.neighbor_heads import NeighborHead
from classifiers.retrieved import BLOCK, Block, Retrieved
from explain.subject import Picked
from inputs.rows import Batch
from run.loaded import Loaded
from run.prepare import prepare_loaded
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


def read_votes(loaded: Loaded, named: str) -> Votes:
    """Those of a run, over the bank that it was evaluated with."""
    if loaded.baseline_bank is None and not isinstance(loaded.model.head, NeighborHead):
        rule = "must hold a bank: of a head that looks at neighbors, or of a finished run with baselines (--baselines)"
        raise BadOption("checkpoint", rule, named)
    if not loaded.has_run_rows:  # the bank knows its rows by their numbers
        raise BadOption("checkpoint", "needs the rows that the run was trained on, and the data set has changed since", named)
    return Votes(loaded)


class Votes:
    """The classifier's answer, and the vote over neighbors that it is made of, or that stands beside it."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.evaluator = loaded, prepare_loaded(loaded)
        predictors, retriever = self.evaluator.predictors, self.evaluator.retriever
        assert retriever is not None
        assert retriever.bank is not None
        self.calibrated = loaded.model.calibrated is not None
        own = loaded.model.predictor()
        vote = own.vote_part or predictors.of("attention", calibrated=self.calibrated).vote_part
        uniform = predictors.of("uniform", calibrated=False).vote_part
        assert vote is not None
        assert uniform is not None
        self.own, self.vote, self.uniform = own.eval(), vote.eval(), uniform.eval()
        self.k, self.bank, self.own_name = retriever.k, retriever.bank, predictors.own
        self.classes, self.target = loaded.data.classes, self.evaluator.sets.test.target  # target: of the test rows

    @property
    def name(self) -> str:
        return self.vote.name

    def notes(self) -> list[str]:
        """What a reader has to know of the weights and of the prediction."""
        head, k, own, vote = self.loaded.config.head.head, self.k, self.own, self.vote
        notes = [f"{head}: {self.name} weighs the {k} nearest of {len(self.bank):,} training rows ({self.bank.dim} dimensions)"]
        how = "calibrated on the validation rows" if self.calibrated else "as trained"
        if own.vote_part is None:
            notes += [f"the prediction is the {head} head's alone, {how}; the votes over its features have no part in it"]
        elif own.vote_share is not None:
            notes += [f"the prediction is {own.vote_share:.0%} of the neighbors' vote and {1 - own.vote_share:.0%} of linear's, {how}"]
        else:
            prior = "a prior's share and " if vote.prior is not None else ""
            notes += [f"the prediction is the {self.name} vote with {prior}a temperature, {how}"]
        if vote.ensemble:
            notes += [f"votes are the mean of those of the nearest {', '.join(map(str, vote.ensemble))}; weights are those among {k}"]
        if vote.adaptive:
            notes += ["adaptive k: of each query's neighbors, only the exp(entropy of the weights) heaviest count"]
        if vote.values is not None:
            notes += ["values are learned: what a neighbor contributes follows from its label and from where it lies"]
        if (views := self.loaded.config.evaluation.tta) > 1:
            notes += [f"images are seen in one view; the run's scores are of {views}"]
        if noise := self.loaded.data.summary["label_noise_rate"]:
            notes += [f"neighbors have the labels that the run was told; {noise:.0%} of them were changed (--label_noise)"]
        return notes

    # ------------------------------------------------ queries

    def retrieve_test(self) -> Retrieved:
        return self.evaluator.retrieve(self.evaluator.sets.test)

    @torch.no_grad()
    def retrieve_image(self, picked: Picked) -> Retrieved:
        """An image of one's own as a query."""
        nobody = picked.x.new_zeros(1, dtype=torch.long)
        features = self.loaded.model.features(Batch(picked.x, nobody, nobody))
        assert self.evaluator.retriever is not None
        return self.evaluator.retriever.retrieve(features)

    def predict(self, retrieved: Retrieved) -> Tensor:
        """The classifier's probabilities, (N, C)."""
        return self.loaded.model.log_probs(retrieved).exp()

    # ------------------------------------------------ what is made of them

    @torch.no_grad()
    def votes(self, block: Block, weights: Tensor, prediction: Tensor) -> dict[str, Tensor]:
        """By name, probabilities (N, C)."""
        votes = {self.name: self.vote.count(weights, block)}
        if self.name != "uniform":
            votes["uniform"] = self.uniform.scores(block)
        if self.own.vote_share is not None and self.own.linear_part is not None:
            votes["linear"] = self.own.linear_part(block).exp()
        return votes | {"prediction": prediction}

    @torch.no_grad()
    def cases(
        self, retrieved: Retrieved, titles: Sequence[str], rows: Sequence[int | None], truth: Sequence[int | None], shown: int
    ) -> list[Case]:
        """A few queries in full; `shown` neighbors of each will be seen."""
        block, prediction = retrieved.block(slice(None)), self.predict(retrieved)
        near, weights = block.neighbors, self.vote.weights(block)
        votes = self.votes(block, weights, prediction)
        # Stable: of equal weights the nearer comes first.
        order = weights.masked_fill(~near.mask, -1).argsort(dim=1, descending=True, stable=True)
        found = []
        for i, true in enumerate(truth):
            parts = (part[i, order[i]].tolist() for part in (near.index, near.label, weights, near.distance))
            present = [four for four in zip(*parts, strict=True) if four[0] >= 0]
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
                        for n, label, weight, distance in present
                    ],
                    votes={name: [short(p) for p in vote.tolist()] for name, vote in of_classes.items()},
                    bars=worth_a_bar(torch.stack(list(of_classes.values())), true, [label for _, label, _, _ in present[:shown]]),
                )
            )
        return found

    @torch.no_grad()
    def tally(self, retrieved: Retrieved, target: Tensor, predicted: Tensor) -> dict[str, Tensor]:
        """Of each row: its neighbors, how many are of its true and of its predicted class, what weight the true class has, and the
        number of effective neighbors, exp(entropy of the weights)."""
        found: dict[str, list[Tensor]] = {name: [] for name in ("neighbors", "true", "predicted", "weight", "nearest", "effective")}
        for block, truth, guess in zip(retrieved.blocks(), target.split(BLOCK), predicted.split(BLOCK), strict=True):
            near = block.neighbors
            true = (near.label == truth[:, None]) & near.mask
            found["neighbors"].append(near.mask.sum(1))
            found["true"].append(true.sum(1))
            found["predicted"].append(((near.label == guess[:, None]) & near.mask).sum(1))
            weights = self.vote.weights(block)
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
