"""Attention over lists of neighbors as one operator: scores, softmax over the K of a list, weighted sum, and their gradients.

Float32 on a CPU is computed by the C code in one call (native/nearest.c), all else by the operators of kernels.py in turn: the same
numbers but for rounding. Gradients of gradients are those of `composed`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from layers import kernels
from layers.compiled import differentiable, native
from layers.functional import say_once


class Attended(NamedTuple):
    out: Tensor  # (B, H, N, E)
    lists: Tensor  # (B, H, N, K), columns: int64, or int32 as a GPU kernel chose them
    weight: Tensor  # (B, H, N, K), before dropout


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    K: int,
    scale: float,
    *,
    index: Tensor | None = None,
    bias: Tensor | None = None,
    first: float | None = None,
    keep: Tensor | None = None,
    kernel: Tensor | None = None,
    among: Tensor | None = None,
    places: Tensor | None = None,
) -> Attended:
    """softmax(scale q . k + bias) over a list of K columns for each row, and the sum of their values with these weights.

    The list is `index` (N, K) or (B, H, N, K), or it is chosen: the nearest columns, best first. `among` (A,), at least K columns: the row
    itself, then the nearest of these but itself. `places` (H, N, S): the last S of the list are others, by their places among all columns
    that are not in it before. bias (K,) or (N, K): -inf leaves a column out. `first`: the score of the first in each list, whatever its
    product. keep: what dropout multiplies the weights by. kernel (K, D): a factor a rank and channel; (K, E, D): a matrix a rank.
    Gradients reach q, k, v and kernel, from `out` and from `weight`; bias and keep have none.
    """
    if any(t is not None and t.requires_grad for t in (bias, keep)):
        raise ValueError("attend: bias and keep have no gradient; add what is learned to q and k, or detach it")
    if bias is not None:
        bias = bias.expand(q.shape[2], K).contiguous()
    way = _differentiable if _short(q) else _attend
    out, found, weight = way(q, k, v, index, K, scale, bias, first, keep, kernel, among, places)
    return Attended(out, found if index is None else _of_all(index, q), weight)


def _of_all(index: Tensor, q: Tensor) -> Tensor:
    return index.expand(*q.shape[:2], *index.shape[-2:])


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor | None,
    K: int,
    scale: float,
    bias: Tensor | None,
    first: float | None,
    keep: Tensor | None,
    kernel: Tensor | None,
    among: Tensor | None = None,
    places: Tensor | None = None,
) -> Attended:
    if index is None and among is None and places is None:
        score, index = kernels.nearest(q, k, K, None)
    else:
        index = chosen(q, k, K, among, places) if index is None else _of_all(index, q).long()
        score = kernels.pair_dot(q, k, index)
    score = score * scale if bias is None else score * scale + bias
    if first is not None:
        score = torch.cat([torch.full_like(score[..., :1], first), score[..., 1:]], -1)
    weight = score.softmax(-1)
    kept = weight if keep is None else weight * keep
    return Attended(kernels.bag(v, index, kept) if kernel is None else kernels.rank_conv(v, index, kept, kernel), index, weight)


def selected(K: int, among: Tensor | None, places: Tensor | None) -> int:
    """How many of a list of K are selected by their scores."""
    return K - (among is not None) - (0 if places is None else places.shape[2])


def chosen(q: Tensor, k: Tensor, K: int, among: Tensor | None, places: Tensor | None) -> Tensor:
    """Lists of K columns (B, H, N, K) as `attend` chooses them."""
    columns = k if among is None else k.index_select(2, among)  # of columns, five times as fast as brackets
    _, index = kernels.nearest(q.detach(), columns.detach(), selected(K, among, places), among)
    if among is not None:
        itself = torch.arange(q.shape[2], device=q.device)[:, None].expand(*q.shape[:3], 1)
        index = torch.cat([itself, among.index_select(0, index.flatten()).view_as(index)], -1)
    return index if places is None else torch.cat([index, kernels.others(index, places)], -1)


# ---------------------------------------------------------------- the C code as an operator

LISTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? index, int K, float scale, Tensor? bias, float? first, Tensor? keep, Tensor? kernel, "
    "Tensor? among, Tensor? places"
)


@torch.library.custom_op("neighbors::attend", mutates_args=(), schema=f"({LISTS}) -> (Tensor, Tensor, Tensor)")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor | None,
    K: int,
    scale: float,
    bias: Tensor | None,
    first: float | None,
    keep: Tensor | None,
    kernel: Tensor | None,
    among: Tensor | None,
    places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, the list that was chosen (int32 where Triton chose it; empty where it was given), weights."""
    if in_one_kernel(q, k, v, index, K, bias, first, keep, kernel, among, places):
        from layers import triton_topk

        return triton_topk.attend(q, k, v, K, scale)
    if (index is not None or selected(K, among, places) <= native.MOST_RANKS) and _native_takes(q, k, v, kernel):
        return native.attend(q, k, v, index, K, scale, bias, first, keep, kernel, among, places)
    out, found, weight = composed(q, k, v, index, K, scale, bias, first, keep, kernel, among, places)
    return out, found if index is None else index.new_empty(0), weight


def in_one_kernel(q: Tensor, k: Tensor, v: Tensor, index: Tensor | None, K: int, *options: Any) -> bool:
    """Whether Triton computes this on a GPU: plain attention over the K nearest, without a bias, dropout or a convolution over ranks."""
    if not q.is_cuda or index is not None or any(option is not None for option in options):
        return False
    try:
        from layers import triton_topk
    except ImportError:
        say_once("kernels: torch (Triton is not installed; with it, hard top-K attention moves less memory)")
        return False
    return triton_topk.takes(q, k, v, K)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, index: Tensor | None, K: int, _: float, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    b, h, n, _d = q.shape
    kernel = rest[3]
    width = v.shape[3] if kernel is None or kernel.dim() == 2 else kernel.shape[1]
    out = v.new_empty(b, n, h, width).transpose(1, 2)
    found = (b, h, n, K) if index is None else (0,)
    kind = torch.int32 if in_one_kernel(q, k, v, index, K, *rest) else torch.int64
    return out, q.new_empty(found, dtype=kind), q.new_empty(b, h, n, K)


@torch.library.custom_op(
    "neighbors::attend_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor index, Tensor weight, float scale, bool first, Tensor? keep, Tensor? kernel)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    weight: Tensor,
    scale: float,
    first: bool,
    keep: Tensor | None,
    kernel: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in q, k, v and the kernel (empty where there is none)."""
    if _native_takes(q, k, v, kernel):
        return native.attend_gradient(grad, q, k, v, index, weight, scale, first, keep, kernel)
    d_q, d_k, d_v, d_kernel = _gradients(grad, None, q, k, v, index, weight, scale, first, keep, kernel)
    assert d_v is not None
    return d_q, d_k, d_v, v.new_empty(0) if d_kernel is None else d_kernel


def _gradients(
    grad: Tensor | None,
    of_weight: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    weight: Tensor,
    scale: float,
    first: bool,
    keep: Tensor | None,
    kernel: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The same, composed of operators that have gradients themselves; also of what depends on the weights alone."""
    index, columns = _of_all(index, q).long(), k.shape[2]
    d_weight, d_v, d_kernel = of_weight, None, None
    if grad is not None:
        kept = weight if keep is None else weight * keep
        if kernel is None:
            d_v, d_kept = kernels.spread(grad, index, kept, columns), kernels.pair_dot(grad, v, index)
        else:
            d_v, d_kept, d_kernel = kernels.rank_conv_backward(grad, v, index, kept, kernel)
        of_out = d_kept if keep is None else d_kept * keep
        d_weight = of_out if of_weight is None else of_out + of_weight
    assert d_weight is not None
    d_score = scale * weight * (d_weight - (d_weight * weight).sum(-1, keepdim=True))
    if first:
        d_score = torch.cat([torch.zeros_like(d_score[..., :1]), d_score[..., 1:]], -1)
    return kernels.bag(k, index, d_score), kernels.spread(q, index, d_score, columns), d_v, d_kernel


def _native_takes(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor | None) -> bool:
    return native.takes(q, k, v) and (kernel is None or native.takes(kernel))


@_attend_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel = rest[-1]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), v.new_empty((0,) if kernel is None else kernel.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, index, _, ctx.scale, _, first, keep, kernel, *_ = inputs
    ctx.first = first is not None
    ctx.set_materialize_grads(False)  # None, and not zeros, for an output that nobody used
    ctx.save_for_backward(q, k, v, output[1] if index is None else index, output[2], keep, kernel)


def _backward(ctx: Any, grad: Tensor | None, _: Any, of_weight: Tensor | None) -> tuple[Any, ...]:
    if grad is None and of_weight is None:
        return (None,) * 12
    q, k, v, index, weight, keep, kernel = ctx.saved_tensors
    how = (q, k, v, index, weight, ctx.scale, ctx.first, keep, kernel)
    if torch.is_grad_enabled() or of_weight is not None or grad is None:  # a gradient of this gradient is wanted, or the weights' own
        d_q, d_k, d_v, d_kernel = _gradients(grad, of_weight, *how)
    else:
        d_q, d_k, d_v, d_kernel = _attend_backward(grad, *how)
    return d_q, d_k, d_v, None, None, None, None, None, None, d_kernel if kernel is not None else None, None, None


_attend.register_autograd(_backward, setup_context=_save)


_differentiable = differentiable(_attend, _save, _backward)


def _short(q: Tensor) -> bool:
    """Whether a gradient is wanted, and nobody else looks on: graphs, traces and autocast have to see the operator."""
    graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return torch.is_grad_enabled() and not graph and not torch.is_autocast_enabled(q.device.type)


for _op in (_attend, _attend_backward):
    for _device in ("cpu", "cuda"):
        _op.register_autocast(_device, torch.float32)


@register_flop_formula(torch.ops.neighbors.attend)
def _attend_flops(q: Any, k: Any, v: Any, index: Any, K: int, *rest: Any, **_: Any) -> int:
    lists = math.prod(q[:3]) * K
    kernel, among, places = rest[-3:]
    select = 2 * math.prod(q) * (k[2] if among is None else among[0]) if index is None else 2 * lists * q[3]
    more = 0 if places is None else 2 * math.prod(q) * places[2]
    return select + more + (2 if kernel is None else 3) * lists * v[3]


@register_flop_formula(torch.ops.neighbors.attend_backward)
def _attend_backward_flops(grad: Any, q: Any, k: Any, v: Any, index: Any, weight: Any, *rest: Any, **_: Any) -> int:
    lists = math.prod(weight)
    return 4 * lists * q[3] + (4 if rest[-1] is None else 8) * lists * v[3]
