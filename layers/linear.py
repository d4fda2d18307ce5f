"""Linear layers through oneDNN on newer processors of AMD: the library that torch asks otherwise, MKL, reaches half their speed.

Whoever wants torch's own way: `torch.backends.mkldnn.flags(enabled=False)`, or the environment's NEIGHBORS_NATIVE=0.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

GRADIENTS = ("mkldnn_linear_backward_input", "mkldnn_linear_backward_weights")  # operators of torch, which a build may lack
CPUINFO = "/proc/cpuinfo"
ZEN_5 = 26  # the family that AMD gives Zen 5. MKL takes vectors of 256 bits on all of AMD's; those before it compute no more at a time
LEAST = 1 << 23  # multiplications in a call: with fewer, handing over takes longer than is won (measured at 4 to 60 million)


class Linear(nn.Linear):
    """nn.Linear, computed the faster way."""

    def forward(self, x: Tensor) -> Tensor:
        if pays(x, self.weight):
            out: Tensor = _linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
            return out.view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


def speed_up_linear(model: nn.Module) -> None:
    """Every plain linear layer of a model, its own or of a library, is computed the faster way. Names of weights stay."""
    for part in model.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear


def pays(x: Tensor, weight: Tensor) -> bool:
    return (
        not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # a graph has its own way, and may run elsewhere
        and x.numel() * len(weight) >= LEAST
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and mkl_is_slow()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


@functools.cache
def mkl_is_slow() -> bool:
    """NOTE: told by name and not by a measurement, which would choose now one way and now the other, and their last digits differ."""
    if os.environ.get("NEIGHBORS_NATIVE") == "0" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.aten, name) for name in GRADIENTS):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and family_of_amd() >= ZEN_5


def family_of_amd() -> int:
    """Of the machine's processor; 0 if another maker's, or where it is not told."""
    facts = processor()
    family = facts.get("cpu family", "")
    return int(family) if facts.get("vendor_id") == "AuthenticAMD" and family.isdigit() else 0


def processor() -> dict[str, str]:
    """What Linux tells of the first processor."""
    try:
        with open(CPUINFO) as file:
            first, _, _ = file.read().partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


# ---------------------------------------------------------------- the operator


@torch.library.custom_op("neighbors::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, C), weight (E, C): x @ weight.T + bias."""
    return F.linear(x.to_mkldnn(), weight, bias).to_dense()


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))


@torch.library.custom_op("neighbors::linear_backward", mutates_args=())
def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    """Gradients in x and weight, of those that are wanted."""
    operators, grad, d_x, d_weight = torch.ops.aten, grad.to_mkldnn(), x.new_empty(0), x.new_empty(0)
    if of_x:
        d_x = operators.mkldnn_linear_backward_input(list(x.shape), grad, weight).to_dense()
    if of_weight:
        d_weight = operators.mkldnn_linear_backward_weights(grad, x.to_mkldnn(), weight, False)[0].to_dense()
    return d_x, d_weight


@_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if of_x else 0), weight.new_empty(weight.shape if of_weight else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    d_bias = grad.sum(0) if of_bias else None
    if torch.is_grad_enabled():  # a gradient of this gradient is wanted
        return grad @ weight if of_x else None, grad.T @ x if of_weight else None, d_bias
    d_x, d_weight = _linear_backward(grad, x, weight, of_x, of_weight)
    return d_x if of_x else None, d_weight if of_weight else None, d_bias


_linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.neighbors.linear)
def _linear_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


@register_flop_formula(torch.ops.neighbors.linear_backward)
def _linear_backward_flops(grad: Any, x: Any, weight: Any, of_x: Any, of_weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0] * (bool(of_x) + bool(of_weight))
