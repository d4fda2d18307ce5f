"""Softmax over the K of each list of neighbors, as torch operators: torch's own takes four times as long over so few numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import native


@torch.library.custom_op("neighbors::list_softmax", mutates_args=(), schema="(Tensor x, float scale) -> Tensor")
def list_softmax(x: Tensor, scale: float) -> Tensor:
    """softmax(scale x) over the last dimension."""
    if x.dim() == 4 and native.takes(x):
        return native.softmax(x, scale)
    return (x * scale).softmax(-1)


@torch.library.custom_op("neighbors::list_softmax_backward", mutates_args=(), schema="(Tensor grad, Tensor weight, float scale) -> Tensor")
def list_softmax_backward(grad: Tensor, weight: Tensor, scale: float) -> Tensor:
    """The gradient of x from that of its softmax `weight`."""
    if weight.dim() == 4 and native.takes(grad, weight):
        return native.softmax_gradient(grad, weight, scale)
    return _softmax_gradient(grad, weight, scale)


def _softmax_gradient(grad: Tensor, weight: Tensor, scale: float) -> Tensor:
    return scale * weight * (grad - (grad * weight).sum(-1, keepdim=True))


@list_softmax.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return x.new_empty(x.shape)


@list_softmax_backward.register_fake
def _(grad: Tensor, weight: Tensor, scale: float) -> Tensor:
    return weight.new_empty(weight.shape)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _save_softmax_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.scale = inputs[2]


def _list_softmax_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return list_softmax_backward(grad, ctx.saved_tensors[0], ctx.scale), None


def _list_softmax_backward_backward(ctx: Any, outer: Tensor) -> tuple[Any, ...]:
    grad, weight = ctx.saved_tensors
    mean, along = (grad * weight).sum(-1, keepdim=True), (outer * weight).sum(-1, keepdim=True)
    return _softmax_gradient(outer, weight, ctx.scale), ctx.scale * (outer * (grad - mean) - grad * along), None


list_softmax.register_autograd(_list_softmax_backward, setup_context=_save_softmax)
list_softmax_backward.register_autograd(_list_softmax_backward_backward, setup_context=_save_softmax_backward)

for _op in (list_softmax, list_softmax_backward):
    for _device in ("cpu", "cuda"):
        _op.register_autocast(_device, torch.float32)
