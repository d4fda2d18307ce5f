"""What a trained model is worth: its head beside the baselines on the same neighbors, before and after calibration.

The evaluator is handed all that it judges and builds nothing. The test split is looked at here, once: features are computed once for
each view of a row, and everything else reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from classifiers.classifier import Classifier
from classifiers.metrics import confusion_matrix, detailed_metrics, judged, standard_metrics
from classifiers.neighbor_heads import NeighborHead
from classifiers.retrieved import Retrieved
from config import EvaluationOptions
from evaluation.baselines import Predictors, averaged
from evaluation.continual import Growth, predict_while_growing
from evaluation.ood import detection
from evaluation.results import MOST_CONFUSED
from inputs.batches import AnyBatches, Sets
from utils import whole_numbers

LEFT_OUT = 10_000  # training rows, evenly spaced, that are classified without themselves


@dataclass(frozen=True)
class Elsewhere:
    """Which rows each vote has right, by its name: training rows without themselves among their neighbors, and validation rows."""

    left_out: dict[str, Tensor]
    validation: dict[str, Tensor]
    rows: int = 0  # training rows that were classified without themselves


class Looked(NamedTuple):
    """Test rows with their neighbors, in each view, the rows of another data set, and training rows without themselves."""

    views: list[Retrieved]
    foreign: Retrieved | None
    left_out: tuple[Retrieved, Tensor] | None


@dataclass
class Evaluator:
    """A classifier and its baselines, on the rows of a run.

    `retriever` finds the neighbors: the classifier's head, or one over its features for the baselines; None where there is no vote.
    `foreign`: rows of another data set, for --ood. `growth`: what bounds the bank that test rows join, for --continual.
    """

    classifier: Classifier
    predictors: Predictors
    retriever: NeighborHead | None
    sets: Sets
    options: EvaluationOptions
    foreign: AnyBatches | None = None
    growth: Growth | None = None
    _looked: Looked | None = None
    _validation: Retrieved | None = None  # looked up once
    _elsewhere: Elsewhere | None = None

    def retrieve(self, rows: Any, k: int | None = None) -> Retrieved:
        features = self.classifier.of_rows(rows)
        with torch.no_grad():
            return (self.retriever or self.classifier.head).retrieve(features, k)

    def evaluate(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """The scores of the test split, of the classifier (as trained: test, calibrated: test_calibrated) and of every predictor;
        and the log-probabilities that they are made of, by variant and predictor."""
        retriever, target, ks = self.retriever, self.sets.test.target, self.ks
        views = self.look().views
        plain = views[0]
        if retriever is not None:
            views = [view.nearest(retriever.k) for view in views]
        variants = self.variants(views)
        of_own = {v: scores(variants[v][self.predictors.own], target) for v in variants}
        views_of = "_tta" if len(views) > 1 else ""
        answer = [v for v in (f"raw{views_of}", f"calibrated{views_of}") if v in variants]
        predicted = variants[answer[0]][self.predictors.own].argmax(1)
        found: dict[str, Any] = {
            **dict(zip(("test", "test_calibrated"), (of_own[v] for v in answer), strict=False)),
            "test_variants": of_own,
        }
        if (classes := self.classifier.num_classes) <= MOST_CONFUSED:
            found["confusion"] = confusion_matrix(predicted, target, classes).tolist()
        if retriever is not None:
            of_each = {n: {v: scores(variants[v][n], target) for v in variants} for n in self.predictors.names}
            found["predictors"] = {**self.circumstances(views[0]), **self.with_leave_one_out(of_each)}
            if len(ks) > 1:
                sweeps = {v: self.predictors.by_k(plain, ks, calibrated=v == "calibrated") for v in ("raw", "calibrated") if v in variants}
                found["predictors"]["by_k"] = {v: by_name(of_k, target) for v, of_k in sweeps.items()}
                variants |= {f"{v}.k{k}": of_name for v, of_k in sweeps.items() for k, of_name in of_k.items()}
            if self.foreign is not None:
                found["ood"] = self.out_of_distribution(views[0], variants[answer[-1].removesuffix("_tta")][self.predictors.own])
            if self.growth is not None:
                found["continual"], variants["continual"] = self.continual(views[0], self.growth, target)
        return found, variants

    @property
    def ks(self) -> list[int]:
        """Numbers of neighbors that were asked for."""
        return sorted({*whole_numbers("k_eval", self.options.k_eval), *whole_numbers("k_ensemble", self.options.k_ensemble)})

    def look(self) -> Looked:
        """Everything with its neighbors, once: what several processes do together. What is made of it, each can do alone."""
        if self._looked is None:
            retriever = self.retriever
            k = max([*self.ks, retriever.k]) if retriever else None  # all k from one search
            views = [self.retrieve(self.sets.test.seen_as(view), k) for view in range(self.options.tta)]
            foreign = self.retrieve(self.foreign) if retriever and self.foreign else None
            self._looked = Looked(views, foreign, leave_one_out(retriever) if retriever else None)
            if self.sets.val is not None:
                self.validation()
        return self._looked

    def validation(self) -> Retrieved:
        """The validation rows."""
        assert self.sets.val is not None
        if self._validation is None:
            self._validation = self.retrieve(self.sets.val)
        return self._validation

    def validate(self) -> dict[str, Tensor]:
        """Log-probabilities of the validation rows by variant: as trained and, where there is a calibration, after it. It was fitted to
        these rows."""
        if self.sets.val is None:
            return {}
        found = {"raw": self.classifier.log_probs(self.validation(), calibrated=False)}
        return found | ({} if self.classifier.calibrated is None else {"calibrated": self.classifier.log_probs(self.validation())})

    def out_of_distribution(self, test: Retrieved, log_probs: Tensor) -> dict[str, Any]:
        foreign = self.look().foreign
        assert foreign is not None
        assert self.foreign is not None
        unsure = self.classifier.log_probs(foreign)
        names = {"dataset": self.foreign.data.name, "predictor": self.predictors.own}
        return names | detection(test, foreign, log_probs, unsure)

    def continual(self, test: Retrieved, growth: Growth, target: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The best known predictor over the neighbors (the head's own, else the attention), with the bank as it is and growing."""
        assert self.retriever is not None
        name = self.predictors.own if self.classifier.head.wants_bank else "attention"
        vote = self.predictors.of(name, calibrated=self.predictors.mode != "none")
        grown, sizes = predict_while_growing(vote, self.retriever, growth, test.features, target)
        return {"predictor": name, "before": scores(vote.predict(test), target), "after": scores(grown, target), **sizes}, {name: grown}

    def variants(self, views: list[Retrieved]) -> dict[str, dict[str, Tensor]]:
        """Log-probabilities of each predictor as trained and calibrated, of the rows as they are and averaged over views."""
        names = ("raw", "calibrated")[: 1 + (self.predictors.mode != "none")]
        of_views = {name: [self.log_probs(view, calibrated=name == "calibrated") for view in views] for name in names}
        found = {name: of_views[name][0] for name in names}
        if len(views) > 1:
            for name, several in of_views.items():
                found[f"{name}_tta"] = {predictor: averaged([of[predictor] for of in several]) for predictor in several[0]}
        return found

    def log_probs(self, retrieved: Retrieved, *, calibrated: bool) -> dict[str, Tensor]:
        """Of the classifier and of each baseline, (N, C)."""
        found = {}
        for name in self.predictors.names:
            answers = self.classifier.log_probs if name == self.predictors.own else partial(self.predictors.log_probs, name)
            found[name] = answers(retrieved, calibrated=calibrated)
        return found

    def circumstances(self, retrieved: Retrieved) -> dict[str, Any]:
        """What the predictions rest on."""
        retriever, predictors = self.retriever, self.predictors
        assert retriever is not None
        assert retriever.bank is not None
        raw = {name: predictors.of(name, calibrated=False) for name in predictors.names}
        own = predictors.of(predictors.own, calibrated=predictors.mode != "none")
        found = {"k": retriever.k, "ensemble": list(retriever.ensemble), "bank": len(retriever.bank), "calibration": predictors.mode}
        found["without_prior"] = [name for name, p in raw.items() if p is p.vote_part and p.vote_part.prior is None]
        found["trained_afterwards"] = [name for name in raw if name == "attention" and not self.classifier.head.learned]
        if own.vote_share is not None:
            found["vote_share"] = own.vote_share
        if retriever.adaptive_k:
            votes = {name: predictor.vote_part for name, predictor in raw.items()}
            found["neighbors"] = {name: vote.neighbors_with_weight(retrieved) if vote else 0.0 for name, vote in votes.items()}
        return found

    def with_leave_one_out(self, of_each: dict[str, Any]) -> dict[str, Any]:
        """With the accuracy of each vote over training rows that are not their own neighbors, and beside it over validation rows."""
        elsewhere = self.elsewhere()
        for key, of_name in {"train_leave_one_out": elsewhere.left_out, "val_accuracy": elsewhere.validation}.items():
            for name, right in of_name.items():
                of_each[name][key] = right.double().mean().item()
        return {"scores": of_each, "left_out_rows": elsewhere.rows}

    def elsewhere(self) -> Elsewhere:
        """Which rows that are not test rows each vote, as trained, has right; computed once."""
        left_out = self.look().left_out
        if left_out is None:
            return Elsewhere({}, {})
        if self._elsewhere is None:
            retrieved, labels = left_out
            self._elsewhere = found = Elsewhere({}, {}, len(labels))
            for name in self.predictors.names:
                predictor = self.predictors.of(name, calibrated=False)
                if predictor.linear_part is None:  # a linear head has learned these rows
                    found.left_out[name] = predictor.predict(retrieved).argmax(1) == labels
                    if self.sets.val is not None:
                        found.validation[name] = predictor.predict(self.validation()).argmax(1) == self.sets.val.target
        return self._elsewhere


def leave_one_out(retriever: NeighborHead) -> tuple[Retrieved, Tensor]:
    """Training rows with their neighbors, themselves excluded, and their labels."""
    bank = retriever.bank
    assert bank is not None
    some = torch.linspace(0, len(bank) - 1, min(len(bank), LEFT_OUT)).round().long()
    device = retriever.vote.log_temperature.device
    return retriever.leave_one_out(bank.ids[some].to(device)), bank.labels[some].to(device)


def by_name(of_k: dict[int, dict[str, Tensor]], target: Tensor) -> dict[str, dict[int, dict[str, float]]]:
    """Scores of each predictor for each k."""
    return {name: {k: standard_metrics(of_name[name], target) for k, of_name in of_k.items()} for name in next(iter(of_k.values()))}


def scores(log_probs: Tensor, target: Tensor) -> dict[str, float]:
    of = judged(log_probs, target)
    return standard_metrics(log_probs, target, of) | detailed_metrics(log_probs, target, of)
