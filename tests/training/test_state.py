"""Where training stands: the average of the weights, the guard before a step, the place."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from inputs.rows import Batch
from tests.training.made import Backbone, Rooted, Watching, batches, classifier, state, weights
from train_eval import step
from training.state import Place
from utils import Diverged

# ---------------------------------------------------------------- the average


def test_the_average_by_hand():
    run = state(ema_decay=0.25)
    wanted = weights(run.model)
    for number, batch in enumerate(batches(35, 7).epoch(), 1):
        step(run, [batch])
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
        step(run, [batch])
    assert run.ema is not None
    for name, value in run.model.named_buffers():
        assert torch.equal(dict(run.ema.named_buffers())[name], value)
    assert run.model.get_buffer("backbone.norm.num_batches_tracked") == 3


def test_without_an_average_the_weights_are_evaluated():
    run = state()
    assert run.averaged is run.model


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize("cause", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_divergence_is_caught_before_the_step(cause, optimizer):
    model = classifier(Rooted())
    run = state(model, optimizer=optimizer, momentum=0.9, lr=0.03, ema_decay=0.5)
    good = next(batches(7, 7).epoch())
    run.place.epoch = 4
    step(run, [good])
    step(run, [good])
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
        step(run, [good, bad])
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
    run.place.grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]).item()
    with pytest.raises(Diverged, match=r"loss inf, gradient norm 1235, .* largest gradient head.fc.bias \(1.23e\+03\)$"):
        run.require_finite(math.inf)


# ---------------------------------------------------------------- mixed precision, and the place


def test_mixed_precision_is_for_the_layers_not_for_the_loss():
    head = Watching()
    run, data = state(classifier(head=head, use_amp=True), use_amp=True), batches(14, 7)
    step(run, [next(data.epoch())])
    assert not run.scaler.is_enabled()  # bf16 needs none
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    plain = state(classifier(head=Watching()))
    step(plain, [next(data.epoch())])
    assert run.place.losses["cross_entropy"] == pytest.approx(plain.place.losses["cross_entropy"], rel=0.02)
    assert run.place.losses["cross_entropy"] != plain.place.losses["cross_entropy"]
    with torch.autocast("cpu", torch.bfloat16):
        assert run.model(next(data.epoch()).x).dtype == torch.float32


def test_the_place_counts_epochs_without_progress():
    place = Place(batch=7, losses={"a": 3.0}, loss_rows=2)
    assert place.mean_losses() == {"a": 1.5}
    for better, best_epoch, stale in ((True, 1, 0), (False, 1, 1), (False, 1, 2), (True, 4, 0), (False, 4, 1)):
        place.next_epoch({"accuracy": 0.1 * place.epoch}, better)
        assert (place.best_epoch, place.stale, place.batch, place.losses, place.loss_rows) == (best_epoch, stale, 0, {}, 0)
    assert place.best == {"accuracy": pytest.approx(0.3)}
