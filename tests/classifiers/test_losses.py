"""Losses by hand, by loops over rows and pairs, and in the corners where contrastive losses turn NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from classifiers.losses import collapse, contrastive_margin, nll, supervised_contrastive
from utils import BadOption

B, D, C, K = 13, 7, 5, 11
Contrastive = Callable[..., Tensor]
CONTRASTIVE: list[Contrastive] = [supervised_contrastive, contrastive_margin]


def case(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors, class numbers (one class with a single row), and soft targets, of which some are mixed and some are not."""
    generator = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(B, D, generator=generator, dtype=torch.float64), dim=1).to(dtype)
    hard = torch.randint(C - 1, (B,), generator=generator)
    hard[4] = C - 1
    mixed = torch.rand(B, 1, generator=generator, dtype=torch.float64).masked_fill(torch.arange(B)[:, None] % 3 == 0, 1)
    one_hot = F.one_hot(hard, C).double()
    soft = mixed * one_hot + (1 - mixed) * one_hot[torch.randperm(B, generator=generator)]
    return z, hard, soft.to(dtype)


# ---------------------------------------------------------------- slow references


def pairs(target: Tensor) -> Tensor:
    """How much two rows are a positive pair, from soft targets, a pair at a time."""
    found = torch.zeros(len(target), len(target), dtype=torch.float64)
    for i in range(len(target)):
        for j in range(len(target)):
            found[i, j] = sum(target[i, c].item() * target[j, c].item() for c in range(target.shape[1]))
    return found


def hardness(z: Tensor, same: Tensor, beta: float) -> list[dict[int, float]]:
    """Of each row: its negatives and their weights, whose mean (over how much each is a negative) is 1."""
    found = []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        raw = {j: math.exp(beta * float(z[i].detach() @ z[j].detach())) for j in others}
        mean = sum((1 - same[i, j].item()) * raw[j] for j in others) / max(1e-9, sum(1 - same[i, j].item() for j in others))
        found.append({j: raw[j] / mean if mean else 0.0 for j in others})
    return found


def slow_supcon(z: Tensor, soft: Tensor, *, temperature: float, hard_negatives: float) -> Tensor:
    same, rows = pairs(soft), []
    hard = hardness(z, same, hard_negatives)
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        count = sum(same[i, j].item() for j in others)
        if not count:
            continue
        odds = {j: (z[i] @ z[j] / temperature).exp() for j in others}
        among = torch.stack([odds[j] * (same[i, j] + (1 - same[i, j]) * hard[i][j]) for j in others]).sum()
        rows.append(-torch.stack([same[i, j] * (odds[j] / among).log() for j in others]).sum() / count)
    return torch.stack(rows).mean()


def slow_margin(z: Tensor, soft: Tensor, *, margin: float, hard_negatives: float) -> Tensor:
    same, zero = pairs(soft), torch.zeros((), dtype=z.dtype)
    hard = hardness(z, same, hard_negatives)
    pull, push, positives, negatives = zero, zero, 0.0, 0.0
    for i in range(len(z)):
        for j in range(len(z)):
            if i != j:
                cosine = z[i] @ z[j]
                pull, positives = pull + same[i, j] * (1 - cosine), positives + same[i, j].item()
                push = push + (1 - same[i, j]) * hard[i][j] * torch.relu(cosine - margin)
                negatives += 1 - same[i, j].item()
    return pull / positives + push / negatives


def value_and_gradient(loss: Contrastive, z: Tensor, target: Tensor, **options) -> tuple[Tensor, Tensor]:
    z = z.detach().clone().requires_grad_()
    value = loss(z, target, **options)
    value.backward()
    assert z.grad is not None
    return value.detach(), z.grad


@pytest.mark.parametrize("beta", [0.0, 0.7, 5.0])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_contrastive_losses_and_their_gradients_by_loops(seed, soft, beta):
    z, hard, mixed = case(seed)
    target, spelled_out = (mixed, mixed) if soft else (hard, F.one_hot(hard, C).double())
    for fast, slow, options in (
        (supervised_contrastive, slow_supcon, {"temperature": 0.3}),
        (contrastive_margin, slow_margin, {"margin": 0.1}),
    ):
        found = value_and_gradient(fast, z, target, hard_negatives=beta, **options)
        wanted = value_and_gradient(slow, z, spelled_out, hard_negatives=beta, **options)
        for mine, other in zip(found, wanted, strict=True):
            error = (mine - other).abs()
            assert error.max() < 1e-10, (fast.__name__, error.max().item(), error.mean().item())


@pytest.mark.parametrize("beta", [0.0, 5.0])
def test_mixtures_of_the_same_rows_are_no_pair(beta):
    """Row i is mixed with row B-1-i: two such rows are neither positive nor negative, so taking one of them out changes only itself."""
    z, _, soft = case(3)
    index = torch.stack([torch.arange(B), torch.arange(B).flip(0)], 1)
    both = torch.tensor([0, B - 1])
    for loss in (supervised_contrastive, contrastive_margin):
        value, gradient = value_and_gradient(partial(loss, index=index[both]), z[both], soft[both], hard_negatives=beta)
        assert value == 0
        assert (gradient == 0).all()
    same, pull, push, positives, negatives = pairs(soft), 0.0, 0.0, 0.0, 0.0
    for i in range(B):
        for j in range(B):
            if j not in (i, B - 1 - i):
                cosine = (z[i] @ z[j]).item()
                pull, positives = pull + same[i, j].item() * (1 - cosine), positives + same[i, j].item()
                push, negatives = push + (1 - same[i, j].item()) * max(0.0, cosine - 0.1), negatives + 1 - same[i, j].item()
    if not beta:
        found = contrastive_margin(z, soft, index, margin=0.1).item()
        assert found == pytest.approx(pull / positives + push / negatives, abs=1e-12)


# ---------------------------------------------------------------- contrastive losses by hand


def test_supcon_by_hand():
    z, target = torch.tensor([[1.0, 0], [1, 0], [0, 1], [-1, 0]]), torch.tensor([0, 0, 1, 2])
    plain = supervised_contrastive(z, target, temperature=1.0)
    assert plain.item() == pytest.approx(math.log(math.e + 1 + 1 / math.e) - 1)  # rows 2 and 3 have no positive
    # the negatives have the cosines 0 and -1: weights 1 : 1/2, of mean 1
    hard = supervised_contrastive(z, target, temperature=1.0, hard_negatives=math.log(2))
    assert hard.item() == pytest.approx(math.log(math.e + 4 / 3 + 2 / 3 / math.e) - 1)


def test_mean_over_positives_is_outside_of_the_logarithm():
    z, target = torch.tensor([[1.0, 0], [1, 0], [0, 1]]), torch.tensor([3, 3, 3])
    found = supervised_contrastive(z, target, temperature=1.0)
    assert found.item() == pytest.approx((2 * (math.log(math.e + 1) - 1 / 2) + math.log(2)) / 3)


def test_margin_by_hand():
    z, target = torch.tensor([[1.0, 0], [0.6, 0.8], [0.8, 0.6]]), torch.tensor([0, 0, 1])
    assert contrastive_margin(z, target).item() == pytest.approx((1 - 0.6) + (0.3 + 0.46) / 2)
    assert contrastive_margin(z, target, margin=0.9).item() == pytest.approx((1 - 0.6) + 0.06 / 2)


def test_margin_is_pytorchs_cosine_embedding_loss():
    z, target, _ = case()
    i, j = torch.triu_indices(B, B, 1)
    sign = (target[i] == target[j]).long() * 2 - 1
    each = F.cosine_embedding_loss(z[i], z[j], sign, margin=0.1, reduction="none")
    wanted = each[sign > 0].mean() + each[sign < 0].mean()
    assert contrastive_margin(z, target, margin=0.1).item() == pytest.approx(wanted.item())


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_margin_does_not_depend_on_the_number_of_classes(classes):
    """Rows of one class have the cosine 0.4, rows of two 0.3, however many they are."""
    target = torch.arange(classes * 3) % classes
    axes = torch.eye(1 + classes + len(target))
    z = 0.3**0.5 * axes[0] + 0.1**0.5 * axes[1 + target] + 0.6**0.5 * axes[1 + classes :]
    assert contrastive_margin(z, target, margin=0.1).item() == pytest.approx(0.6 + 0.2, abs=1e-6)


# ---------------------------------------------------------------- contrastive losses: what must hold


@pytest.mark.parametrize("loss", CONTRASTIVE)
@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_one_hot_targets_are_class_numbers(loss, beta):
    z, hard, _ = case(dtype=torch.float32)
    found = loss(z, F.one_hot(hard, C).float(), hard_negatives=beta)
    assert found == loss(z, hard, hard_negatives=beta)
    assert found == loss(z, F.one_hot(hard, C), hard_negatives=beta)


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_hard_negatives_begin_at_the_plain_loss_and_raise_it(loss):
    z, hard, soft = case()
    for target in (hard, soft):
        by_beta = [loss(z, target, hard_negatives=beta).item() for beta in (0, 1e-7, 1, 4, 1e4)]
        assert by_beta[0] == loss(z, target).item()
        assert by_beta[1] == pytest.approx(by_beta[0], rel=1e-6)
        assert by_beta == sorted(by_beta)  # up to the mean of each row's worst negative
        assert math.isfinite(by_beta[-1])


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_order_of_rows_does_not_matter(loss):
    z, hard, soft = case()
    order = torch.randperm(B, generator=torch.Generator().manual_seed(5))
    for target in (hard, soft):
        wanted = value_and_gradient(loss, z, target, hard_negatives=1.0)
        found = value_and_gradient(loss, z[order], target[order], hard_negatives=1.0)
        assert torch.allclose(found[0], wanted[0])
        assert torch.allclose(found[1], wanted[1][order])


def test_an_easy_negative_is_never_pulled_nearer():
    """Were the weights of hard negatives differentiated, row 2, which is beyond the margin, would be drawn in to take weight."""
    z = torch.tensor([[1.0, 0], [0.9, 0.19**0.5], [0, 1]])
    _, gradient = value_and_gradient(contrastive_margin, z, torch.tensor([0, 1, 2]), hard_negatives=2.0)
    assert (gradient[2] == 0).all()
    assert (gradient[:2] != 0).any()


@pytest.mark.parametrize("loss", CONTRASTIVE)
@pytest.mark.parametrize("beta", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_in_the_corners(loss, beta, dtype):
    z, hard, soft = case(dtype=dtype)
    equal, one_class = z[:1].expand(B, D), torch.zeros(B, dtype=torch.long)
    alone = torch.arange(B)
    corners = [(z, one_class), (equal, hard), (equal, one_class), (equal, alone), (z, alone), (0 * z, soft), (z[:1], hard[:1])]
    for rows, target in [*corners, (z[:1], soft[:1]), (z[:0], hard[:0]), (z[:0], soft[:0]), (z, F.one_hot(one_class, C))]:
        with torch.autograd.set_detect_anomaly(True):  # a NaN on the way that is masked later counts as well
            value, gradient = value_and_gradient(loss, rows, target, hard_negatives=beta)
        assert value.dtype == dtype
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_a_batch_without_positives_is_exactly_zero():
    z, _, _ = case()
    for target in (torch.arange(B), torch.eye(B)):
        for beta in (0.0, 3.0):
            value, gradient = value_and_gradient(supervised_contrastive, z, target, hard_negatives=beta)
            assert value == 0
            assert (gradient == 0).all()
    assert contrastive_margin(z, torch.zeros(B)) == pytest.approx(1 - (z @ z.T).sum().sub(B).item() / (B * (B - 1)))


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_soft_targets_that_do_not_quite_sum_to_one(loss):
    z, hard, _ = case(dtype=torch.float32)
    wanted = value_and_gradient(loss, z, hard, hard_negatives=1.0)
    found = value_and_gradient(loss, z, 1.0000002 * F.one_hot(hard, C), hard_negatives=1.0)
    assert torch.allclose(found[0], wanted[0])
    assert torch.allclose(found[1], wanted[1], atol=1e-6)


def test_low_temperature_does_not_overflow():
    z, hard, _ = case(dtype=torch.float32)
    wanted = supervised_contrastive(z.double(), hard, temperature=1e-3, hard_negatives=2.0)
    found = supervised_contrastive(z, hard, temperature=1e-3, hard_negatives=2.0)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_float32_inside_under_autocast(loss):
    z, hard, soft = case(dtype=torch.float32)
    for target in (hard, soft):
        wanted = loss(z, target, hard_negatives=1.0), loss(z.bfloat16().float(), target, hard_negatives=1.0)
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(z, target, hard_negatives=1.0), loss(z.bfloat16(), target, hard_negatives=1.0)
        assert found == wanted
        assert found[1].dtype == torch.float32


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_contrastive_gradients_by_differences(loss):
    z, hard, soft = case()
    for target in (hard, soft, torch.zeros(B)):
        assert torch.autograd.gradcheck(lambda rows, target=target: loss(rows, target), z.requires_grad_())


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_descent_sorts_rows_by_class(loss):
    z, hard, _ = case(dtype=torch.float32)
    free = z.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss(F.normalize(free, dim=1), hard, hard_negatives=1.0).backward()
        optimizer.step()
    cosine = F.normalize(free.detach(), dim=1)
    cosine, same = cosine @ cosine.T, hard[:, None] == hard
    assert cosine[same].min() > cosine[~same].max() + 0.2


# ---------------------------------------------------------------- likelihood


def test_nll_by_hand():
    log_probs, target = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]).log(), torch.tensor([1, 2])
    assert nll(log_probs, target).item() == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)
    soft = torch.tensor([[0.5, 0.5, 0], [0, 0, 1]])
    assert nll(log_probs, soft).item() == pytest.approx((1.5 * math.log(2) + math.log(4 / 3)) / 2)
    # 0.3 of the target goes to the three classes alike
    wanted = 0.8 * math.log(4) + 0.1 * math.log(2) + 0.1 * math.log(4) + 0.8 * math.log(4 / 3) + 0.2 * math.log(8)
    assert nll(log_probs, target, 0.3).item() == pytest.approx(wanted / 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_nll_is_cross_entropy(smoothing):
    logits = torch.randn(B, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    _, hard, soft = case()
    for target in (hard, soft):
        found, wanted = nll(logits.log_softmax(1), target, smoothing), F.cross_entropy(logits, target, label_smoothing=smoothing)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    one_hot = F.one_hot(hard, C).double()
    assert nll(logits.log_softmax(1), one_hot, smoothing).item() == pytest.approx(nll(logits.log_softmax(1), hard, smoothing).item())
    assert torch.autograd.gradcheck(lambda x: nll(x, soft, smoothing), logits)


def test_an_impossible_class_that_is_not_asked_for_costs_nothing():
    log_probs = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    for target in (torch.tensor([0]), torch.tensor([[1.0, 0.0]])):
        loss = nll(log_probs, target)
        assert loss == 0
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert gradient.tolist() == [[-1, 0]]


def test_nll_in_bfloat16():
    log_probs, target = torch.randn(B, C).log_softmax(1).bfloat16(), torch.arange(B) % C
    with torch.autocast("cpu", torch.bfloat16):
        found = nll(log_probs, target, 0.1), nll(log_probs, F.one_hot(target, C).bfloat16(), 0.1)
    for value in found:
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(nll(log_probs.float(), target, 0.1).item(), rel=1e-6)


# ---------------------------------------------------------------- collapse


def test_collapse_by_hand():
    weights = torch.tensor([[0.25] * 4, [0, 1.0, 0, 0], [0.5, 0, 0.5, 0], [0.5, 0.25, 0.25, 0]])
    wanted = [0, math.log(4), math.log(2), math.log(4) - 1.5 * math.log(2)]
    for row, value in zip(weights, wanted, strict=True):
        assert collapse(row[None]).item() == pytest.approx(value, abs=1e-6)
    assert collapse(weights).item() == pytest.approx(sum(wanted) / 4)
    mask = torch.tensor([[False] * 4, [False, True, False, False], [True, False, True, False], [True, True, True, False]])
    # no neighbor: no row. One neighbor, and two alike: as uniform as can be
    assert collapse(weights, mask).item() == pytest.approx((0 + 0 + math.log(3) - 1.5 * math.log(2)) / 3, abs=1e-6)
    assert collapse(weights, mask & False) == 0


def test_collapse_by_loops():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(B, K, generator=generator) > 0.3
    mask[0], mask[1] = True, False
    weights = torch.randn(B, K, generator=generator).masked_fill(~mask, -torch.inf).softmax(1).nan_to_num(0)
    rows = []
    for b in range(B):
        there = [weights[b, j].item() for j in range(K) if mask[b, j]]
        if there:
            rows.append(math.log(len(there)) + sum(w * math.log(w) for w in there if w))
    assert collapse(weights, mask).item() == pytest.approx(sum(rows) / len(rows), rel=1e-5)
    order = torch.randperm(K, generator=generator)
    assert collapse(weights[:, order], mask[:, order]).item() == pytest.approx(collapse(weights, mask).item(), rel=1e-5)
    assert collapse(weights.masked_fill(~mask, torch.nan), mask) == collapse(weights, mask)


def test_collapse_has_finite_gradients_at_zero_and_none_at_uniform():
    weights = torch.tensor([[0.0, 1, 0], [0, 0, 0], [0.5, 0.5, 0]], requires_grad=True)
    mask = torch.tensor([[True] * 3, [False] * 3, [True, True, False]])
    collapse(weights, mask).backward()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()
    assert (weights.grad[~mask] == 0).all()
    logits = torch.zeros(B, K, requires_grad=True)
    collapse(logits.softmax(1)).backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-7


def test_collapse_gradients_by_differences_and_dtypes():
    logits = torch.randn(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    mask = torch.arange(K) < torch.arange(B)[:, None] % K
    assert torch.autograd.gradcheck(lambda x: collapse(x.softmax(1)), logits)
    assert torch.autograd.gradcheck(lambda x: collapse(x.masked_fill(~mask, -1e9).softmax(1), mask), logits)
    weights = logits.detach().softmax(1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert collapse(weights) == collapse(weights.float())


# ---------------------------------------------------------------- refusals


def test_refusals():
    z, hard, _ = case()
    with pytest.raises(BadOption, match="temperature must be above 0, got 0"):
        supervised_contrastive(z, hard, temperature=0)
    with pytest.raises(BadOption, match=r"margin is a cosine, from -1 to 1, got 1\.5"):
        contrastive_margin(z, hard, margin=1.5)
    for loss in CONTRASTIVE:
        with pytest.raises(BadOption, match="hard_negatives must be 0 or more, got -1"):
            loss(z, hard, hard_negatives=-1)
    with pytest.raises(BadOption, match="label_smoothing must be from 0 to 1, got 2"):
        nll(z, hard, 2)
