"""Crops, noise, MixUp and CutMix, worked out by hand or against their distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inputs.augmentation import cropped, mixup, normals
from inputs.rows import Batch
from tests.inputs.made import CPU


def test_cropped_by_hand():
    x = torch.arange(20, dtype=torch.uint8).view(1, 1, 4, 5).repeat(2, 1, 1, 1)  # (2, 3) in the middle
    draws = np.array([[0.0, 0.99, 0.5], [0.5, 0.5, 0.49], [0.99, 0.0, 0.0]])
    found = cropped(x, torch.tensor([0, 1, 0]), draws, 1, True)[:, 0].tolist()
    assert found == [[[2, 3, 4], [7, 8, 9]], [[8, 7, 6], [13, 12, 11]], [[12, 11, 10], [17, 16, 15]]]
    assert cropped(x, torch.tensor([0]), draws[2:], 1, False)[0, 0].tolist() == [[10, 11, 12], [15, 16, 17]]


def test_normals_are_normal():
    draws = normals(7, np.arange(1009), 101, CPU)
    assert draws.shape == (1009, 101)
    assert draws.isfinite().all()
    flat = draws.double().flatten().sort().values
    n = len(flat)
    normal = torch.distributions.Normal(0, 1)
    steps = (torch.arange(n) + 0.5) / n
    assert (normal.cdf(flat) - steps).abs().max() < 1.95 / n**0.5  # Kolmogorov-Smirnov at 0.1 %
    assert torch.equal(normals(7, np.array([13, 5]), 101, CPU), draws[[13, 5]])


# ---------------------------------------------------------------- two rows in one


def batch(rows: int = 5, height: int = 7, width: int = 11) -> Batch:
    x = torch.arange(1.0, rows + 1).view(-1, 1, 1, 1).expand(rows, 2, height, width).contiguous()  # each row its own gray
    return Batch(x, torch.tensor([2, 0, 1, 2, 0][:rows]), torch.arange(100, 100 + rows))


def test_off_is_off():
    given = batch()
    assert mixup(given, 3, 0.0, 0.0, seed=0) is given


@pytest.mark.parametrize("seed", range(5))
def test_mixup_by_hand(seed):
    given, found = batch(), mixup(batch(), 3, 0.7, 0.0, seed)
    keep = ((found.x[0, 0, 0, 0] - 5) / (1 - 5)).item()  # row 0 is mixed with row 4
    assert 0 < keep < 1
    torch.testing.assert_close(found.x, keep * given.x + (1 - keep) * given.x.flip(0))
    one_hot = torch.eye(3)[given.target]
    torch.testing.assert_close(found.target, keep * one_hot + (1 - keep) * one_hot.flip(0))
    torch.testing.assert_close(found.target.sum(1), torch.ones(5))
    assert found.index.tolist() == [[100, 104], [101, 103], [102, 102], [103, 101], [104, 100]]
    assert torch.equal(mixup(batch(), 3, 0.7, 0.0, seed).x, found.x)


@pytest.mark.parametrize("seed", range(7))
def test_cutmix_by_hand(seed):
    given, found = batch(), mixup(batch(), 3, 0.0, 1.0, seed)
    pasted = found.x[0, 0] == 5
    share = pasted.double().mean().item()
    rows, columns = pasted.any(1).sum().item(), pasted.any(0).sum().item()
    assert pasted.sum() == rows * columns  # one rectangle
    assert abs(rows / 7 - columns / 11) <= 0.5 / 7 + 0.5 / 11 + 1e-9  # of the image's own shape, to a pixel
    assert torch.equal(found.x[:, 0] == given.x.flip(0)[:, 0], pasted.expand(5, 7, 11) | (given.x[:, 0] == given.x.flip(0)[:, 0]))
    assert torch.equal(found.x[2], given.x[2])  # the middle row is its own mirror
    one_hot = torch.eye(3)[given.target]
    torch.testing.assert_close(found.target, (1 - share) * one_hot + share * one_hot.flip(0))
    assert found.index.tolist() == [[100, 104], [101, 103], [102, 102], [103, 101], [104, 100]]
    assert torch.equal(given.x, batch().x)  # the batch that was given is left alone


def test_with_both_a_coin_decides():
    kinds = []
    for seed in range(101):
        values = mixup(batch(), 3, 1.0, 1.0, seed).x[0].unique()
        kinds.append(set(values.tolist()) <= {1.0, 5.0})
    assert 30 < sum(kinds) < 71


def test_shares_follow_the_beta_distribution():
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1))."""
    for alpha in (0.2, 1.0, 5.0):
        keep = np.array([(mixup(batch(), 3, alpha, 0.0, seed).x[0, 0, 0, 0].item() - 5) / -4 for seed in range(1009)])
        variance = 1 / (4 * (2 * alpha + 1))
        assert abs(keep.mean() - 0.5) < 5 * (variance / 1009) ** 0.5
        assert abs(keep.var() / variance - 1) < 0.2


def test_table_rows_are_mixed_and_never_cut():
    given = Batch(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 1, 0]), torch.arange(3))
    found = mixup(given, 2, 0.0, 1.0, seed=3)
    assert 1 < found.x[0, 0] < 5
    assert found.target.shape == (3, 2)


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize(("mixup_alpha", "cutmix_alpha"), [(0.7, 0.0), (0.0, 1.0), (0.7, 1.0)])
def test_mixing_keeps_embedded(embedded, mixup_alpha, cutmix_alpha):
    given = Batch(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 1, 0]), torch.arange(3), embedded)
    for seed in range(5):
        found = mixup(given, 2, mixup_alpha, cutmix_alpha, seed)
        assert found.embedded is embedded
        assert 1 < found.x[0, 0] < 5
    assert mixup(given, 2, 0.0, 0.0, 0) is given
    assert not Batch(given.x, given.target, given.index).embedded
