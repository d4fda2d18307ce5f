"""Dropout in compiled code is that of torch's operators, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import native
from layers import dropout
from layers.compiled import Absent
from layers.dropout import drawing, dropped
from layers.functional import full_precision

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler here")
ROWS = torch.tensor([3, 1, 4, 15, 92])


def both(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """What is left of x, and the gradient of the sum of its squares."""
    x = x.detach().requires_grad_()
    with drawing(7, 2**33, 5, ROWS):
        dropped(x, 0.5)  # the second place draws something else than the first
        found = dropped(x, p)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    return found.detach(), gradient


@pytest.mark.parametrize("p", [1e-12, 0.1, 0.37, 0.9, 1 - 1e-12])
@pytest.mark.parametrize("shape", [(5, 1), (5, 13), (15, 7, 3), (5, 4, 17, 19), (5, 20011)])
def test_compiled_or_not_the_same_numbers_stay(shape: tuple[int, ...], p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[::5] = float("-inf")
    compiled = both(x, p)
    monkeypatch.setattr(dropout, "native", Absent())
    torch.testing.assert_close(compiled, both(x, p), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_and_any_order_in_memory(threads: int) -> None:
    before = torch.get_num_threads()
    x = torch.randn(5, 401, 53, generator=torch.Generator().manual_seed(2))
    try:
        torch.set_num_threads(threads)
        found = both(x, 0.3)
        turned = both(x.transpose(1, 2).contiguous().transpose(1, 2), 0.3)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(turned, found, rtol=0, atol=0)
    assert torch.equal(found[0] == 0, full_precision(both(torch.ones_like(x).bfloat16(), 0.3)[0]) == 0)  # of half precision, the same


def test_a_gradient_has_a_gradient() -> None:
    x = torch.randn(5, 13, requires_grad=True)
    with drawing(7, 2, 0, ROWS):
        found = dropped(x, 0.3)
    (first,) = torch.autograd.grad((found**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    scale = torch.where(found == 0, 0, 1 / 0.7)
    torch.testing.assert_close(second, 6 * x.detach() * scale**3)


def test_sizes_and_kinds_are_checked() -> None:
    x, keys, numbers = torch.ones(5, 4), torch.ones(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    native.dropped(x, keys, numbers, 0, 1.0)
    for wrong in ((x, keys[:4], numbers), (x, keys, numbers[:3]), (x, keys.long(), numbers)):
        with pytest.raises(ValueError, match=r"^dropped: \(5, 4\) must be"):
            native.dropped(*wrong, 0, 1.0)
