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
            projection, q = queries(5, 31, 3, 64)
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


def test_hooks_are_called() -> None:
    ours, seen = faster(nn.LayerNorm(8)), []
    ours.register_forward_hook(lambda *_: seen.append("after"))
    ours(torch.ones(1, 1, 2, 8))
    assert seen == ["after"]


def test_only_what_is_known_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.LayerNorm):
        pass

    assert type(faster(Mine(8))) is Mine
    assert type(faster(nn.Identity())) is nn.Identity
    assert type(faster(timm.layers.RmsNorm(8))) is norm.RMSNorm
    monkeypatch.setattr(timm.layers, "is_fast_norm", lambda: True)  # the user has asked timm for half precision there
    assert type(faster(timm.layers.LayerNorm(8))) is timm.layers.LayerNorm
    assert type(faster(nn.LayerNorm(8))) is norm.LayerNorm


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
