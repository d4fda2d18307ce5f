"""Attention over lists in one call of the C code: what is chosen, sums, weights and gradients, against float64 and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import layers
import native
from layers import lists
from tests.native.reference import SIZES, assert_near, heads, random

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler here")

CHOICES = ("among", "places")
ATTENDED = [size for size in SIZES if size[3] >= size[5]]


KINDS = ["nearest", "given", "shared, with a bias", "first", "among", "among, first", "places"]


def chosen_by(kind: str, N: int, M: int, H: int, K: int) -> dict[str, Any]:
    """How `attend` chooses lists of this kind."""
    generator = torch.Generator().manual_seed(9)
    if kind.startswith("among"):
        return {"among": torch.randperm(M, generator=generator)[: max(K, M // 2)].sort().values}
    if kind == "places":
        S = K // 2
        return {"places": torch.rand(H, N, M - (K - S), generator=generator).argsort(-1)[..., :S]}
    return {}


def fits(kind: str, N: int, M: int, K: int) -> bool:
    return (K > 1 and (N == M if kind.startswith("among") else kind != "places" or M > K)) or kind in KINDS[:4]


@pytest.mark.parametrize(
    ("kind", "size"), [(kind, size) for kind in KINDS for size in ATTENDED if fits(kind, size[2], size[3], size[5])], ids=str
)
def test_attention_over_lists(size: tuple[int, ...], kind: str, threads: int) -> None:
    """Sums, weights and all gradients against float64, with and without dropout and factors; values have a width of their own."""
    B, H, N, M, D, K = size
    given = None if kind == "nearest" else random(B, H, N, M, seed=5).argsort(-1)[..., :K]
    index = given[0, 0] if given is not None and kind == "shared, with a bias" else given
    bias = random(N, K, seed=6) if kind == "shared, with a bias" else None
    if bias is not None and K > 1:
        bias[0, 1] = -torch.inf
    for dropout, factors in ((False, ()), (True, (D + 3,)), (True, (5, D + 3))):
        keep = (random(B, H, N, K, seed=7) > 0).float() * 2 if dropout else None
        ours = [heads(B, H, n, d, s).clone().requires_grad_() for s, (n, d) in enumerate(((N, D), (M, D), (M, D + 3)))]
        ours += [random(K, *factors, seed=3).requires_grad_()] if factors else []
        exact = [t.detach().double().requires_grad_() for t in ours]
        options: dict[str, Any] = {"index": index, "first": 1.0 if "first" in kind else None, **chosen_by(kind, N, M, H, K)}
        found = lists.attend(ours[0], ours[1], ours[2], K, 0.3, keep=keep, bias=bias, kernel=ours[3] if factors else None, **options)
        if index is None:  # in float32 two scores may change places
            options = {"index": found.lists, "first": options["first"]}
            assert torch.equal(found.lists, lists.chosen(ours[0], ours[1], K, *(chosen_by(kind, N, M, H, K).get(how) for how in CHOICES)))
        parts = {"keep": keep, "bias": bias, "kernel": exact[3] if factors else None}
        of_double: dict[str, Any] = {name: t if t is None else t.double() for name, t in parts.items()}
        wanted = lists.attend(exact[0], exact[1], exact[2], K, 0.3, **of_double, **options)
        assert_near(found.out, wanted.out)
        torch.testing.assert_close(found.weight.double(), wanted.weight, atol=2e-6, rtol=2e-5)
        grad = random(*found.out.shape, seed=8)
        of_ours, of_exact = torch.autograd.grad(found.out, ours, grad), torch.autograd.grad(wanted.out, exact, grad.double())
        for one, other in zip(of_ours, of_exact, strict=True):
            assert_near(one, other)


def test_a_gradient_of_the_gradient_is_that_of_the_pieces() -> None:
    q, k, v = (heads(1, 2, 7, 4, seed).double().requires_grad_() for seed in range(3))
    assert torch.autograd.gradgradcheck(lambda q, k, v: lists.attend(q, k, v, 3, 0.5).out, (q, k, v), fast_mode=True)


def test_hooks_of_inputs_run_once() -> None:
    found = []
    for again in (False, True):
        q, k, v = (heads(1, 2, 7, 4, seed).clone().requires_grad_() for seed in range(3))
        doubled = k * 1
        doubled.register_hook(lambda gradient: 2 * gradient)
        found.append(torch.autograd.grad(lists.attend(q, doubled, v, 3, 0.5).out.square().sum(), [q, k, v], create_graph=again))
    for one, other in zip(*found, strict=True):
        assert_near(one, other.double())


def test_what_looks_on_sees_the_operator(tmp_path: Path) -> None:
    """A trace that is saved, with gradients enabled; and a function that is mapped over a batch."""
    layer = layers.build("KvtAttention", dim=12, num_heads=3, K=3).eval()
    x = torch.randn(2, 1, 7, 12, generator=torch.Generator().manual_seed(1))
    torch.jit.save(torch.jit.trace(layer, x[0], check_trace=False), tmp_path / "layer.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(x[1]), layer(x[1]))
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(one) for one in x]))


def test_a_jacobian_of_a_frozen_layer() -> None:
    layer = layers.build("KvtAttention", dim=12, num_heads=3, K=3).eval().requires_grad_(False)
    x = torch.randn(1, 7, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.func.jacrev(layer)(x), torch.autograd.functional.jacobian(layer, x))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_another_default_type(kind: torch.dtype) -> None:
    q, k, v = (heads(1, 2, 7, 4, seed).clone().requires_grad_() for seed in range(3))

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(lists.attend(q, k, v, 3, 0.5, first=0.25).out.square().sum(), [q, k, v])

    wanted = gradients()
    torch.set_default_dtype(kind)
    try:
        found = gradients()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("uses", ["weight", "out and weight"])
def test_weights_have_a_gradient_too(uses: str) -> None:
    ours = [heads(1, 2, 7, 4, seed).clone().requires_grad_() for seed in range(3)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    found = lists.attend(ours[0], ours[1], ours[2], 3, 0.5)
    wanted = lists.composed(exact[0], exact[1], exact[2], found.lists, 3, 0.5, None, None, None, None)
    factor = random(1, 2, 7, 3, seed=4)

    def gradients(attended: lists.Attended, inputs: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        loss = (attended.weight * factor.to(attended.weight.dtype)).sum() + (attended.out.sum() if "out" in uses else 0)
        return torch.autograd.grad(loss, inputs, allow_unused=True)

    assert not found.lists.requires_grad
    for one, other in zip(gradients(found, ours), gradients(wanted, exact), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_near(one, other)


def test_what_has_no_gradient_is_not_silently_frozen() -> None:
    q, k, v = (heads(1, 2, 7, 4, seed) for seed in range(3))
    with pytest.raises(ValueError, match="bias and keep have no gradient"):
        lists.attend(q, k, v, 3, 0.5, bias=torch.zeros(3, requires_grad=True))


def test_what_is_no_number_stays_in_its_row() -> None:
    q, k, v = (heads(1, 2, 11, 8, seed).clone() for seed in range(3))
    clean = native.attend(q, k, v, None, 3, 0.5)
    q[0, 1, 4, 2] = torch.nan
    found = native.attend(q, k, v, None, 3, 0.5)
    assert found[2][0, 1, 4].isnan().all()
    for before, after in zip(clean, found, strict=True):
        after[0, 1, 4] = before[0, 1, 4]
        assert torch.equal(before, after)


def test_itself_then_the_nearest_of_the_candidates_by_hand() -> None:
    """Products are 10 x row + column's value: 3, 1, 2, 9, 9 for columns 0 to 4; candidates 0, 2, 3, 4."""
    q, k = torch.ones(1, 1, 5, 1), torch.tensor([3.0, 1, 2, 9, 9]).view(1, 1, 5, 1)
    found = lists.attend(q, k, k, 3, 1.0, among=torch.tensor([0, 2, 3, 4]))
    assert found.lists[0, 0].tolist() == [[0, 3, 4], [1, 3, 4], [2, 3, 4], [3, 4, 0], [4, 3, 0]]
    torch.testing.assert_close(found.weight[0, 0, 3], torch.tensor([9.0, 9, 3]).softmax(0))
    first = lists.attend(q, k, k, 3, 1.0, among=torch.tensor([0, 2, 3, 4]), first=2.0)
    torch.testing.assert_close(first.weight[0, 0, 1], torch.tensor([2.0, 9, 9]).softmax(0))
    torch.testing.assert_close(first.out[0, 0, 1], (torch.tensor([2.0, 9, 9]).softmax(0) * torch.tensor([1.0, 9, 9])).sum()[None])


def test_others_follow_by_their_places_by_hand() -> None:
    """The two nearest are columns 3 and 4 in one head, 0 and 2 in the other; others are counted without them."""
    k = torch.tensor([[3.0, 1, 2, 9, 9], [9, 1, 8, 3, 2]]).view(1, 2, 5, 1)
    places = torch.tensor([[[0, 2]], [[2, 1]]])
    found = lists.attend(torch.ones(1, 2, 1, 1), k, k, 4, 1.0, places=places)
    assert found.lists[0, :, 0].tolist() == [[3, 4, 0, 2], [0, 2, 4, 3]]
    torch.testing.assert_close(found.weight[0, 0, 0], torch.tensor([9.0, 9, 3, 2]).softmax(0))


def test_candidates_and_others_together() -> None:
    q, k = heads(2, 3, 29, 20, 0), heads(2, 3, 29, 20, 1)
    among, places = torch.arange(0, 29, 2), torch.rand(3, 29, 23, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :4]
    found = lists.attend(q, k, k, 10, 0.3, among=among, places=places)
    scores = (q.double() @ k.double().transpose(2, 3)).masked_fill(torch.eye(29, dtype=torch.bool), -torch.inf)
    best = among[scores[..., among].sort(dim=-1, descending=True, stable=True).indices[..., :5]]
    assert (found.lists[..., 0] == torch.arange(29)).all()
    assert torch.equal(found.lists[..., 1:6], best)
    for b, h, n in ((0, 0, 0), (1, 2, 13), (0, 1, 28)):
        left = [column for column in range(29) if column not in found.lists[b, h, n, :6].tolist()]
        assert found.lists[b, h, n, 6:].tolist() == [left[place] for place in places[h, n].tolist()]


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_a_matrix_a_rank_has_the_same_gradients_with_any_number_of_threads(groups: int) -> None:
    """Also where groups are fewer than threads, and each is cut in blocks of channels."""
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        q, k, v = (heads(1, groups, 29, 37, seed).clone().requires_grad_() for seed in range(3))
        kernel = random(5, 11, 37, seed=3).requires_grad_()
        loss = lists.attend(q, k, v, 5, 0.3, kernel=kernel).out.square().sum()
        found.append(torch.autograd.grad(loss, (q, k, v, kernel)))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
