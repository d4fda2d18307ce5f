"""The linear head against its formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from classifiers import LinearHead


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
