"""Proxies: the loss by hand, of hard and soft targets, and what it teaches."""

import math

import pytest
import torch
import torch.nn.functional as F

from classifiers.neighbor_heads import KnnHead
from classifiers.proxies import Proxies


def test_loss_by_hand() -> None:
    """Cosines 1 and 0 over 0.1: the logits 10 and 0. A proxy's length does not count."""
    proxies = Proxies(2, 2)
    with torch.no_grad():
        proxies.vectors.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.1]]))
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    right, wrong = math.log1p(math.exp(-10)), 10 + math.log1p(math.exp(-10))
    assert proxies(x, torch.tensor([0, 1, 1])).item() == pytest.approx((2 * right + wrong) / 3, rel=1e-5)
    soft = torch.tensor([[0.7, 0.3], [0.0, 1.0], [1.0, 0.0]])
    assert proxies(x, soft).item() == pytest.approx((0.7 * right + 0.3 * wrong + 2 * right) / 3, rel=1e-5)
    smoothed = (0.9 * (2 * right + wrong) + 0.1 * 3 * (right + wrong) / 2) / 3
    assert proxies(x, torch.tensor([0, 1, 1]), 0.1).item() == pytest.approx(smoothed, rel=1e-5)


def test_they_draw_embeddings_apart_where_votes_and_pairs_teach_nothing() -> None:
    """Rows of one class each: no positive pair, and the only neighbors are of other classes."""
    torch.manual_seed(0)
    head = KnnHead(5, 7, embed_dim=11, proxy_weight=1.0, contrastive_weight=0.0)
    x, target = torch.randn(7, 5), torch.arange(7)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    before = head.proxies(head.embed(x), target).item() if head.proxies is not None else 0
    for _ in range(60):
        optimizer.zero_grad()
        assert head.proxies is not None
        head.proxies(head.embed(x), target).backward()
        optimizer.step()
    assert head.proxies is not None
    assert head.proxies(head.embed(x), target).item() < 0.1 * before
    closest = F.normalize(head.proxies.vectors, dim=1)
    assert (head.embed(x) @ closest.T).argmax(1).tolist() == target.tolist()


def test_without_weight_there_are_none() -> None:
    assert KnnHead(5, 3, proxy_weight=0.0).proxies is None
