"""Each metric against scikit-learn, brute force, or a case worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    roc_auc_score,
    top_k_accuracy_score,
)
from sklearn.metrics import confusion_matrix as sklearn_confusion_matrix
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from classifiers.metrics import (
    accuracy_at_coverage,
    aurc,
    auroc,
    balanced_accuracy,
    brier,
    classwise_calibration_error,
    confusion_matrix,
    detailed_metrics,
    embedding_spread,
    equal_mass_calibration_error,
    expected_calibration_error,
    f1_macro,
    judged,
    standard_metrics,
    topk_accuracy,
)


def predictions(rows: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator)
    return logits.log_softmax(1), torch.randint(classes, (rows,), generator=generator)


def test_by_hand():
    """Four rows of three classes: two right, with confidences 0.75, 0.5, 0.5 and 0.75 (each in a bin of its own or shared)."""
    probs = torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]], dtype=torch.float64)
    target = torch.tensor([0, 1, 1, 1])
    found = standard_metrics(probs.log(), target)
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
    found = standard_metrics(log_probs, target)
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
    found = standard_metrics(certain, torch.tensor([0, 0]))
    assert found["ece"] == 0.5
    assert (found["accuracy"], found["nll"], found["brier"]) == (0.5, float("inf"), 1.0)
    assert expected_calibration_error(torch.tensor([0.0]), torch.tensor([False])) == 0.0


def test_a_perfect_model():
    probs = torch.eye(7)
    found = standard_metrics((probs + 1e-30).log(), torch.arange(7))
    assert found == {"accuracy": 1, "top5": 1, "f1_macro": 1, "nll": 0, "ece": 0, "brier": 0}


def test_topk():
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    target = torch.tensor([3, 3, 2])
    assert [topk_accuracy(scores, target, k) for k in (1, 2, 3, 4, 9)] == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1, 1])


def test_ties_for_the_last_places_share_them():
    """16 neighbors of one wrong class: the other nine tie for four places, wherever the true class stands among them."""
    vote = torch.zeros(10)
    vote[3] = 1
    for label in (0, 2, 4, 9):
        assert topk_accuracy(vote[None].log(), torch.tensor([label]), 5) == pytest.approx(4 / 9)
    assert topk_accuracy(vote[None].log(), torch.tensor([3]), 1) == 1


def test_how_classes_are_numbered_does_not_matter():
    generator = torch.Generator().manual_seed(2)
    scores, target = torch.randint(3, (97, 11), generator=generator).double(), torch.randint(11, (97,), generator=generator)
    order = torch.randperm(11, generator=generator)
    for k in (1, 2, 5, 11):
        assert topk_accuracy(scores[:, order], order.argsort()[target], k) == pytest.approx(topk_accuracy(scores, target, k))


def test_sums_do_not_lose_rows():
    """Float32 sums stop counting at 16,777,216; a mean over many rows must not drift. One row in 1,000 is wrong."""
    n = 100_003
    log_probs = torch.tensor([0.9, 0.1]).log().expand(n, 2)
    target = (torch.arange(n) % 1000 == 0).long()
    wrong = int(target.sum())
    found = standard_metrics(log_probs, target)
    assert found["accuracy"] == (n - wrong) / n
    assert found["brier"] == pytest.approx(((n - wrong) * 0.02 + wrong * 1.62) / n, rel=1e-6)
    assert brier(torch.tensor([[0.9, 0.1]]), torch.tensor([1])) == pytest.approx(1.62, rel=1e-6)


# ---------------------------------------------------------------- beyond the six of every evaluation


@pytest.mark.parametrize("bins", [1, 15, 17])
@pytest.mark.parametrize("rows", [13, 307])
def test_equal_mass_ece_by_brute_force(bins, rows):
    log_probs, target = predictions(rows, 7, seed=2)
    probs = log_probs.double().exp()
    confidence, right = probs.amax(1).numpy(), (probs.argmax(1) == target).double().numpy()
    order = np.argsort(confidence)
    total = sum(abs((right[part] - confidence[part]).sum()) for part in np.array_split(order, bins))
    found = equal_mass_calibration_error(torch.from_numpy(confidence), torch.from_numpy(right).bool(), bins)
    assert found == pytest.approx(total / rows, rel=1e-12)


def test_equal_mass_ece_by_hand():
    """Two bins of two rows: 0.5 and 0.6, one right; 0.9 and 1.0, both right."""
    confidence, right = torch.tensor([0.9, 0.5, 1.0, 0.6]), torch.tensor([True, False, True, True])
    assert equal_mass_calibration_error(confidence, right, 2) == pytest.approx((0.1 + 0.1) / 4, abs=1e-7)


@pytest.mark.parametrize("bins", [1, 15])
@pytest.mark.parametrize("classes", [2, 7])
def test_classwise_ece_by_brute_force(bins, classes):
    log_probs, target = predictions(211, classes, seed=3)
    probs = log_probs.double().exp()
    probs[0] = torch.eye(classes, dtype=torch.float64)[0]  # exactly 0 and 1
    wanted = np.mean([expected_calibration_error(probs[:, c], target == c, bins) for c in range(classes)])
    assert classwise_calibration_error(probs, target, bins) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("classes", [2, 7])
def test_confusion_and_balanced_accuracy_against_scikit_learn(classes):
    log_probs, target = predictions(211, classes, seed=4)
    predicted = log_probs.argmax(1)
    labels = np.arange(classes)
    found = confusion_matrix(predicted, target, classes)
    assert (found.numpy() == sklearn_confusion_matrix(target.numpy(), predicted.numpy(), labels=labels)).all()
    wanted = balanced_accuracy_score(target.numpy(), predicted.numpy())
    assert balanced_accuracy(predicted, target, classes) == pytest.approx(wanted, rel=1e-12)
    assert balanced_accuracy(predicted, target, classes + 3) == pytest.approx(wanted, rel=1e-12)  # classes that do not occur


def test_confusion_by_hand():
    found = confusion_matrix(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 2]), 3)
    assert found.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]  # rows are labels
    assert balanced_accuracy(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1]), 2) == 0.5


@pytest.mark.parametrize("rows", [1, 13, 307])
def test_abstention_by_brute_force(rows):
    generator = torch.Generator().manual_seed(rows)
    confidence, right = torch.rand(rows, generator=generator), torch.rand(rows, generator=generator) < 0.7
    order = sorted(range(rows), key=lambda i: -confidence[i])
    errors = [int(not right[i]) for i in order]
    assert aurc(confidence, right) == pytest.approx(np.mean([np.mean(errors[:n]) for n in range(1, rows + 1)]), rel=1e-12)
    for coverage in (0.8, 0.9, 0.95, 1.0):
        n = int(np.ceil(round(coverage * rows, 6)))
        assert accuracy_at_coverage(confidence, right, coverage) == pytest.approx(1 - np.mean(errors[:n]), rel=1e-12)


def test_abstention_by_hand():
    confidence, right = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([True, False, True, True])
    assert aurc(confidence, right) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert accuracy_at_coverage(confidence, right, 0.5) == 0.5
    assert accuracy_at_coverage(confidence, right, 0.25) == 1.0
    assert accuracy_at_coverage(torch.rand(10), torch.arange(10) > 2, 1.0) == pytest.approx(0.7)  # floating point must not add a row


def test_order_of_rows_does_not_matter():
    """A vote of 5 neighbors has 5 confidences. Among equal ones the rows have no order, and the average over all orders is taken."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.randint(1, 6, (97,), generator=generator) / 5
    right = torch.rand(97, generator=generator) < confidence
    shuffled = [torch.randperm(97, generator=generator) for _ in range(5)]
    scores = (equal_mass_calibration_error, aurc, lambda c, r: accuracy_at_coverage(c, r, 0.8))
    for score in scores:
        assert len({round(score(confidence[p], right[p]), 12) for p in shuffled}) == 1
        rounding = 1e-7 * torch.rand(97, generator=generator)
        assert score(confidence - rounding, right) == pytest.approx(score(confidence, right), abs=1e-6)
    orders = [sorted(torch.randperm(97, generator=generator).tolist(), key=lambda i: -confidence[i]) for _ in range(2000)]
    errors = torch.stack([~right[torch.tensor(order)] for order in orders]).double()
    curve = errors.cumsum(1) / torch.arange(1, 98)
    assert aurc(confidence, right) == pytest.approx(curve.mean().item(), abs=2e-3)


@pytest.mark.parametrize("decimals", [1, 6])
def test_auroc_against_scikit_learn(decimals):
    generator = torch.Generator().manual_seed(5)
    inside = torch.randn(113, generator=generator).double().round(decimals=decimals)  # rounded to 0.1: many equal scores
    outside = (0.7 + torch.randn(59, generator=generator).double()).round(decimals=decimals)
    wanted = roc_auc_score(np.r_[np.zeros(113), np.ones(59)], torch.cat([inside, outside]).numpy())
    assert auroc(inside, outside) == pytest.approx(wanted, rel=1e-12)
    assert auroc(torch.zeros(3), torch.ones(5)) == 1.0
    assert auroc(torch.ones(3), torch.zeros(5)) == 0.0
    assert auroc(torch.zeros(3), torch.tensor([0.0, torch.inf])) == 0.75


def test_detailed_metrics_name_what_they_measure():
    log_probs, target = predictions(211, 7, seed=6)
    probs = log_probs.double().exp()
    found, right = detailed_metrics(log_probs, target), probs.argmax(1) == target
    assert found == {
        "ece_equal_mass": equal_mass_calibration_error(probs.amax(1), right),
        "ece_classwise": classwise_calibration_error(probs, target),
        "aurc": aurc(probs.amax(1), right),
        "accuracy_at_80": accuracy_at_coverage(probs.amax(1), right, 0.8),
        "accuracy_at_90": accuracy_at_coverage(probs.amax(1), right, 0.9),
        "accuracy_at_95": accuracy_at_coverage(probs.amax(1), right, 0.95),
        "balanced_accuracy": balanced_accuracy(probs.argmax(1), target, 7),
    }
    assert not set(found) & set(standard_metrics(log_probs, target))


@pytest.mark.parametrize("classes", [1, 3])
def test_spread_of_embeddings_by_brute_force(classes):
    rows = torch.nn.functional.normalize(torch.randn(17, 5, generator=torch.Generator().manual_seed(0)) + 1, dim=1)
    labels = torch.arange(17) % classes
    found = embedding_spread(rows, labels)
    pairs = [float(rows[i] @ rows[j]) for i in range(17) for j in range(17) if labels[i] != labels[j]]
    assert found["cosine_between_classes"] == pytest.approx(sum(pairs) / len(pairs) if pairs else 0, abs=1e-6)
    share = torch.linalg.svdvals(rows.double()).square() / 17
    assert found["effective_rank"] == pytest.approx(float((-(share * share.log()).sum()).exp()), rel=1e-5)


def test_spread_of_one_point_and_of_all_directions():
    one = embedding_spread(torch.tensor([[0.6, 0.8]]).repeat(6, 1), torch.arange(6) % 2)
    assert one == pytest.approx({"effective_rank": 1.0, "cosine_between_classes": 1.0}, abs=1e-6)
    axes = embedding_spread(torch.eye(6), torch.arange(6))
    assert axes == pytest.approx({"effective_rank": 6.0, "cosine_between_classes": 0.0}, abs=1e-6)


def test_metrics_do_not_depend_on_how_many_rows_are_looked_at_at_once(monkeypatch):
    """Of 57 rows and 11 classes: all at once, 5 at a time with 2 left, and one at a time."""
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(57, 11, generator=generator)).log_softmax(1)
    target = torch.randint(11, (57,), generator=generator)
    found = []
    for numbers in (57 * 11, 5 * 11 + 10, 3):
        monkeypatch.setattr("classifiers.metrics.NUMBERS", numbers)
        found.append(standard_metrics(log_probs, target) | detailed_metrics(log_probs, target))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(part.numel() for part in tree_leaves(made) if isinstance(part, torch.Tensor))])
        return made


def test_nothing_as_large_as_the_probabilities_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 rows and 20 classes, five rows at a time: what is made has a number a row at most."""
    monkeypatch.setattr("classifiers.metrics.NUMBERS", 100)
    log_probs, target = predictions(1000, 20)
    with Largest() as largest:
        of = judged(log_probs, target)
        assert {**standard_metrics(log_probs, target, of), **detailed_metrics(log_probs, target, of)}
    assert largest.numbers == 1000


def test_effective_rank_of_fewer_rows_than_dimensions_and_of_more() -> None:
    """The same rows once and three times have the same second moment."""
    rows = torch.nn.functional.normalize(torch.randn(20, 41, generator=torch.Generator().manual_seed(0)), dim=1)
    labels = torch.arange(20) % 3
    once, often = (embedding_spread(rows.repeat(times, 1), labels.repeat(times))["effective_rank"] for times in (1, 3))
    assert once == pytest.approx(often, rel=1e-9)
    assert 10 < once < 20
