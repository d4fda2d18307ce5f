"""TabR's values: by hand, by loops over neighbors, and what a missing neighbor must not reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from classifiers.values import TabrValues

B, K, D, C = 13, 11, 7, 5


def case(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(B, D, generator=generator, dtype=torch.float64) for _ in range(2))
    keys = torch.randn(B, K, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(C, (B, K), generator=generator)
    mask = torch.rand(B, K, generator=generator) > 0.3
    mask[0], mask[1], mask[2] = True, False, torch.arange(K) == 4
    raw = torch.rand(B, K, generator=generator, dtype=torch.float64) * mask
    weights = raw / raw.sum(1, keepdim=True).clamp_min(1e-9)
    return weights.to(dtype), query.to(dtype), key.to(dtype), keys.to(dtype), labels, mask


def module(seed: int = 0, **options) -> TabrValues:
    torch.manual_seed(seed)
    values = TabrValues(D, C, **options)
    for parameter in values.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return values


def slow(values, weights, query, key, keys, labels, *, there):
    """A neighbor at a time, each through all of T; those that are missing are left out before anything is computed."""
    rows = []
    for b in range(B):
        total = query[b]
        for j in range(K):
            if there[b, j]:
                said = values.difference_out(values.difference(key[b] - keys[b, j]))
                total = total + weights[b, j] * (values.label_embedding.weight[labels[b, j]] + said)
        rows.append(values.readout(total).softmax(0))
    return torch.stack(rows)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_by_loops(seed, masked):
    *inputs, mask = case(seed, torch.float64)
    values = module(seed).double()
    found = values(*inputs, mask if masked else None)
    error = (found - slow(values, *inputs, there=mask if masked else torch.ones_like(mask))).abs()
    assert found.shape == (B, C)
    assert found.dtype == torch.float64
    assert error.max() < 1e-12, (error.max().item(), error.mean().item())
    assert torch.allclose(found.sum(1), torch.ones(B, dtype=torch.float64))


def test_by_hand():
    """D = 2, C = 2: T doubles the positive part of the first coordinate of the difference and puts it into the second."""
    values = TabrValues(2, 2)
    values.readout = torch.nn.Sequential(torch.nn.Identity())
    with torch.no_grad():
        values.label_embedding.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        for parameter in [*values.difference.parameters(), values.difference_out.weight]:
            parameter.zero_()
        dict(values.difference.named_parameters())["0.weight"][3, 0] = 1.0
        values.difference_out.weight[1, 3] = 2.0
    weights, labels = torch.tensor([[0.25, 0.5, 0.25]]), torch.tensor([[0, 1, 0]])
    query, key = torch.tensor([[10.0, 20.0]]), torch.tensor([[3.0, 0.0]])
    keys = torch.tensor([[[1.0, 9.0], [2.5, 9.0], [7.0, 9.0]]])  # differences 2, 0.5 and -4
    # labels: (0.5, 0.5). T: 2 x (0.25 x 2 + 0.5 x 0.5 + 0.25 x 0) in the second
    found = values(weights, query, key, keys, labels)
    assert torch.allclose(found, torch.tensor([[10.5, 20.5 + 1.5]]).softmax(1))
    third = torch.tensor([[False, False, True]])
    assert torch.allclose(values(weights, query, key, keys, labels, third), torch.tensor([[10.25, 20.0]]).softmax(1))


def test_a_missing_neighbor_reaches_neither_value_nor_gradient():
    weights, query, key, keys, labels, mask = case()
    values = module()
    wanted = values(weights, query, key, keys, labels, mask)
    nonsense = weights.masked_fill(~mask, torch.nan), query, key, keys.masked_fill(~mask[..., None], torch.nan)
    given = [x.clone().requires_grad_() for x in nonsense]
    found = values(*given, labels.masked_fill(~mask, -1), mask)
    assert (found == wanted).all()
    (found * torch.randn(B, C)).sum().backward()
    for name, tensor in [*values.named_parameters(), *zip(("weights", "query", "key", "keys"), given, strict=True)]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
    assert given[0].grad is not None
    assert given[3].grad is not None
    assert (given[0].grad[~mask] == 0).all()
    assert (given[3].grad[~mask] == 0).all()
    assert given[3].grad[mask].abs().sum() > 0


def test_a_query_without_neighbors_is_read_out_alone():
    inputs, values = case(), module()
    assert torch.allclose(values(*inputs)[1], values.readout(inputs[1][1]).softmax(0))


def test_order_of_neighbors_does_not_matter():
    weights, query, key, keys, labels, mask = case()
    values, order = module(), torch.randperm(K, generator=torch.Generator().manual_seed(2))
    found = values(weights[:, order], query, key, keys[:, order], labels[:, order], mask[:, order])
    assert torch.allclose(found, values(weights, query, key, keys, labels, mask), atol=1e-6)


def test_gradients_by_differences():
    *given, labels, mask = case(dtype=torch.float64)
    values = module().double()
    rows = slice(0, 3)  # all neighbors, none, and one
    inputs = [x[rows].clone().requires_grad_() for x in given]
    assert torch.autograd.gradcheck(lambda *x: values(*x, labels[rows], mask[rows]), inputs)


def test_gradients_reach_everything_from_the_first_step():
    torch.manual_seed(0)
    values = TabrValues(D, C)
    *given, labels, mask = case()
    inputs = [x.requires_grad_() for x in given]
    (values(*inputs, labels, mask) * torch.randn(B, C)).sum().backward()
    for name, tensor in [*values.named_parameters(), *zip(("weights", "query", "key", "keys"), inputs, strict=True)]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.abs().sum() > 0, name


def test_dropout_is_off_in_evaluation():
    inputs, values = case(), module(dropout=0.5)
    assert (values(*inputs) != values(*inputs)).any()
    values.eval()
    assert (values(*inputs) == values(*inputs)).all()
    assert (values(*inputs) == module()(*inputs)).all()


def test_labels_begin_as_long_as_the_query():
    length = TabrValues(211, 101).label_embedding.weight.norm(dim=1)
    assert length.mean().item() == pytest.approx(1, abs=0.05)


def test_weights_in_float32_whatever_the_rest_is():
    weights, *rest = case(dtype=torch.float64)
    values = module().double()
    assert torch.allclose(values(weights.float(), *rest), values(weights, *rest), atol=1e-6)


def test_in_bfloat16_and_under_autocast():
    weights, query, key, keys, labels, mask = case()
    values = module()
    wanted = values(weights, query, key, keys, labels, mask)
    with torch.autocast("cpu", torch.bfloat16):
        found = values(weights, query, key, keys, labels, mask)
        halves = values(weights, query, key.bfloat16(), keys.bfloat16(), labels, mask)
    for probs in (found, halves):
        assert probs.dtype == torch.float32
        assert torch.allclose(probs.sum(1), torch.ones(B), atol=1e-6)
        assert (probs - wanted).abs().max() < 0.05


def test_near_keys_are_told_apart_under_autocast():
    """Differences of 1e-3 between keys of length 10: each key alone is rounded to 3e-2 in bfloat16."""
    weights, query, key, keys, labels, mask = case()
    values = module()
    with torch.no_grad():
        dict(values.difference.named_parameters())["0.weight"].mul_(1e3)
    inputs = weights, query, 4 + 1e-3 * key, 4 + 1e-3 * keys, labels, mask
    wanted = values(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert (values(*inputs) - wanted).abs().max() < 0.05


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_nothing_is_larger_than_the_hidden_layer():
    classes = 211  # one-hot labels of all neighbors would have B K C numbers
    values = TabrValues(D, classes)
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in case()]
    with Largest() as largest:
        values(*inputs).sum().backward()
    assert B * K * D < largest.numel <= max(B * K * 2 * D, B * classes)
