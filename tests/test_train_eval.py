"""The loop: a step against plain torch, accumulation, clipping, evaluation, and when it ends."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.metrics import standard_metrics
from inputs.indexed import read_index
from tests.training.made import CLASSES, Backbone, Rooted, Watching, batches, classifier, configured, state, weights
from train_eval import evaluate, grouped, step, train
from training.checkpoint import Checkpoints
from training.progress import Log, Tracker
from training.state import Place
from utils import Diverged, Stopped


def test_a_step_is_that_of_plain_torch():
    data = batches(7, 7)
    for name, plain in (
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, fused=False)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=False)),
    ):
        ours, theirs = classifier(), classifier()
        run = state(ours, optimizer=name, momentum=0.9)
        optimizer = plain(theirs.parameters())
        for _ in range(3):
            batch = next(data.epoch())
            step(run, [batch])
            optimizer.zero_grad()
            F.nll_loss(theirs(batch.x), batch.target).backward()
            optimizer.step()
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- accumulation, clipping, average


@pytest.mark.parametrize(
    ("rows", "size", "accumulate", "groups"),
    [(14, 7, 2, [[7, 7]]), (16, 7, 3, [[7, 7, 2]]), (31, 7, 2, [[7, 7], [7, 7], [3]]), (16, 11, 2, [[11, 5]])],
)
def test_accumulated_batches_equal_one_large_batch(rows, size, accumulate, groups):
    small, large = batches(rows, size), batches(rows, size * accumulate)
    one = state(accumulate=accumulate)
    found = []
    for group in grouped(small, one.place, accumulate):
        found.append([len(batch) for batch in group])
        step(one, group)
    assert found == groups
    other = state()
    for batch in large.epoch():
        step(other, [batch])
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert one.place.updates == other.place.updates == len(groups)
    assert one.place.batch == sum(map(len, groups))
    assert one.place.rows == rows
    assert one.place.mean_losses() == pytest.approx(other.place.mean_losses(), rel=1e-5)


def test_grouped_continues_in_the_middle():
    data = batches(31, 3, shuffled=True)
    whole = [[b.index.tolist() for b in group] for group in grouped(data, Place(epoch=2), 2)]
    rest = [[b.index.tolist() for b in group] for group in grouped(data, Place(epoch=2, batch=4), 2)]
    assert rest == whole[2:]
    assert [len(group) for group in whole] == [2, 2, 2, 2, 2]  # the 11th batch has one row and is left out


def test_the_loss_of_an_epoch_is_a_mean_over_rows():
    """With a learning rate of (nearly) zero it is the loss of the untouched model; a mean of batch means is not."""
    run, data = state(lr=1e-30), batches(16, 7)
    for batch in data.epoch():
        step(run, [batch])
    model = classifier()
    x, y = (torch.cat([getattr(b, name) for b in data.epoch()]) for name in ("x", "target"))
    assert run.place.mean_losses() == {"cross_entropy": pytest.approx(F.nll_loss(model(x), y).item(), rel=1e-6)}
    means = [F.nll_loss(model(b.x), b.target).item() for b in data.epoch()]
    assert abs(np.mean(means) - run.place.mean_losses()["cross_entropy"]) > 1e-5  # ten times the tolerance above


def test_gradients_are_clipped_to_the_norm():
    batch = next(batches(7, 7).epoch())
    free, clipped = state(), state(clip_grad_norm=0.01)
    before = weights(free.model)
    step(free, [batch])
    step(clipped, [batch])
    long, short = (torch.cat([(before[k] - v).flatten() for k, v in run.model.state_dict().items()]) for run in (free, clipped))
    assert free.place.grad_norm == clipped.place.grad_norm == pytest.approx(long.norm().item() / 0.1, rel=1e-4)
    assert short.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    torch.testing.assert_close(short / short.norm(), long / long.norm(), rtol=1e-3, atol=1e-4)


def test_outputs_that_are_not_numbers_are_no_metrics():
    model = classifier()
    with torch.no_grad():
        model.get_parameter("head.fc.bias")[1] = torch.nan
    with pytest.raises(Diverged, match=r"^the model gives NaN for 16 of 16 rows$"):
        evaluate(model, batches(16, 7))


# ---------------------------------------------------------------- evaluation and what is best


def test_evaluation_is_a_count_over_counts():
    """16 rows in batches of 7, 7 and 2, right in the last two only: 2 of 16, where a mean of batch accuracies says a third."""
    model, data = classifier(), batches(16, 7)
    with torch.no_grad():
        log_probs = torch.cat([model(b.x) for b in data.epoch()])
    data.target = log_probs.argmax(1)
    data.target[:14] = (data.target[:14] + 1) % log_probs.shape[1]
    found = evaluate(model, data)
    assert found["accuracy"] == 2 / 16
    assert found == pytest.approx(standard_metrics(log_probs, data.target), rel=1e-6)
    whole = batches(16, 16)
    whole.target = data.target
    assert found == pytest.approx(evaluate(model, whole), rel=1e-6)


def test_evaluation_turns_dropout_off_and_training_turns_it_on():
    class Dropping(Backbone):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    run, data = state(classifier(Dropping()), lr=1e-30), batches(16, 7)
    run.model.train()
    scores = evaluate(run.model, data)
    assert scores == evaluate(run.model, data)
    batch = next(data.epoch())
    losses = []
    for _ in range(2):
        step(run, [batch])
        losses.append(run.place.losses["cross_entropy"])
        run.place.losses.clear()
    assert losses[0] != losses[1]
    assert scores == evaluate(run.model, data)


# ---------------------------------------------------------------- what a head is handed


def test_the_head_gets_the_rows_numbers_and_all_its_terms_count():
    head = Watching()
    run, data = state(classifier(head=head)), batches(31, 7, shuffled=True)
    for batch in data.epoch(3):
        step(run, [batch])
    assert torch.cat([index for _, _, index in head.seen]).tolist() == data.order(3).tolist()
    assert all(torch.equal(target, torch.from_numpy(data.split.y)[index]) for _, target, index in head.seen)
    assert run.place.mean_losses()["extra"] == pytest.approx(2.0)


def test_mixed_rows_come_with_both_numbers():
    head = Watching()
    run, data = state(classifier(head=head), mixup_alpha=0.5), batches(14, 7, shuffled=True)
    for batch in data.epoch():
        step(run, [batch])
    for number, (_, target, index) in enumerate(head.seen):
        own = data.order(0)[7 * number : 7 * number + 7]
        assert index.tolist() == np.stack((own, own[::-1]), 1).tolist()
        assert target.shape == (7, CLASSES)
    assert not torch.equal(head.seen[0][1].amax(1), head.seen[1][1].amax(1))  # each batch draws a share of its own


# ---------------------------------------------------------------- the loop


def fit(folder: Any, keeps: type[Checkpoints] = Checkpoints, **given: Any) -> Place:
    config = configured(**{"num_epochs": 5, "batch_size": 7, **given})
    train_set, val_set = batches(31, 7, shuffled=True), batches(16, 7)
    log = Log(folder, Tracker(folder, {}), epochs=config.training.num_epochs, batches=len(train_set))
    until = given.pop("until", config.training.num_epochs)
    return train(config, classifier(), train_set, val_set, log=log, checkpoints=keeps(folder), until=until)


def test_training_writes_a_line_an_epoch_and_two_checkpoints(tmp_path):
    place = fit(tmp_path, lr=0.05, num_epochs=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    best = max(lines, key=lambda line: (line["val"]["accuracy"], -line["val"]["nll"]))
    assert (place.best_epoch, place.best) == (best["epoch"], best["val"])
    assert (place.epoch, place.updates, place.rows) == (3, 15, 93)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["best", "last"]


def test_short_epochs_are_not_all_written_and_the_last_and_the_best_are(tmp_path, monkeypatch):
    """Epochs of a second that take a second to write: each sixth. What is there at the end is what writing all of them gives."""
    written: list[tuple[int, int | None]] = []  # epochs of `last` and of a new `best`

    class Noted(Checkpoints):
        def _write(self, groups, facts, best):
            written.append((facts["epoch"], best and best[1]["epoch"]))
            super()._write(groups, facts, best)

    seconds = itertools.count()
    monkeypatch.setattr("training.checkpoint.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    place = fit(tmp_path / "some", Noted, num_epochs=14, lr=0.05)
    some, written[:] = dict(written), []
    assert list(some) == [1, 6, 11, 14]
    monkeypatch.setattr("training.checkpoint.TIMES", 0)
    fit(tmp_path / "all", Noted, num_epochs=14, lr=0.05)
    assert [last for last, _ in written] == list(range(1, 15))
    bests = [best for _, best in written if best]
    assert place.best_epoch == bests[-1] not in some  # it came between two
    since = zip((0, *some), some, strict=False)
    assert list(some.values()) == [max((best for best in bests if before < best <= at), default=None) for before, at in since]
    for name in ("last", "best"):
        indexes = [read_index(tmp_path / run / "checkpoints" / name) for run in ("some", "all")]
        assert indexes[0]["files"] == indexes[1]["files"]
        assert indexes[0]["facts"]["epoch"] == indexes[1]["facts"]["epoch"]


def test_patience_ends_a_run_that_does_not_improve(tmp_path):
    place = fit(tmp_path, lr=1e-30, patience=2)
    assert (place.epoch, place.best_epoch, place.stale) == (3, 1, 2)


def test_a_run_stopped_as_asked_says_so(tmp_path):
    config = configured(num_epochs=5, batch_size=7)
    train_set = batches(31, 7, shuffled=True)
    log = Log(tmp_path, Tracker(tmp_path, {}), epochs=5, batches=len(train_set))
    with pytest.raises(Stopped, match=r"^stopped after epoch 2 of 5, as asked$") as caught:
        train(config, classifier(), train_set, None, log=log, checkpoints=Checkpoints(tmp_path), until=2)
    assert caught.value.exit_code == 0


def test_divergence_keeps_the_last_good_checkpoint(tmp_path):
    class Later(Rooted):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += self.training
            self.armed = self.steps > 8  # in the second epoch of five batches
            return super().forward(x)

    config = configured(num_epochs=5, batch_size=7)
    train_set, val_set = batches(31, 7, shuffled=True), batches(16, 7)
    log = Log(tmp_path, Tracker(tmp_path, {}), epochs=5, batches=len(train_set))
    with pytest.raises(Diverged, match=r"^training diverged in epoch 2, step 9: "):
        train(config, classifier(Later()), train_set, val_set, log=log, checkpoints=Checkpoints(tmp_path), until=5)
    run = state(classifier(Later()), batch_size=7)
    run.load(Checkpoints(tmp_path))
    assert (run.place.epoch, run.place.updates) == (1, 5)
    assert all(value.isfinite().all() for value in run.model.state_dict().values())
