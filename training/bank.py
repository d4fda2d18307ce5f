"""The bank in training: built from the rows of the training split, and built anew as the weights move."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from classifiers.bank import Bank
from classifiers.classifier import Classifier, without_nan
from classifiers.metrics import embedding_spread
from classifiers.sharded_bank import ShardedBank, in_parts
from inputs.batches import BANK, AnyBatches
from inputs.rows import Batch
from training.state import TrainingState, weights_of
from utils import fold_in, say


@torch.no_grad()
def build_bank(model: Classifier, rows: AnyBatches) -> None:
    """Hands a head that looks at neighbors a bank of the embeddings of all rows, as evaluation sees them. Of no other head."""
    if not model.head.wants_bank:
        return
    model.eval()

    def embed(batch: Batch) -> Tensor:
        return model.head.embed(model.features(batch)).float().cpu()

    options = {**model.head.bank_options, "copies": rows.split.copies}
    if in_parts(model.head):
        model.head.refresh(ShardedBank.of(rows.own_blocks(embed), rows.target.cpu(), options))
        return
    stream = ((numbers, without_nan(embeddings)) for numbers, embeddings in rows.blocks(embed))
    first = next(stream)
    bank = Bank(first[1].shape[1], **options)
    count = len(rows.target)
    ids = torch.arange(count) if bank.cap is None else order_in_bank(count, rows.seed)
    bank.refresh(rows.target.cpu()[ids], ids, chain([first], stream))
    model.head.refresh(bank)


def order_in_bank(rows: int, seed: int) -> Tensor:
    """Of a bank with a cap, where who comes last stays: that must not depend on the order of a file."""
    return torch.from_numpy(np.random.default_rng(fold_in(seed, BANK)).permutation(rows))


COLLAPSED = 0.9  # mean cosine of rows of different classes; heads that train well had -0.1 to 0.7
MOST_ROWS = 10_000  # that it is measured on


def spread_of(bank: Bank) -> dict[str, float]:
    """Of at most so many embeddings of a bank."""
    step = 1 + len(bank) // MOST_ROWS
    return embedding_spread(*bank.every(step))


def collapse(spread: dict[str, float]) -> str:
    """A line that says it, with what causes it; "" where embeddings lie apart."""
    cosine, rank = spread["cosine_between_classes"], spread["effective_rank"]
    if cosine <= COLLAPSED:
        return ""
    return (
        f"collapse: rows of different classes have nearly the same embedding (mean cosine {cosine:.3f}, effective rank {rank:.1f}), so "
        "neighbors tell nothing; likely --dropout or --mixup_alpha moves a row farther than its class does, or --lr is too high"
    )


class BankRefresher:
    """Keeps the banks near the weights: one of the averaged weights for each evaluation, and the same for training every so often.

    With weight averaging, a row in training is thus compared with what the averaged weights made of the others.
    """

    def __init__(self, state: TrainingState, rows: AnyBatches, every: float) -> None:
        self.state, self.rows = state, rows
        self.every = max(1, round(every * state.schedule.updates_per_epoch))
        self.built_at = -1  # update whose weights made the averaged model's bank
        self.collapsed = False

    def for_training(self) -> None:
        state = self.state
        if state.place.updates % self.every == 0 or (state.bank is None and state.bank_weights is None):
            self.for_evaluation()
            state.take_bank()
        elif state.bank is None:
            self._as_it_was()
        if state.bank is not None and state.model.head.bank is not state.bank:  # evaluation has put a newer one in its place
            state.model.head.refresh(state.bank)

    def _as_it_was(self) -> None:
        """The bank that training votes with, of a run that goes on and had it in parts: of the weights that it was made of."""
        averaged, then = self.state.averaged, self.state.bank_weights
        assert then is not None
        now = weights_of(averaged)
        averaged.load_state_dict(then)
        build_bank(averaged, self.rows)
        self.state.take_bank()
        averaged.load_state_dict(now)
        self.built_at = -1

    def for_evaluation(self) -> None:
        if self.built_at != self.state.place.updates:
            build_bank(self.state.averaged, self.rows)
            self.built_at = self.state.place.updates

    def spread(self) -> dict[str, float]:
        """Of the embeddings in the bank of the evaluation; nothing for a head without one. A collapse is said once."""
        bank = self.state.averaged.head.bank
        if bank is None:
            return {}
        found = spread_of(bank)
        if (line := collapse(found)) and not self.collapsed:
            say(line)
        self.collapsed = bool(line)
        return found
