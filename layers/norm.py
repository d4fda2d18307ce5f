"""Norms of queries and keys, head by head (`qk_norm`), in one call of compiled code.

torch copies what lies scattered over a projection before it normalizes; the compiled code reads it where it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from layers.compiled import differentiable, native


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, computed the faster way."""

    def forward(self, x: Tensor) -> Tensor:
        return _short(x, self.weight, self.bias, self.eps, True) if takes(x, self) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, computed the faster way."""

    def forward(self, x: Tensor) -> Tensor:
        if not takes(x, self):
            return super().forward(x)
        epsilon: float = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y: Tensor = _short(x, self.weight, None, epsilon, False)
        return y


# By exact name: a subclass may compute something else; and by name, so that timm need not be there.
FASTER: dict[str, type[nn.Module]] = {
    "torch.nn.modules.normalization.LayerNorm": LayerNorm,
    "torch.nn.modules.normalization.RMSNorm": RMSNorm,
    "timm.layers.norm.LayerNorm": LayerNorm,
    "timm.layers.norm.RmsNorm": RMSNorm,
}


def faster(norm: nn.Module) -> nn.Module:
    """The same module: one of FASTER's keys becomes of the class beside it, with its weights and hooks; others stay."""
    made = FASTER.get(f"{type(norm).__module__}.{type(norm).__qualname__}")
    if made is not None and not getattr(norm, "_fast_norm", False):  # timm's, made to compute in half precision
        norm.__class__ = made
    return norm


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
        and all(shape == x.shape[-1:] for shape in (norm.normalized_shape, *(t.shape for t in weights)))
        and x.shape[-1] <= native.WIDEST
        and not torch.is_autocast_enabled("cpu")
        and native.takes(x, *weights)
    )


# ---------------------------------------------------------------- the operator


@torch.library.custom_op(
    "neighbors::normalized",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, float epsilon, bool centered) -> Tensor",
)
def _normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool) -> Tensor:
    """x (B, H, N, D), weight and bias (D,): a LayerNorm of each row, or an RMSNorm if it is not `centered`."""
    return native.normalized(x, weight, bias, epsilon, centered)


@_normalized.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "neighbors::normalized_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, float epsilon, bool centered) -> (Tensor, Tensor, Tensor)",
)
def _normalized_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in x, weight and bias (empty where there is none)."""
    return native.normalized_gradient(grad, x, weight, bias, epsilon, centered)


@_normalized_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if weight is None else weight.shape), x.new_empty(0 if bias is None else bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.how = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    inputs = ctx.saved_tensors
    if not torch.is_grad_enabled():
        found = _normalized_backward(grad, *inputs, *ctx.how)
        return *(d if t is not None else None for d, t in zip(found, inputs, strict=True)), None, None
    return *_gradients(grad, *inputs, *ctx.how), None, None


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same in torch's operators, which have gradients themselves: of z = (x - its mean) s, times weight, plus bias."""
    z = x - x.mean(-1, keepdim=True) if centered else x
    s = (z.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    z, d_z = z * s, grad if weight is None else grad * weight
    d_x = d_z - z * (d_z * z).mean(-1, keepdim=True)
    d_x = s * (d_x - d_z.mean(-1, keepdim=True) if centered else d_x)
    d_weight, d_bias = (None if t is None else d.flatten(0, -2).sum(0) for t, d in ((weight, grad * z), (bias, grad)))
    return d_x, d_weight, d_bias


_normalized.register_autograd(_backward, setup_context=_save)
_short = differentiable(_normalized, _save, _backward)
