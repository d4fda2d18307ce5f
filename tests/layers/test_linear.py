"""Linear layers through oneDNN: the numbers of torch's own, wherever they are taken, and torch's own everywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from layers import linear

if not torch.backends.mkldnn.is_available():
    pytest.skip("torch was built without oneDNN", allow_module_level=True)


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that MKL is slow on, however small the layer."""
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(linear, "LEAST", 1)


def layer(inputs: int, outputs: int, bias: bool = True) -> linear.Linear:
    torch.manual_seed(0)
    return linear.Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("shape", [(1,), (13,), (3, 17), (2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_float64(shape: tuple[int, ...], bias: bool) -> None:
    ours = layer(7, 11, bias)
    exact = nn.Linear(7, 11, bias=bias).double()
    exact.load_state_dict({name: value.double() for name, value in ours.state_dict().items()})
    x = torch.randn(*shape, 7, generator=torch.Generator().manual_seed(1))
    assert linear.pays(x, ours.weight)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    found, wanted = ours(a), exact(b)
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)
    factor = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    of_ours = torch.autograd.grad((found * factor).sum(), [a, *ours.parameters()])
    of_exact = torch.autograd.grad((wanted * factor.double()).sum(), [b, *exact.parameters()])
    for one, other in zip(of_ours, of_exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-6, rtol=1e-5)


def test_gradients_are_the_same_each_time_and_need_not_all_be_asked_for() -> None:
    grad, x, weight = (
        torch.randn(*size, generator=torch.Generator().manual_seed(n)) for n, size in enumerate([(997, 67), (997, 131), (67, 131)])
    )
    d_x, d_weight = linear._linear_backward(grad, x, weight, True, True)
    torch.testing.assert_close(d_x.double(), grad.double() @ weight.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(d_weight.double(), grad.double().T @ x.double(), atol=1e-4, rtol=1e-5)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        again = linear._linear_backward(grad, x, weight, True, True)
        assert all(torch.equal(one, other) for one, other in zip(again, (d_x, d_weight), strict=True))
    only_x, only_weight = linear._linear_backward(grad, x, weight, True, False), linear._linear_backward(grad, x, weight, False, True)
    assert torch.equal(only_x[0], d_x)
    assert torch.equal(only_weight[1], d_weight)
    assert not only_x[1].numel()
    assert not only_weight[0].numel()


def test_what_lies_in_memory_otherwise_and_frozen_weights() -> None:
    ours = layer(7, 11)
    x = torch.randn(5, 7, 6).transpose(1, 2)
    torch.testing.assert_close(ours(x), F.linear(x, ours.weight, ours.bias))
    ours.requires_grad_(False)
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(ours(x).sum(), x)
    torch.testing.assert_close(found, ours.weight.sum(0).expand_as(x))


def test_a_gradient_of_the_gradient() -> None:
    ours, x = layer(5, 3), torch.randn(4, 5, requires_grad=True)

    def of_weight(call: Any) -> Tensor:
        (first,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), ours.weight)[0]

    torch.testing.assert_close(of_weight(ours), of_weight(lambda x: F.linear(x, ours.weight, ours.bias)))


def test_flops_are_counted() -> None:
    ours, x = layer(7, 11), torch.randn(13, 7, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        ours(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 13 * 7 * 11


def test_torch_s_own_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In other precisions, in graphs that may run elsewhere, where it is switched off, and for few numbers."""
    ours, x = layer(7, 11), torch.randn(13, 7)

    def forbidden(*_: Any) -> Tensor:
        raise AssertionError("not to be called")

    monkeypatch.setattr(linear, "_linear", forbidden)
    with pytest.raises(AssertionError, match="not to be called"):
        ours(x)
    assert ours.double()(x.double()).dtype == torch.float64
    ours.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    torch.testing.assert_close(torch.jit.trace(ours, x, check_trace=False)(x), F.linear(x, ours.weight, ours.bias))
    torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x), F.linear(x, ours.weight, ours.bias))
    with torch.backends.mkldnn.flags(enabled=False):
        ours(x)
    monkeypatch.setattr(linear, "LEAST", 13 * 7 * 11 + 1)
    ours(x)


def test_plain_layers_of_a_model_are_changed_and_no_others() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(Own(5, 7)))
    names, x = list(model.state_dict()), torch.randn(4, 3)
    before = model(x)
    linear.speed_up_linear(model)
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [linear.Linear, Own]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), before)


ZEN_5 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (ZEN_5, 26),
        (ZEN_5.replace("26", "25"), 25),
        (ZEN_5.replace("AuthenticAMD", "GenuineIntel"), 0),
        ("Processor\t: AArch64\n", 0),
        ("", 0),
    ],
)
def test_the_family_of_a_processor(text: str, family: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(linear, "CPUINFO", str(tmp_path / "cpuinfo"))
    assert linear.family_of_amd() == 0, "there is no such file"
    (tmp_path / "cpuinfo").write_text(text)
    assert linear.family_of_amd() == family


def test_the_rule_names_processors_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    is_slow = linear.mkl_is_slow.__wrapped__
    monkeypatch.delenv("NEIGHBORS_NATIVE", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(linear, "family_of_amd", lambda: 26)
    assert is_slow() == all(hasattr(torch.ops.aten, name) for name in linear.GRADIENTS)
    otherwise: list[tuple[Any, str, Any]] = [
        (linear, "family_of_amd", lambda: 25),
        (linear, "GRADIENTS", ("no_such_operator",)),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
        (torch.backends.mkldnn, "is_available", lambda: False),
    ]
    for where, name, value in otherwise:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert not is_slow()
    monkeypatch.setenv("NEIGHBORS_NATIVE", "0")
    assert not is_slow()


def test_operators_are_well_formed() -> None:
    x, weight, bias = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True), torch.randn(3, requires_grad=True)
    torch.library.opcheck(torch.ops.neighbors.linear.default, (x, weight, bias))
    torch.library.opcheck(torch.ops.neighbors.linear_backward.default, (torch.randn(5, 3), x.detach(), weight.detach(), True, True))
