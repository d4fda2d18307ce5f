"""Norms of queries and keys in compiled code: against torch's in float64, and where they step aside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm.layers
import torch
from torch import Tensor, nn

import layers
import native
from layers import norm
from layers.norm import faster, speed_up_norms
from tests.native.reference import assert_near

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler here")


def a_norm(kind: type[nn.Module], width: int, **options: Any) -> Any:
    torch.manual_seed(width)
    made: Any = kind(width, **options)
    for weight in made.parameters():
        nn.init.normal_(weight)
    return made


def queries(B: int, N: int, H: int, D: int) -> tuple[Tensor, Tensor]:
    """A projection (B, N, 3, H, D), and its queries (B, H, N, D) as a layer has them: scattered over it; far from zero."""
    projection = torch.randn(B, N, 3, H, D, generator=torch.Generator().manual_seed(1)) * 2 + 3
    return projection.requires_grad_(), projection.permute(2, 0, 3, 1, 4)[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiled code was asked for."""
    names: list[str] = []
    original = native.normalize

    def noted(name: str, *rest: Any, **parts: Any) -> None:
        names.append(name)
        original(name, *rest, **parts)

    monkeypatch.setattr(native, "normalize", noted)
    return names


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, timm.layers.LayerNorm, timm.layers.RmsNorm])
@pytest.mark.parametrize("size", [(2, 7, 3, 5), (1, 1, 1, 16), (3, 5, 2, 32), (2, 13, 3, 64), (1, 3, 2, 77), (1, 2, 1, 1024)], ids=str)
def test_they_are_torch_s(size: tuple[int, ...], kind: type[nn.Module], threads: int, asked: list[str]) -> None:
    """Outputs and all gradients; a norm has its own way of saying that it has no weights, or a bias alone is missing."""
    affine = "affine" if kind.__module__.startswith("timm") else "elementwise_affine"
    variants: list[dict[str, Any]] = [{}, {affine: False}, {"eps": 0.7}]
    if kind is nn.LayerNorm:
        variants.append({"bias": False})
    for options in variants:
        ours = faster(a_norm(kind, size[3], **options))
        exact = a_norm(kind, size[3], **options).double()
        projection, q = queries(*size)
        exactly = projection.detach().double().requires_grad_()
        found, wanted = ours(q), exact(exactly.permute(2, 0, 3, 1, 4)[0])
        assert_near(found, wanted)
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).transpose(1, 2).contiguous().transpose(1, 2)
        of_ours = torch.autograd.grad(found, [projection, *ours.parameters()], grad)
        of_exact = torch.autograd.grad(wanted, [exactly, *exact.parameters()], grad.double())
        for one, other in zip(of_ours, of_exact, strict=True):
            assert_near(one, other)
    assert asked == ["normalized", "normalized_gradient"] * len(variants)


def test_by_hand() -> None:
    """(1, 3): mean 2, deviation 1; mean square 5."""
    x = torch.tensor([1.0, 3.0]).view(1, 1, 1, 2)
    assert faster(nn.LayerNorm(2, eps=0.0))(x).flatten().tolist() == [-1, 1]
    torch.testing.assert_close(faster(nn.RMSNorm(2, eps=4.0))(x).flatten(), torch.tensor([1 / 3, 1.0]))
    weighted: Any = faster(nn.LayerNorm(2, eps=0.0))
    weighted.weight.data, weighted.bias.data = torch.tensor([2.0, 5.0]), torch.tensor([10.0, 20.0])
    assert weighted(x).flatten().tolist() == [8, 25]


def test_the_same_numbers_with_any_number_of_threads() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ours = faster(a_norm(nn.LayerNorm, 64))
            projection, q = queries(150, 7, 5, 64)  # so many groups that torch adds them up on several cores
            y = ours(q)
            found.append([y, *torch.autograd.grad(y.square().sum(), [projection, *ours.parameters()])])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_a_gradient_of_the_gradient() -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        ours, exact = a_norm(kind, 7), a_norm(kind, 7).double()
        faster(ours)
        x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(3), requires_grad=True)
        seconds = []
        for layer, inputs in ((ours, x), (exact, x.detach().double().requires_grad_())):
            (first,) = torch.autograd.grad((layer(inputs) ** 3).sum(), inputs, create_graph=True)
            seconds.append(torch.autograd.grad(first.square().sum(), [inputs, layer.weight]))
        for one, other in zip(*seconds, strict=True):
            assert_near(one, other)


def test_what_is_no_number_stays_in_its_row() -> None:
    x = torch.randn(1, 1, 3, 20, generator=torch.Generator().manual_seed(4))
    x[0, 0, 1, 17] = torch.nan
    ours = faster(a_norm(nn.LayerNorm, 20))
    assert ours(x).isnan().all(-1).flatten().tolist() == [False, True, False]
    assert not ours(x)[0, 0, ::2].isnan().any()


def test_where_it_steps_aside(asked: list[str]) -> None:
    """Half precision, other shapes, graphs, a width that no stack has room for, weights of another kind."""
    ours = faster(a_norm(nn.LayerNorm, 8))
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(5))
    plain = copy.deepcopy(ours)
    plain.__class__ = nn.LayerNorm
    torch.testing.assert_close(ours(x[0]), plain(x[0]), rtol=0, atol=0)
    assert copy.deepcopy(ours).double()(x.double()).dtype == torch.float64
    assert copy.deepcopy(ours).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(x), plain(x), rtol=0, atol=0)
    torch.testing.assert_close(torch.jit.trace(ours, x, check_trace=False)(x), plain(x))
    torch.testing.assert_close(torch.export.export(ours, (x,)).module()(x), plain(x))
    wide = a_norm(nn.LayerNorm, native.WIDEST + 1)
    faster(wide)(torch.ones(1, 1, 2, native.WIDEST + 1))
    rows = a_norm(nn.LayerNorm, 8)
    rows.__class__, rows.normalized_shape = norm.LayerNorm, (5, 8)
    rows.weight, rows.bias = nn.Parameter(torch.ones(5, 8)), nn.Parameter(torch.ones(5, 8))
    assert rows(x).shape == x.shape
    assert asked == []


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_another_default_type(kind: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(7), requires_grad=True)
    ours = faster(a_norm(nn.LayerNorm, 8))
    wanted = torch.autograd.grad(ours(x).square().sum(), [x, *ours.parameters()])
    torch.set_default_dtype(kind)
    try:
        found = torch.autograd.grad(ours(x).square().sum(), [x, *ours.parameters()])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_weights_of_another_size_are_refused_as_torch_does() -> None:
    ours = faster(nn.LayerNorm(8))
    ours.weight = nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError, match="weight"):
        ours(torch.ones(1, 1, 2, 8))


def test_frozen_weights_and_gradients_of_their_own() -> None:
    ours: Any = faster(a_norm(nn.LayerNorm, 8))
    ours.requires_grad_(False)
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(8), requires_grad=True)
    ours(x).square().sum().backward()
    assert x.grad is not None
    assert all(weight.grad is None for weight in ours.parameters())
    ours.requires_grad_(True)
    of_weight, of_bias = torch.autograd.grad(ours(x).square().sum(), list(ours.parameters()))
    assert of_weight.untyped_storage().data_ptr() != of_bias.untyped_storage().data_ptr()


def test_hooks_of_inputs_run_once() -> None:
    """Also where a gradient of the gradient is wanted, which is made by differentiating torch's own norm."""
    found = []
    for make in (faster, lambda norm: norm):
        ours = a_norm(nn.LayerNorm, 8)
        make(ours)
        x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(9), requires_grad=True)
        doubled = x * 1
        doubled.register_hook(lambda gradient: 2 * gradient)
        ours.weight.register_hook(lambda gradient: 3 * gradient)
        found.append(torch.autograd.grad(ours(doubled).square().sum(), [x, ours.weight], create_graph=True))
    for one, other in zip(*found, strict=True):
        assert_near(one, other.double())


def test_what_looks_on_sees_an_operator() -> None:
    """Graphs that are recorded from what runs, functions that are mapped over a batch, and a tracer that has no tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    ours, plain = faster(a_norm(nn.LayerNorm, 8)), a_norm(nn.LayerNorm, 8)
    x = torch.randn(3, 2, 3, 5, 8, generator=torch.Generator().manual_seed(10))
    torch.testing.assert_close(make_fx(ours)(x[0])(x[1]), plain(x[1]))
    torch.testing.assert_close(torch.func.vmap(ours)(x), plain(x))
    torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x[0]), plain(x[0]))
    assert torch.fx.symbolic_trace(nn.Sequential(faster(nn.RMSNorm(8))))(x[0]).shape == x[0].shape
    inputs = x[0].clone().requires_grad_()
    grads = torch.randn(2, *inputs.shape, generator=torch.Generator().manual_seed(11))
    (found,), (wanted,) = (torch.autograd.grad(norm(inputs), inputs, grads, is_grads_batched=True) for norm in (ours, plain))
    assert_near(found, wanted.double())


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_jacobians(make: Any) -> None:
    """Whose backward runs when its inputs are of a transform that has ended."""
    plain, ours = a_norm(make, 4), faster(a_norm(make, 4))
    x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(12))

    def second(norm: nn.Module) -> Any:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(norm(x).pow(3).sum())

        return torch.func.jacrev(torch.func.grad(loss))

    torch.testing.assert_close(torch.func.jacrev(ours)(x), torch.func.jacrev(plain)(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second(ours)(x), second(plain)(x), atol=1e-4, rtol=1e-4)


def test_operators_are_well_formed() -> None:
    x, weight, bias = (torch.randn(*size, requires_grad=True) for size in ((1, 2, 3, 5), (5,), (5,)))
    torch.library.opcheck(torch.ops.neighbors.normalized.default, (x, weight, bias, 1e-5, True))
    grad = torch.randn(1, 2, 3, 5)
    torch.library.opcheck(torch.ops.neighbors.normalized_backward.default, (grad, x.detach(), None, None, 1e-5, False))


def test_hooks_are_called() -> None:
    ours, seen = faster(nn.LayerNorm(8)), []
    ours.register_forward_hook(lambda *_: seen.append("after"))
    ours(torch.ones(1, 1, 2, 8))
    assert seen == ["after"]


def test_only_what_is_known_is_changed() -> None:
    class Mine(nn.LayerNorm):
        pass

    assert type(faster(Mine(8))) is Mine
    assert type(faster(nn.Identity())) is nn.Identity
    assert type(faster(timm.layers.RmsNorm(8))) is norm.RMSNorm
    timm.layers.set_fast_norm(True)  # the user asks timm for half precision in the norms that it makes from now on
    try:
        fast = timm.layers.LayerNorm(8)
    finally:
        timm.layers.set_fast_norm(False)
    assert type(faster(fast)) is timm.layers.LayerNorm
    assert type(faster(timm.layers.LayerNorm(8))) is norm.LayerNorm


def test_layers_and_models_have_them() -> None:
    layer = layers.build("KvtAttention", dim=66, num_heads=3, K=3, qk_norm=nn.LayerNorm)
    assert type(layer.q_norm) is type(layer.k_norm) is norm.LayerNorm
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, qk_norm=True, num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(6))
    before, names = model(images), list(model.state_dict())
    speed_up_norms(model)
    assert all(type(block.attn.q_norm) is norm.LayerNorm for block in model.blocks)
    torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
