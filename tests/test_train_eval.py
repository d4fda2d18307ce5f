"""The parts of the loop, each against its formula: schedule, optimizer, accumulation, average, guard, evaluation."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classifiers import Head, LinearHead
from classifiers.classifier import Classifier
from config import Config
from dataset import Data, Split
from inputs.batches import Batches
from inputs.rows import Batch
from train_eval import better_than, evaluate, grouped
from training.optimizer import Schedule, make_optimizer
from training.progress import Log, Tracker
from training.state import Place
from utils import Diverged, Stopped

CPU = torch.device("cpu")
FEATURES, CLASSES = 5, 3


def configured(**given: Any) -> Config:
    plain: dict[str, Any] = dict(optimizer="sgd", momentum=0.0, lr=0.1, weight_decay=0.0, scheduler="none", warmup_epochs=0)
    return resolve({"dataset": "made", "clip_grad_norm": 0.0, **plain, **given}, shape=(FEATURES,))


def table(rows: int, seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    split = Split(rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, rows))
    return Data("made", "table", (FEATURES,), tuple("abc"), split, split, split, True, {"mean": [], "std": [], "levels": []})


def batches(rows: int, size: int, *, shuffled: bool = False) -> Batches:
    data = table(rows)
    return Batches(data.train, data, batch_size=size, device=CPU, train=shuffled)


class Backbone(nn.Module):
    """A matrix, a norm and a class token: one of each kind of parameter."""

    num_features = 7

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, 7)
        self.norm = nn.LayerNorm(7)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.fc(x))) + self.cls_token[0]


def classifier(backbone: nn.Module | None = None, head: Head | None = None) -> Classifier:
    torch.manual_seed(3)
    return Classifier(backbone or Backbone(), head or LinearHead(7, CLASSES), CLASSES, {"config": {}})


def state(model: Classifier | None = None, per_epoch: int = 10, **given: Any) -> State:
    return State(configured(**given), model or classifier(), per_epoch, CPU)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- learning rate


def rates(updates: int, per_epoch: int = 5, **given: Any) -> list[float]:
    config = configured(lr=2.0, **given)
    schedule = Schedule(config, make_optimizer(config, classifier()), per_epoch)
    found = []
    for update in range(updates):
        schedule.before_update(update)
        found.append(schedule.lr)
    return found


def test_warm_up_is_a_line_to_the_peak():
    found = rates(12, num_epochs=4, warmup_epochs=1.4)  # 7 updates
    assert found == pytest.approx([2 * n / 8 for n in range(1, 8)] + [2.0] * 5)


def test_cosine_goes_from_the_peak_to_zero():
    found = rates(21, num_epochs=4, warmup_epochs=1, scheduler="cosine")  # 5 updates of warm-up, 15 of cosine
    assert found[5] == 2.0
    assert found[5:] == pytest.approx([1 + math.cos(math.pi * n / 15) for n in range(16)], abs=1e-12)
    assert found[20] == pytest.approx(0, abs=1e-15)  # the update after the last
    assert 0 < found[19] < 0.03
    assert found[5:] == sorted(found[5:], reverse=True)


def test_steps():
    found = rates(35, num_epochs=7, scheduler="step", lr_step=3, lr_gamma=0.5)
    assert found == pytest.approx([2.0] * 15 + [1.0] * 15 + [0.5] * 5)


def test_plateau_waits_for_the_loss_to_fall():
    config = configured(lr=2.0, scheduler="plateau", lr_step=1, lr_gamma=0.5)
    schedule = Schedule(config, make_optimizer(config, classifier()), 5)
    found = []
    #        new  new  stale stale(2 > 1)   new  stale  not lower: stale
    losses = [3.0, 2.0, 2.5, 2.1, 1.9, 1.95, 1.9, 1.0]
    for epoch, loss in enumerate(losses):
        schedule.before_update(5 * epoch)
        found.append(schedule.lr)
        schedule.after_epoch(loss)
    assert found == [2, 2, 2, 2, 1, 1, 1, 0.5]

    again = Schedule(config, make_optimizer(config, classifier()), 5)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    for loss in (1.5, 1.6, 1.7):
        schedule.after_epoch(loss)
        again.after_epoch(loss)
    assert again.factor(99) == schedule.factor(99) == 0.125


def test_other_schedules_do_not_look_at_the_loss():
    config = configured(lr=2.0, scheduler="none", lr_step=1)
    schedule = Schedule(config, make_optimizer(config, classifier()), 5)
    for _ in range(5):
        schedule.after_epoch(9.0)
    schedule.before_update(30)
    assert schedule.lr == 2.0


# ---------------------------------------------------------------- optimizer


def test_weight_decay_is_for_matrices_and_the_backbone_may_have_its_own_rate():
    model = classifier()
    optimizer = make_optimizer(configured(optimizer="adamw", lr=0.3, lr_backbone=0.03, weight_decay=0.05), model)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (group["peak_lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found == {
        "backbone.fc.weight": (0.03, 0.05),
        "backbone.fc.bias": (0.03, 0),
        "backbone.norm.weight": (0.03, 0),
        "backbone.norm.bias": (0.03, 0),
        "backbone.cls_token": (0.03, 0),
        "head.fc.weight": (0.3, 0.05),
        "head.fc.bias": (0.3, 0),
    }
    config = configured(lr=0.3, lr_backbone=0.03, num_epochs=2, warmup_epochs=1)
    optimizer = make_optimizer(config, model)
    Schedule(config, optimizer, 4).before_update(0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.03 / 5, 0.03 / 5, 0.3 / 5, 0.3 / 5])


def test_frozen_weights_are_left_out():
    model = classifier()
    model.backbone.requires_grad_(False)
    optimizer = make_optimizer(configured(), model)
    assert [group["name"] for group in optimizer.param_groups] == ["head", "head"]


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimizers_by_name(name, kind):
    optimizer = make_optimizer(configured(optimizer=name, momentum=0.7), classifier())
    assert type(optimizer) is kind
    if name == "sgd":
        assert all(group["momentum"] == 0.7 and group["nesterov"] for group in optimizer.param_groups)


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
            run.update([batch])
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
        one.update(group)
    assert found == groups
    other = state()
    for batch in large.epoch():
        other.update([batch])
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
        run.update([batch])
    model = classifier()
    x, y = (torch.cat([getattr(b, name) for b in data.epoch()]) for name in ("x", "target"))
    assert run.place.mean_losses() == {"cross_entropy": pytest.approx(F.nll_loss(model(x), y).item(), rel=1e-6)}
    means = [F.nll_loss(model(b.x), b.target).item() for b in data.epoch()]
    assert abs(np.mean(means) - run.place.mean_losses()["cross_entropy"]) > 1e-5  # ten times the tolerance above


def test_gradients_are_clipped_to_the_norm():
    batch = next(batches(7, 7).epoch())
    free, clipped = state(), state(clip_grad_norm=0.01)
    before = weights(free.model)
    free.update([batch])
    clipped.update([batch])
    step, short = (torch.cat([(before[k] - v).flatten() for k, v in run.model.state_dict().items()]) for run in (free, clipped))
    assert free.place.grad_norm == clipped.place.grad_norm == pytest.approx(step.norm().item() / 0.1, rel=1e-4)
    assert short.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    torch.testing.assert_close(short / short.norm(), step / step.norm(), rtol=1e-3, atol=1e-4)


def test_the_average_by_hand():
    run = state(ema_decay=0.25)
    wanted = weights(run.model)
    for number, batch in enumerate(batches(35, 7).epoch(), 1):
        run.update([batch])
        decay = min(0.25, (1 + number) / (10 + number))  # 2/11, 3/12 = 1/4, 1/4, ...
        wanted = {name: decay * wanted[name] + (1 - decay) * value for name, value in weights(run.model).items()}
    assert run.averaged is run.ema is not run.model
    for name, value in run.averaged.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(wanted["head.fc.weight"], run.model.state_dict()["head.fc.weight"])


def test_the_average_takes_statistics_as_they_are():
    class Normed(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.norm: Any = nn.BatchNorm1d(7)

    run = state(classifier(Normed()), ema_decay=0.5)
    for batch in batches(21, 7).epoch():
        run.update([batch])
    assert run.ema is not None
    for name, value in run.model.named_buffers():
        assert torch.equal(dict(run.ema.named_buffers())[name], value)
    assert run.model.get_buffer("backbone.norm.num_batches_tracked") == 3


def test_without_an_average_the_weights_are_evaluated():
    run = state()
    assert run.averaged is run.model


# ---------------------------------------------------------------- the guard


class Rooted(Backbone):
    """Its loss is finite and its gradient is not: the root of zero."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        features = super().forward(x)
        return features + (self.cls_token * 0).sum().sqrt() if self.armed else features


@pytest.mark.parametrize("cause", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_divergence_is_caught_before_the_step(cause, optimizer):
    model = classifier(Rooted())
    run = state(model, optimizer=optimizer, momentum=0.9, lr=0.03, ema_decay=0.5)
    good = next(batches(7, 7).epoch())
    run.place.epoch = 4
    run.update([good])
    run.update([good])
    before, average = weights(model), weights(run.averaged)
    moments = copy.deepcopy(run.optimizer.state_dict()["state"])
    if cause == "loss":
        bad = Batch(good.x.clone(), good.target, good.index)
        bad.x[3, 2] = torch.nan
        line = r"training diverged in epoch 5, step 3: loss nan, gradient norm nan, learning rate 0.03, largest gradient \S+ \(not finite\)"
    else:
        bad, model.backbone.armed = good, True  # type: ignore[assignment]
        line = (
            r"training diverged in epoch 5, step 3: loss \d\.\d+, gradient norm nan, "
            r"learning rate 0.03, largest gradient backbone.cls_token \(not finite\)"
        )
    with pytest.raises(Diverged, match=f"^{line}$") as caught:
        run.update([good, bad])
    assert caught.value.exit_code == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, average[name]) for name, value in run.averaged.state_dict().items())
    after = run.optimizer.state_dict()["state"]
    assert all(torch.equal(after[n][k], v) for n, entry in moments.items() for k, v in entry.items())
    assert run.place.updates == 2


def test_a_finite_but_large_gradient_is_named_with_its_size():
    run = state()
    parameters = dict(run.model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    parameters["head.fc.bias"].grad = torch.tensor([1.0, -1234.5, 2.0])
    with pytest.raises(Diverged, match=r"loss inf, gradient norm 1235, .* largest gradient head.fc.bias \(1.23e\+03\)$"):
        run._step(math.inf)


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
    assert found == pytest.approx(metrics(log_probs, data.target), rel=1e-6)
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
        run.update([batch])
        losses.append(run.place.losses["cross_entropy"])
        run.place.losses.clear()
    assert losses[0] != losses[1]
    assert scores == evaluate(run.model, data)


def test_better_is_more_accurate_then_less_surprised():
    best = {"accuracy": 0.5, "nll": 1.0}
    assert better_than({"accuracy": 0.6, "nll": 9.0}, best)
    assert better_than({"accuracy": 0.5, "nll": 0.9}, best)
    assert not better_than({"accuracy": 0.5, "nll": 1.0}, best)
    assert not better_than({"accuracy": 0.5, "nll": 1.1}, best)
    assert not better_than({"accuracy": 0.4, "nll": 0.1}, best)


def test_the_place_counts_epochs_without_progress():
    place = Place(batch=7, losses={"a": 3.0}, loss_rows=2)
    assert place.mean_losses() == {"a": 1.5}
    for better, best_epoch, stale in ((True, 1, 0), (False, 1, 1), (False, 1, 2), (True, 4, 0), (False, 4, 1)):
        place.next_epoch({"accuracy": 0.1 * place.epoch}, better)
        assert (place.best_epoch, place.stale, place.batch, place.losses, place.loss_rows) == (best_epoch, stale, 0, {}, 0)
    assert place.best == {"accuracy": pytest.approx(0.3)}


# ---------------------------------------------------------------- losses


def fixed_head(**options: Any) -> LinearHead:
    """Logits are the features."""
    head = LinearHead(3, 3, **options)
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(3))
    return head


FIXED = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 0.0]])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_losses_by_hand(smoothing, soft):
    target = torch.tensor([0, 2])
    goal = (1 - smoothing) * torch.eye(3)[target] + smoothing / 3
    given = torch.eye(3)[target] if soft else target
    index = torch.arange(2)
    with torch.no_grad():
        cross = fixed_head(label_smoothing=smoothing).loss(FIXED, given, index)
        square = fixed_head(criterion="MSE", label_smoothing=smoothing).loss(FIXED, given, index)
    assert cross == {"cross_entropy": pytest.approx(-(goal * FIXED.log_softmax(1)).sum(1).mean().item(), rel=1e-6)}
    assert square == {"squared_error": pytest.approx(((FIXED - goal) ** 2).mean().item(), rel=1e-6)}
    if not smoothing:
        assert square["squared_error"].item() == pytest.approx((1 + 1 + 0 + 0 + 9 + 1) / 6)
        wanted = (math.log(math.e**2 + math.e + 1) - 2 + math.log(2 + math.e**3)) / 2
        assert cross["cross_entropy"].item() == pytest.approx(wanted, rel=1e-6)


def test_mixed_targets_share_the_loss():
    mixed = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.5, 0.5]])
    found = fixed_head().loss(FIXED, mixed, torch.zeros(2, 2))["cross_entropy"].item()
    assert found == pytest.approx(-(mixed * FIXED.log_softmax(1)).sum(1).mean().item(), rel=1e-6)


def test_a_linear_head_gives_log_probabilities():
    torch.testing.assert_close(fixed_head()(FIXED).exp().sum(1), torch.ones(2))
    assert fixed_head()(FIXED.bfloat16().float()).dtype == torch.float32


class Watching(LinearHead):
    """Notes what the loop hands over."""

    def __init__(self) -> None:
        super().__init__(7, CLASSES)
        self.seen: list[tuple[torch.dtype, Tensor, Tensor]] = []

    def loss(self, features: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.seen.append((features.dtype, target, index))
        return {**super().loss(features, target, index), "extra": features.new_tensor(2.0)}


def test_the_head_gets_the_rows_numbers_and_all_its_terms_count():
    head = Watching()
    run, data = state(classifier(head=head)), batches(31, 7, shuffled=True)
    for batch in data.epoch(3):
        run.update([batch])
    assert torch.cat([index for _, _, index in head.seen]).tolist() == data.order(3).tolist()
    assert all(torch.equal(target, torch.from_numpy(data.split.y)[index]) for _, target, index in head.seen)
    assert run.place.mean_losses()["extra"] == pytest.approx(2.0)


def test_mixed_rows_come_with_both_numbers():
    head = Watching()
    run, data = state(classifier(head=head), mixup_alpha=0.5), batches(14, 7, shuffled=True)
    for batch in data.epoch():
        run.update([batch])
    for number, (_, target, index) in enumerate(head.seen):
        own = data.order(0)[7 * number : 7 * number + 7]
        assert index.tolist() == np.stack((own, own[::-1]), 1).tolist()
        assert target.shape == (7, CLASSES)
    assert not torch.equal(head.seen[0][1].amax(1), head.seen[1][1].amax(1))  # each batch draws a share of its own


def test_mixed_precision_is_for_the_layers_not_for_the_loss():
    head = Watching()
    run, data = state(classifier(head=head), use_amp=True), batches(14, 7)
    run.update([next(data.epoch())])
    assert not run.scaler.is_enabled()  # bf16 needs none
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    plain = state(classifier(head=Watching()))
    plain.update([next(data.epoch())])
    assert run.place.losses["cross_entropy"] == pytest.approx(plain.place.losses["cross_entropy"], rel=0.02)
    assert run.place.losses["cross_entropy"] != plain.place.losses["cross_entropy"]
    with torch.autocast("cpu", torch.bfloat16):
        assert run.model(next(data.epoch()).x).dtype == torch.float32


# ---------------------------------------------------------------- the loop


def fit(folder: Any, **given: Any) -> Place:
    config = configured(**{"num_epochs": 5, "batch_size": 7, **given})
    train_set, val_set = batches(31, 7, shuffled=True), batches(16, 7)
    log = Log(folder, Tracker(folder, {}), epochs=config.num_epochs, batches=len(train_set))
    until = given.pop("until", config.num_epochs)
    return train(config, classifier(), train_set, val_set, log=log, run=folder, until=until)


def test_training_writes_a_line_an_epoch_and_two_checkpoints(tmp_path):
    place = fit(tmp_path, lr=0.05, num_epochs=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    best = max(lines, key=lambda line: (line["val"]["accuracy"], -line["val"]["nll"]))
    assert (place.best_epoch, place.best) == (best["epoch"], best["val"])
    assert (place.epoch, place.updates, place.rows) == (3, 15, 93)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["best", "last"]


def test_patience_ends_a_run_that_does_not_improve(tmp_path):
    place = fit(tmp_path, lr=1e-30, patience=2)
    assert (place.epoch, place.best_epoch, place.stale) == (3, 1, 2)


def test_a_run_stopped_as_asked_says_so(tmp_path):
    config = configured(num_epochs=5, batch_size=7)
    train_set = batches(31, 7, shuffled=True)
    log = Log(tmp_path, Tracker(tmp_path, {}), epochs=5, batches=len(train_set))
    with pytest.raises(Stopped, match=r"^stopped after epoch 2 of 5, as asked$") as caught:
        train(config, classifier(), train_set, None, log=log, run=tmp_path, until=2)
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
        train(config, classifier(Later()), train_set, val_set, log=log, run=tmp_path, until=5)
    run = state(classifier(Later()), batch_size=7)
    run.load(tmp_path / "checkpoints" / "last")
    assert (run.place.epoch, run.place.updates) == (1, 5)
    assert all(value.isfinite().all() for value in run.model.state_dict().values())
