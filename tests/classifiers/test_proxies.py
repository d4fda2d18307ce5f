"""Proxies: the loss by hand, of hard and soft targets, and what it teaches."""

import math

import pytest
import torch
from torch import nn

from classifiers.neighbor_heads import KnnHead
from classifiers.proxies import Proxies


def test_loss_by_hand() -> None:
    """Products: the logits 3 and 0, 0 and 0.7, 0.6 and 0."""
    proxies = Proxies(2, 2)
    with torch.no_grad():
        proxies.vectors.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.1]]))
    x = torch.tensor([[1.0, 0.0], [0.0, 7.0], [0.2, 0.0]])
    right = [math.log1p(math.exp(-gap)) for gap in (3, 0.7, 0.6)]
    wrong = [gap + loss for gap, loss in zip((3, 0.7, 0.6), right, strict=True)]
    first = right[0] + right[1] + wrong[2]
    assert proxies(x, torch.tensor([0, 1, 1])).item() == pytest.approx(first / 3, rel=1e-5)
    soft = torch.tensor([[0.7, 0.3], [0.0, 1.0], [1.0, 0.0]])
    assert proxies(x, soft).item() == pytest.approx((0.7 * right[0] + 0.3 * wrong[0] + right[1] + right[2]) / 3, rel=1e-5)
    smoothed = (0.9 * first + 0.1 * (sum(right) + sum(wrong)) / 2) / 3
    assert proxies(x, torch.tensor([0, 1, 1]), 0.1).item() == pytest.approx(smoothed, rel=1e-5)


def test_they_draw_features_apart_where_votes_and_pairs_teach_nothing() -> None:
    """Rows of one class each: no positive pair, and the only neighbors are of other classes."""
    torch.manual_seed(0)
    backbone, head = nn.Linear(5, 11), KnnHead(11, 7, contrastive_weight=0.0, proxy_weight=3.0)
    assert head.proxies is not None
    x, target = torch.randn(7, 5), torch.arange(7)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=0.01)
    before = head.proxies(backbone(x), target).item()
    for _ in range(100):
        optimizer.zero_grad()
        head.proxies(backbone(x), target).backward()
        optimizer.step()
    assert head.proxies(backbone(x), target).item() < 0.1 * before
    assert (backbone(x) @ head.proxies.vectors.T).argmax(1).tolist() == target.tolist()


def test_without_weight_there_are_none() -> None:
    assert KnnHead(5, 3).proxies is None
    head = KnnHead(5, 3, proxy_weight=2.0)
    assert {head.part_of(name) for name, _ in head.named_parameters() if name.startswith("proxies")} == {"head"}
