"""What a trained model is worth: its head beside the other votes on the same neighbors, before and after calibration, and the cost.

The test split is looked at here, once. Features are computed once for each view of a row; everything else reads them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from classifiers import metrics as six
from classifiers.bank import Bank
from classifiers.calibration import train_attention
from classifiers.embedder import unit
from classifiers.knn import AttnKnnHead, NeighborHead
from classifiers.metrics import auroc, confusion_matrix, detailed
from classifiers.neighbor_attention import NeighborAttention
from classifiers.panel import Panel, asker_for, averaged, panel_beside, panel_of
from classifiers.voters import HeadVoter, Mixture, NeighborVoter, Questions
from config import Config
from dataset import Data
from experiments.building import DEFAULT_K, batches, compares_votes, foreign_rows, ks_of
from experiments.sets import Sets
from models import cost
from train_eval import Classifier, evaluate, features_of, order_in_bank, packed, remember
from utils import git_state, say, versions, whole_numbers

GROWTH = 100  # test rows that join a growing bank at once
LEFT_OUT = 10_000  # training rows, evenly spaced, that are classified without themselves


class Judge:
    """A model's panel of voters over one bank, and how it does."""

    def __init__(self, config: Config, data: Data, model: Classifier, sets: Sets) -> None:
        self.config, self.data, self.model, self.sets = config, data, model, sets
        self.mode = (config.calibrate or "head") if data.val is not None else "none"
        self.asker: NeighborHead | None = None
        self.panel: Panel

    @property
    def calibrated(self) -> bool:
        """Whether the model's own output is the calibrated one: if that was asked for, or the head lives by it."""
        return self.mode != "none" and (self.config.calibrate is not None or self.model.head.wants_bank)

    # ------------------------------------------------ the panel

    def prepare(self, stored: Mapping[str, Tensor] | None, bank: Bank | None, mode: str | None = None) -> None:
        """The panel: as it is stored in a checkpoint, of that mode; or fitted, its attention to training rows, its confidence to
        validation rows."""
        head, config = self.model.head, self.config
        self.mode = mode or self.mode
        torch.manual_seed(config.seed)
        if isinstance(head, NeighborHead):
            self.asker = head
            if head.bank is None:
                remember(self.model, self.sets.train.plain(), config.use_amp)
            assert head.bank is not None
            own = isinstance(head.knn.weigh, NeighborAttention)
            attention = None if own else self.attention_over(head.bank, trained=stored is not None).knn
            self.panel = panel_of(head, self.data.num_classes, self.mode, attention)
        elif self.compares(stored):
            asker = self.asker = self.attention_over(bank or self.bank_of_features(), trained=stored is not None)
            self.panel = panel_beside(head, config.head, asker, self.mode)
        else:
            self.panel = Panel({config.head: HeadVoter(head)}, config.head, self.mode, None)
        self.panel.to(self.sets.test.device)
        if stored is not None:
            self.panel.load_state_dict(dict(stored))
        elif self.mode != "none" and self.sets.val is not None:
            self.panel.calibrate(self.ask(self.sets.val), self.sets.val.target, config.seed)

    def without_calibration(self, reason: str) -> None:
        if self.mode != "none":
            say(f"calibrate: not possible ({reason})")
        self.mode = "none"

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps of it: the bank and all that was fitted."""
        return {"votes": self.panel.state_dict(), **self._compared()[0]}

    def facts(self) -> dict[str, Any]:
        return {"calibrated": self.mode, **self._compared()[1]}

    def _compared(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """The bank of a head that has none."""
        return packed(self.asker.bank if self.asker and self.asker is not self.model.head else None, "compared")

    def evaluation(self) -> tuple[Any, ...]:
        """What the fitted confidence depends on."""
        config = self.config
        k = (config.k_train or DEFAULT_K,)
        ks = whole_numbers("k_eval", config.k_eval)[:1] or k
        return self.mode, whole_numbers("k_ensemble", config.k_ensemble) or ks, bool(config.k_ensemble), config.adaptive_k

    def validate(self) -> dict[str, float] | None:
        """The validation rows as the loop sees them: before calibration."""
        val = self.sets.val
        return evaluate(self.model, val, self.config.use_amp) if val is not None else None

    def serves(self, stored: Mapping[str, Tensor]) -> bool:
        """Whether a stored panel compares what is asked for."""
        return self.model.head.wants_bank or self.config.compare_votes in (None, self.compares(stored))

    def compares(self, stored: Mapping[str, Tensor] | None) -> bool:
        if stored is not None:
            return any(name.startswith("raw.attention.") for name in stored)
        return compares_votes(self.config, self.data)

    def bank_of_features(self) -> Bank:
        train = self.sets.train.plain()
        rows = unit(features_of(self.model, train, self.config.use_amp))
        bank = Bank(rows.shape[1])
        bank.add(rows, train.target)
        return bank

    def attention_over(self, bank: Bank, *, trained: bool) -> AttnKnnHead:
        """An attention over the rows of a bank. Unless it will be read from a checkpoint, it is trained on these rows, each left out."""
        config = self.config
        options = dict(k_eval=config.k_eval, k_ensemble=config.k_ensemble, adaptive_k=config.adaptive_k)
        k = min(config.k_train or DEFAULT_K, len(bank))
        asker = asker_for(bank.dim, self.data.num_classes, k_train=k, **options)
        asker.to(self.sets.test.device).eval().refresh(bank)
        if not trained:
            train_attention(asker.knn, *self.left_out(asker), config.seed)
        return asker

    def ask(self, rows: Any, k: int | None = None) -> Questions:
        features = features_of(self.model, rows, self.config.use_amp)
        if self.asker is None:
            empty = features[:, :0]
            return Questions(features, empty, empty, empty.long(), empty, None)
        with torch.no_grad():
            return self.asker.ask(features, k or self.asker.k)

    def left_out(self, asker: NeighborHead) -> tuple[Questions, Tensor]:
        """Training rows with their neighbors, themselves excluded, and their labels."""
        assert asker.bank is not None
        bank = asker.bank
        some = torch.linspace(0, len(bank) - 1, min(len(bank), LEFT_OUT)).round().long()
        device = self.sets.test.device
        return asker.without_themselves(bank.ids[some].to(device)), bank.labels[some].to(device)

    # ------------------------------------------------ what it finds

    def judge(self) -> dict[str, Any]:
        """The scores of the test split, of the head itself and of every voter."""
        test = self.sets.test
        ks = sorted(set(ks_of(self.config)))
        k = max([*ks, self.asker.k]) if self.asker else None  # all k from one search
        views = [self.ask(test.seen_as(view), k) for view in range(self.config.tta)]
        plain, target = views[0], test.target
        if self.asker is not None:
            views = [view.top(self.asker.k) for view in views]
        variants = self.variants(views)
        own = [v for v in variants if self.calibrated or not v.startswith("calibrated")]  # the last is the model's answer
        of_own = {v: scores(variants[v][self.panel.main], target) for v in own}
        predicted = variants[own[-1]][self.panel.main].argmax(1)
        found: dict[str, Any] = {
            "test": of_own[own[-1]],
            "test_variants": of_own,
            "confusion": confusion_matrix(predicted, target, self.data.num_classes).tolist(),
        }
        if self.asker is not None:
            voters = {n: {v: scores(variants[v][n], target) for v in variants} for n in self.panel.raw}
            found["votes"] = {**self.circumstances(views[0]), **self.kept_out(voters)}
            if len(ks) > 1:
                of_k = self.panel.by_k(plain, ks)
                found["votes"]["by_k"] = {name: {k: six(of_k[k][name], target) for k in ks} for name in of_k[ks[0]]}
            if self.config.ood:
                found["ood"] = self.foreign(views[0], variants["calibrated" if self.calibrated else "raw"][self.panel.main])
            if self.config.continual:
                found["continual"] = {"before": scores(self.vote(views[0]), target), **self.grow(plain.features, target)}
        return found

    def circumstances(self, questions: Questions) -> dict[str, Any]:
        """What the votes rest on."""
        asker, panel = self.asker, self.panel
        assert asker is not None
        assert asker.bank is not None
        found = {"k": asker.k, "ensemble": list(asker.ensemble), "bank": len(asker.bank), "calibrate": self.mode}
        found["without_prior"] = [name for name, voter in panel.raw.items() if isinstance(voter, NeighborVoter) and voter.prior is None]
        found["trained_afterwards"] = [name for name in panel.raw if name == "attention" and not self.model.head.learned]
        own = (panel.raw if self.mode == "none" else panel.calibrated)[panel.main]
        if isinstance(own, Mixture):
            found["lambda"] = own.share.item()
        if asker.adaptive_k:
            with torch.no_grad():
                found["neighbors"] = {name: panel.heard(name, questions) for name in panel.raw}
        return found

    def variants(self, views: list[Questions]) -> dict[str, dict[str, Tensor]]:
        """Log-probabilities of each voter as trained and calibrated, of the rows as they are and averaged over views."""
        names = ("raw", "calibrated")[: 1 + (self.mode != "none")]
        of_views = {name: [self.panel.log_probs(view, calibrated=name == "calibrated") for view in views] for name in names}
        found = {name: of_views[name][0] for name in names}
        if len(views) > 1:
            for name, several in of_views.items():
                found[f"{name}_tta"] = {voter: averaged([of[voter] for of in several]) for voter in several[0]}
        return found

    def vote(self, questions: Questions) -> Tensor:
        """Log-probabilities of the best known voter over the neighbors: the head's own, else the attention."""
        return self.panel.log_probs(questions, calibrated=self.mode != "none")[self.speaker]

    @property
    def speaker(self) -> str:
        return self.panel.main if self.model.head.wants_bank else "attention"

    def grow(self, features: Tensor, target: Tensor) -> dict[str, Any]:
        """The test rows in their order: each block is classified, then joins the bank, whose eviction makes room for it."""
        assert self.asker is not None
        assert self.asker.bank is not None
        static, parts = self.asker.bank, []
        growing = self.copy_of(static)
        try:
            for block, labels in zip(features.split(GROWTH), target.split(GROWTH), strict=True):
                self.asker.use(growing)
                with torch.no_grad():
                    questions = self.asker.ask(block)
                parts.append(self.vote(questions))
                growing.add(questions.embedding, labels)
        finally:
            self.asker.use(static)
        sizes = {"bank_before": len(static), "bank": len(growing)}
        return {"voter": self.speaker, "after": scores(torch.cat(parts), target), "block": GROWTH, **sizes}

    def copy_of(self, bank: Bank) -> Bank:
        """A bank that may change, with the cap that was asked for."""
        cap, evict = self.config.bank_cap, self.config.bank_evict or bank.evict
        if (cap, evict) == (bank.cap, bank.evict):
            return copy.deepcopy(bank)
        copied = Bank(bank.dim, kind=bank.kind, cap=cap, evict=evict)
        order = order_in_bank(len(bank), self.config.seed)
        copied.add(bank.embeddings[order], bank.labels[order], bank.ids[order])
        return copied

    def kept_out(self, voters: dict[str, Any]) -> dict[str, Any]:
        """With the accuracy of each vote over training rows that are not their own neighbors."""
        assert self.asker is not None
        questions, labels = self.left_out(self.asker)
        for name, voter in self.panel.raw.items():
            if isinstance(voter, NeighborVoter):  # not a mixture: its linear head has learned these rows
                with torch.no_grad():
                    right = torch.cat([voter(query).argmax(1) for query in questions.blocks()]) == labels
                voters[name]["train_leave_one_out"] = right.double().mean().item()
        return {"voters": voters, "left_out_rows": len(labels)}

    def foreign(self, own: Questions, log_probs: Tensor) -> dict[str, Any]:
        """AUROC of another data set's test rows: by the distance to their neighbors, and by the model's confidence."""
        assert self.config.ood is not None
        theirs = self.ask(foreign_rows(self.config, self.data, self.config.ood, self.sets.test.device))
        unsure = self.panel.log_probs(theirs, calibrated=self.calibrated)[self.panel.main]
        return {
            "dataset": self.config.ood,
            "voter": self.panel.main,
            "rows": len(theirs),
            "auroc_distance": auroc(nearness(own), nearness(theirs)),
            "auroc_confidence": auroc(-log_probs.amax(1), -unsure.amax(1)),
        }


def nearness(questions: Questions) -> Tensor:
    """Mean distance to the neighbors."""
    return (questions.distance.clamp_min(0).sqrt() * questions.mask).nan_to_num(0).sum(1) / questions.mask.sum(1).clamp_min(1)


def scores(log_probs: Tensor, target: Tensor) -> dict[str, float]:
    return six(log_probs, target) | detailed(log_probs, target)


def measure(judge: Judge, size: float, *, epoch: int, seconds: float, val: dict[str, float] | None) -> dict[str, Any]:
    """What results.json holds."""
    config, device = judge.config, judge.sets.test.device
    found = judge.judge()
    rows = batches(config, judge.data, "test", device)
    assert rows is not None
    x = next(iter(rows.epoch())).x  # real rows: what a search costs depends on them
    return {
        **found,
        "val": val,
        "epoch": epoch,
        "params": cost.parameters(judge.model),
        "gflops": size,
        "images_per_second": cost.rows_per_second(judge.model.eval(), x),
        "peak_memory_mb": cost.peak_memory_mb(device),
        "seconds": seconds,
        "data": judge.data.summary,
        "config": dataclasses.asdict(config),
        "versions": versions(),
        "git": git_state(),
        "threads": torch.get_num_threads(),
    }
