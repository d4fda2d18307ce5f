"""Norms of queries and keys, head by head (`qk_norm`), in one call of compiled code.

torch copies what lies scattered over a projection before it normalizes; the compiled code reads it where it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.compiled import differentiable, native


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, computed the faster way."""

    def forward(self, x: Tensor) -> Tensor:
        return _normalized(x, self.weight, self.bias, self.eps, True) if takes(x, self) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, computed the faster way."""

    def forward(self, x: Tensor) -> Tensor:
        epsilon = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _normalized(x, self.weight, None, epsilon, False) if takes(x, self) else super().forward(x)


# By exact name: a subclass may compute something else.
FASTER: dict[str, type[nn.Module]] = {
    "torch.nn.modules.normalization.LayerNorm": LayerNorm,
    "torch.nn.modules.normalization.RMSNorm": RMSNorm,
    "timm.layers.norm.LayerNorm": LayerNorm,
    "timm.layers.norm.RmsNorm": RMSNorm,
}


def faster(norm: nn.Module) -> nn.Module:
    """The same module with the same weights, computed the faster way if it is one of these."""
    name = f"{type(norm).__module__}.{type(norm).__qualname__}"
    if name in FASTER and not (name.startswith("timm.") and _reduced_by_timm()):
        norm.__class__ = FASTER[name]
    return norm


def _reduced_by_timm() -> bool:
    from timm.layers import is_fast_norm

    return is_fast_norm()


def speed_up_norms(model: nn.Module) -> None:
    """The norms of queries and keys in every attention of a model, its own or of a library."""
    for part in model.modules():
        for norm in (part._modules.get("q_norm"), part._modules.get("k_norm")):
            if norm is not None:
                faster(norm)


def takes(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> bool:
    weights = [t for t in (norm.weight, getattr(norm, "bias", None)) if t is not None]
    return (
        not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # a graph has its own way, and may run elsewhere
        and type(x) is Tensor
        and x.dim() == 4
        and norm.normalized_shape == x.shape[-1:]
        and x.shape[-1] <= native.WIDEST
        and not torch.is_autocast_enabled("cpu")
        and native.takes(x, *weights)
    )


# ---------------------------------------------------------------- with its gradient


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.how = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    inputs = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *native.normalized_gradient(grad, *inputs, *ctx.how), None, None
    x, weight, bias = inputs  # a gradient of this gradient is wanted: of torch's own
    epsilon, centered = ctx.how
    again = F.layer_norm(x, x.shape[-1:], weight, bias, epsilon) if centered else F.rms_norm(x, x.shape[-1:], weight, epsilon)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
    return *(next(found) if t is not None and t.requires_grad else None for t in inputs), None, None


_normalized = differentiable(lambda *inputs: native.normalized(*inputs), _save, _backward)
