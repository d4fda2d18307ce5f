"""Each metric against scikit-learn, brute force, or a case worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss, top_k_accuracy_score

from classifiers.metrics import brier, expected_calibration_error, f1_macro, metrics, topk_accuracy


def predictions(rows: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator)
    return logits.log_softmax(1), torch.randint(classes, (rows,), generator=generator)


def test_by_hand():
    """Four rows of three classes: two right, with confidences 0.75, 0.5, 0.5 and 0.75 (each in a bin of its own or shared)."""
    probs = torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]], dtype=torch.float64)
    target = torch.tensor([0, 1, 1, 1])
    found = metrics(probs.log(), target)
    assert found["accuracy"] == 0.5
    assert found["top5"] == 1.0  # there are three classes only
    # class 0: one hit, one false alarm: 2/3. class 1: one hit, two misses: 1/2. class 2: one false alarm: 0
    assert found["f1_macro"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3, rel=1e-15)
    assert found["nll"] == pytest.approx(-np.log([0.75, 0.5, 0.25, 0.25]).mean(), rel=1e-12)
    # rows 0 and 3 share a bin (1 of 2 right at 0.75), rows 1 and 2 another (1 of 2 right at 0.5)
    assert found["ece"] == pytest.approx((2 * 0.25 + 2 * 0) / 4, abs=1e-15)
    # 0.0625 * 2, 0.25 + 2 * 0.0625, 0.25 + 0.5625 + 0.0625, 0.5625 * 2
    assert found["brier"] == pytest.approx((0.125 + 0.375 + 0.875 + 1.125) / 4, rel=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 7, 11])
def test_against_scikit_learn(classes):
    log_probs, target = predictions(211, classes)
    found = metrics(log_probs, target)
    y, probs = target.numpy(), log_probs.double().exp().numpy()
    probs /= probs.sum(1, keepdims=True)
    labels = np.arange(classes)
    assert found["accuracy"] == pytest.approx(accuracy_score(y, probs.argmax(1)), rel=1e-12)
    assert found["f1_macro"] == pytest.approx(f1_score(y, probs.argmax(1), average="macro"), rel=1e-12)
    assert found["nll"] == pytest.approx(log_loss(y, probs, labels=labels), rel=1e-6)
    assert found["brier"] == pytest.approx(((probs - np.eye(classes)[y]) ** 2).sum(1).mean(), rel=1e-6)
    if classes > 5:
        assert found["top5"] == pytest.approx(top_k_accuracy_score(y, probs, k=5, labels=labels), rel=1e-12)
    else:
        assert found["top5"] == 1.0


def test_f1_leaves_out_classes_that_never_occur():
    predicted, target = torch.tensor([0, 1, 1, 5]), torch.tensor([0, 1, 2, 2])
    wanted = f1_score(target.numpy(), predicted.numpy(), average="macro")  # over 0, 1, 2 and 5
    assert f1_macro(predicted, target, 7) == pytest.approx(wanted, rel=1e-12)
    assert wanted == pytest.approx((1 + 2 / 3 + 0 + 0) / 4)


@pytest.mark.parametrize("bins", [1, 15, 17])
def test_ece_by_brute_force(bins):
    log_probs, target = predictions(307, 7, seed=1)
    probs = log_probs.double().exp()
    confidence, right = probs.amax(1), probs.argmax(1) == target
    total = 0.0
    for number in range(bins):
        inside = [i for i in range(307) if number / bins < confidence[i] <= (number + 1) / bins]
        if inside:
            total += abs(sum(right[i].item() - confidence[i].item() for i in inside))
    assert expected_calibration_error(confidence, right, bins) == pytest.approx(total / 307, rel=1e-9)


@pytest.mark.parametrize("sure", [1.0, 1.0000001])
def test_full_confidence_counts(sure):
    """Common implementations drop it out of the last bin, and call a model perfect that is sure and wrong."""
    right = torch.tensor([True, False, False, False])
    confidence = torch.full((4,), sure)
    assert expected_calibration_error(confidence, right) == pytest.approx(0.75, abs=1e-6)
    certain = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    found = metrics(certain, torch.tensor([0, 0]))
    assert found["ece"] == 0.5
    assert (found["accuracy"], found["nll"], found["brier"]) == (0.5, float("inf"), 1.0)
    assert expected_calibration_error(torch.tensor([0.0]), torch.tensor([False])) == 0.0


def test_a_perfect_model():
    probs = torch.eye(7)
    found = metrics((probs + 1e-30).log(), torch.arange(7))
    assert found == {"accuracy": 1, "top5": 1, "f1_macro": 1, "nll": 0, "ece": 0, "brier": 0}


def test_topk():
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    target = torch.tensor([3, 3, 2])
    assert [topk_accuracy(scores, target, k) for k in (1, 2, 3, 4, 9)] == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1, 1])


def test_sums_do_not_lose_rows():
    """Float32 sums stop counting at 16,777,216; a mean over many rows must not drift. One row in 1,000 is wrong."""
    n = 100_003
    log_probs = torch.tensor([0.9, 0.1]).log().expand(n, 2)
    target = (torch.arange(n) % 1000 == 0).long()
    wrong = int(target.sum())
    found = metrics(log_probs, target)
    assert found["accuracy"] == (n - wrong) / n
    assert found["brier"] == pytest.approx(((n - wrong) * 0.02 + wrong * 1.62) / n, rel=1e-6)
    assert brier(torch.tensor([[0.9, 0.1]]), torch.tensor([1])) == pytest.approx(1.62, rel=1e-6)
