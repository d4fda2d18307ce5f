"""The operations on neighbor lists, as torch operators: fast on a CPU, no (B, H, N, K, D) tensor, one node in a compiled graph.

An index is (B, H, N, K), or (G, N, K) of G groups: for each head and each of N rows, which of M columns. Three of the operations are
each other's gradients, so they need no more than each other:

    bag(v, index, weight)       out[n] = sum_r weight[n, r] v[index[n, r]]
    spread(x, index, weight)    out[m] = sum of weight[n, r] x[n] over all (n, r) that point to m (bag, transposed)
    pair_dot(x, y, index)       out[n, r] = x[n] . y[index[n, r]]

`nearest` selects (and is differentiable in the scores, as pair_dot is); `rank_conv` is a bag with a weight a channel and rank.
They are operators of their own because C, NumPy and loops inside them would break a compiled graph. Float32 on a CPU is computed by
native/nearest.c where it could be compiled; all else, and all where it could not, by what stands here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from layers.compiled import native
from layers.dense import densely

# NumPy sorts keys that sit in the second-level cache three times as fast as those that do not: 2**17 keys are 1 MB.
BLOCK = 2**17


# ---------------------------------------------------------------- selection


def top_columns(scores: np.ndarray, K: int) -> np.ndarray:
    """The K largest of each row, best first, equal scores in the order of their columns, NaN above all: (..., M) float32 to (..., K).

    A score and its column make one 64-bit key, and NumPy orders such keys with vector instructions; torch.topk takes
    four times as long here and does not promise the order of equals.
    """
    m = scores.shape[-1]
    bits = scores.view(np.int32)
    ordered = bits >> 31  # floats order as their bits do, the negative ones in reverse
    ordered &= 0x7FFFFFFF
    ordered ^= bits
    ordered[np.isnan(scores)] = 0x7FFFFFFF  # whose sign says nothing
    keys = ordered.astype(np.int64)
    keys <<= 32
    keys |= np.arange(m - 1, -1, -1)
    if m > max(K, 256):  # long rows: set the K best apart before ordering them
        keys.partition(m - K, axis=-1)
        keys = np.ascontiguousarray(keys[..., m - K :])
    keys.sort(axis=-1)
    return m - 1 - (keys[..., : -K - 1 : -1] & 0xFFFFFFFF)


def _select(scores: Tensor, K: int) -> Tensor:
    if scores.device.type != "cpu":
        return scores.topk(K).indices
    if scores.dtype != torch.float32:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :K]
    return torch.from_numpy(top_columns(scores.numpy(), K))


def _blocks(groups: int, rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Slices of groups and rows whose scores fit a block."""
    if rows * columns <= BLOCK:
        step = max(1, BLOCK // (rows * columns))
        return [(slice(g, g + step), slice(0, rows)) for g in range(0, groups, step)]
    step = max(1, BLOCK // columns)
    return [(slice(g, g + 1), slice(n, min(n + step, rows))) for g in range(groups) for n in range(0, rows, step)]


def _groups(x: Tensor) -> Tensor:
    """(B, H, N, D) to (B H, N, D); three dimensions as they are."""
    return x.flatten(0, -3)


def _image(x: Tensor) -> Tensor:
    """What the C code takes: groups as the heads of one image."""
    return x if x.dim() == 4 else x[None]


def _as(x: Tensor, like: Tensor) -> Tensor:
    """With the leading dimensions of `like`."""
    return x.reshape(*like.shape[:-2], *x.shape[-2:])


def _rows_first(out: Tensor) -> Tensor:
    """(B, H, N, D) in memory as (B, N, H, D): what a layer goes on with."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if out.dim() == 4 else out.contiguous()


def _new_rows_first(like: Tensor, rows: int, dim: int) -> Tensor:
    if like.dim() == 3:
        return like.new_empty(like.shape[0], rows, dim)
    return like.new_empty(like.shape[0], rows, like.shape[1], dim).transpose(1, 2)


@torch.library.custom_op("neighbors::others", mutates_args=(), schema="(Tensor index, Tensor places) -> Tensor")
def others(index: Tensor, places: Tensor) -> Tensor:
    """Columns outside each row's list: index (B, H, N, K), places (H, N, S) among all that are outside, to (B, H, N, S)."""
    if index.device.type == "cpu" and native.available():
        return native.others(index, places)
    # The u-th of the others comes after as many of the list as have at most u others before them.
    others_before = index.sort().values - torch.arange(index.shape[-1], device=index.device)  # (B, H, N, K)
    wanted = places.expand(len(index), -1, -1, -1).contiguous()
    return wanted + torch.searchsorted(others_before, wanted, right=True)


@others.register_fake
def _(index: Tensor, places: Tensor) -> Tensor:
    return index.new_empty(*index.shape[:3], places.shape[2])


@torch.library.custom_op("neighbors::nearest", mutates_args=(), schema="(Tensor q, Tensor k, int K, Tensor? own) -> (Tensor, Tensor)")
def nearest(q: Tensor, k: Tensor, K: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """The K columns with the largest q . k of each row, best first: scores and index, both (..., N, K).

    `own` (M,) names the row that each column is: no row selects itself (its score is -inf).
    The N x M scores exist a block at a time only.
    """
    if 0 < K <= native.MOST_RANKS and native.takes(q, k):
        score, index = native.nearest(_image(q), _image(k), K, own)
        return _as(score, q), _as(index, q)
    score, index = _nearest(_groups(q), _groups(k), K, own)
    return _as(score, q), _as(index, q)


def _nearest(q: Tensor, k: Tensor, K: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    (g, n, _), m = q.shape, k.shape[1]
    whole = q.device.type != "cpu"
    score, index = q.new_empty(g, n, K), torch.empty(g, n, K, dtype=torch.int64, device=q.device)
    columns = torch.arange(m, device=q.device)
    for groups, rows in [(slice(0, g), slice(0, n))] if whole else _blocks(g, n, m):
        scores = torch.bmm(q[groups, rows], k[groups].transpose(1, 2))  # (g, n, M), a block of it
        if own is not None:
            here = (own >= rows.start) & (own < rows.stop)
            scores[:, own[here] - rows.start, columns[here]] = -torch.inf
        index[groups, rows] = _select(scores, K)
        score[groups, rows] = scores.gather(2, index[groups, rows])
    return score, index


@nearest.register_fake
def _(q: Tensor, k: Tensor, K: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], K)
    return q.new_empty(shape), q.new_empty(shape, dtype=torch.int64)


def _save_nearest(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _nearest_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, index = ctx.saved_tensors
    return bag(k, index, grad), spread(q, index, grad, k.shape[-2]), None, None


nearest.register_autograd(_nearest_backward, setup_context=_save_nearest)


# ---------------------------------------------------------------- sums over neighbors


def _flat(index: Tensor, columns: int) -> Tensor:
    """Rows of the stacked groups: (G, N, K) to (G * N, K)."""
    first = torch.arange(index.shape[0], device=index.device)[:, None, None] * columns
    return (index + first).reshape(-1, index.shape[2])


@torch.library.custom_op("neighbors::bag", mutates_args=(), schema="(Tensor v, Tensor index, Tensor weight) -> Tensor")
def bag(v: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Weighted sums of neighbors: v (..., M, D), index and weight (..., N, K), to (..., N, D)."""
    if native.takes(v, weight):
        out = native.bag(_image(v), _image(index), _image(weight))
        return out if v.dim() == 4 else out[0].contiguous()
    m, d, n, K = *v.shape[-2:], *index.shape[-2:]
    table, weights = v.reshape(-1, d), weight.reshape(-1, K)
    sums: Tensor = F.embedding_bag(_flat(_groups(index), m), table, mode="sum", per_sample_weights=weights)
    return _rows_first(sums.view(*v.shape[:-2], n, d))


@bag.register_fake
def _(v: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return _new_rows_first(v, index.shape[-2], v.shape[-1])


@torch.library.custom_op("neighbors::spread", mutates_args=(), schema="(Tensor x, Tensor index, Tensor weight, SymInt columns) -> Tensor")
def spread(x: Tensor, index: Tensor, weight: Tensor, columns: int) -> Tensor:
    """`bag` transposed: what each column gets from the rows x (..., N, D) that point to it, (..., M, D)."""
    if native.takes(x, weight):
        return _as(native.spread(_image(x), _image(index), _image(weight), columns), x)
    return _as(_spread(_groups(x), _groups(index), _groups(weight), columns), x)


def _spread(x: Tensor, index: Tensor, weight: Tensor, columns: int) -> Tensor:
    (g, n, d), K = x.shape, index.shape[2]
    if densely("spread", x.device, columns, K):
        dense = weight.new_zeros(g, n, columns).scatter_add_(2, index, weight)  # (G, N, M)
        return torch.bmm(dense.transpose(1, 2), x)
    rows, ranks, weights = x.reshape(-1, d), _flat(index, columns).t().contiguous(), weight.reshape(-1, K, 1)
    out = x.new_zeros(g * columns, d)
    for r in range(K):
        out.index_add_(0, ranks[r], rows * weights[:, r])
    return out.view(g, columns, d)


@spread.register_fake
def _(x: Tensor, index: Tensor, weight: Tensor, columns: int) -> Tensor:
    return x.new_empty(*x.shape[:-2], columns, x.shape[-1])


@torch.library.custom_op("neighbors::pair_dot", mutates_args=(), schema="(Tensor x, Tensor y, Tensor index) -> Tensor")
def pair_dot(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Dot products of each row x (..., N, D) with its own list of columns y (..., M, D): (..., N, K)."""
    if native.takes(x, y):
        return native.pair_dot(_image(x), _image(y), _image(index)).view(index.shape)
    return _as(_pair_dot(_groups(x), _groups(y), _groups(index)), x)


def _pair_dot(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    (_, m, d), K = y.shape, index.shape[2]
    if densely("pair_dot", x.device, m, K):
        return torch.bmm(x, y.transpose(1, 2)).gather(2, index)
    rows, table, ranks = x.reshape(-1, d), y.reshape(-1, d), _flat(index, m).t().contiguous()
    out = x.new_empty(K, len(rows))
    for r in range(K):
        torch.sum(table.index_select(0, ranks[r]).mul_(rows), dim=1, out=out[r])
    return out.t().contiguous().view(index.shape)


@pair_dot.register_fake
def _(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(i for i in inputs if isinstance(i, Tensor)))


def _bag_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    v, index, weight = ctx.saved_tensors
    return spread(grad, index, weight, v.shape[-2]), None, pair_dot(grad, v, index)


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, index, weight = ctx.saved_tensors
    return bag(grad, index, weight), None, pair_dot(x, grad, index), None


def _pair_dot_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, y, index = ctx.saved_tensors
    return bag(y, index, grad), spread(x, index, grad, y.shape[-2]), None


bag.register_autograd(_bag_backward, setup_context=_save_inputs)
spread.register_autograd(_spread_backward, setup_context=_save_inputs)
pair_dot.register_autograd(_pair_dot_backward, setup_context=_save_inputs)


# ---------------------------------------------------------------- a convolution over ranks


@torch.library.custom_op("neighbors::rank_conv", mutates_args=(), schema="(Tensor v, Tensor index, Tensor weight, Tensor kernel) -> Tensor")
def rank_conv(v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    """sum_r kernel[r] (weight[n, r] v[index[n, r]]): kernel (K, D) a factor a channel, or (K, E, D) a matrix; (..., N, E)."""
    if kernel.dim() == 2 and native.takes(v, weight, kernel):
        out = native.bag(_image(v), _image(index), _image(weight), kernel)
        return out if v.dim() == 4 else out[0].contiguous()
    return _rows_first(_as(_rank_conv(_groups(v), _groups(index), _groups(weight), kernel), v))


def _rank_conv(v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    (g, m, d), (_, n, K) = v.shape, index.shape
    table, flat, weights = v.reshape(-1, d), _flat(index, m), weight.reshape(-1, K, 1)
    out = v.new_zeros(g * n, kernel.shape[1])
    if kernel.dim() == 2:  # one rank at a time in one buffer: K passes over (G, N, D), never all K at once
        ranks, buffer = flat.t().contiguous(), v.new_empty(g * n, d)
        for r in range(K):
            torch.index_select(table, 0, ranks[r], out=buffer).mul_(weights[:, r])
            out.addcmul_(buffer, kernel[r])
        return out.view(g, n, -1)
    # Some rows at a time, all their ranks in one product as a convolution has it; a quarter of all rows at most.
    matrix = kernel.transpose(1, 2).reshape(K * d, -1)
    step = max(1, min(BLOCK // (K * d), g * n // 4))
    for first in range(0, g * n, step):
        rows = slice(first, first + step)
        laid_out = table.index_select(0, flat[rows].reshape(-1)).view(-1, K, d).mul_(weights[rows])  # (step, K, D)
        torch.mm(laid_out.view(-1, K * d), matrix, out=out[rows])
    return out.view(g, n, -1)


@rank_conv.register_fake
def _(v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    return _new_rows_first(v, index.shape[-2], kernel.shape[1])


@torch.library.custom_op(
    "neighbors::rank_conv_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor v, Tensor index, Tensor weight, Tensor kernel) -> (Tensor, Tensor, Tensor)",
)
def rank_conv_backward(grad: Tensor, v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in v, weight and kernel; the neighbors are gathered again, a rank at a time."""
    if kernel.dim() == 2 and native.takes(grad, v, weight, kernel):
        g, x, i, w = (_image(t) for t in (grad, v, index, weight))
        d_v, d_weight = native.spread(g, i, w, v.shape[-2], kernel), native.pair_dot(g, x, i, kernel)
        return _as(d_v, v), d_weight.view(weight.shape), native.factor_gradient(g, x, i, w)
    d_v, d_weight, d_kernel = _rank_conv_gradients(_groups(grad), _groups(v), _groups(index), _groups(weight), kernel)
    return d_v.view(v.shape), d_weight.view(weight.shape), d_kernel


def _rank_conv_gradients(grad: Tensor, v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (_, m, d), (_, _, K) = v.shape, index.shape
    table, ranks, weights = v.reshape(-1, d), _flat(index, m).t().contiguous(), weight.reshape(-1, K).t().contiguous()
    grad = grad.reshape(-1, grad.shape[2])  # (G * N, E)
    d_table, d_weight, d_kernel = v.new_zeros(table.shape), weight.new_empty(weights.shape), kernel.new_empty(kernel.shape)
    buffer = torch.empty(len(grad), d, dtype=v.dtype, device=v.device)
    for r in range(K):
        torch.index_select(table, 0, ranks[r], out=buffer)  # (G * N, D)
        if kernel.dim() == 2:
            back = grad * kernel[r]
            buffer.mul_(grad)
            torch.mv(buffer, kernel[r], out=d_weight[r])
            torch.mv(buffer.t(), weights[r], out=d_kernel[r])
        else:
            back = grad @ kernel[r]
            torch.mm(grad.t(), weights[r, :, None] * buffer, out=d_kernel[r])
            torch.sum(buffer.mul_(back), dim=1, out=d_weight[r])
        d_table.index_add_(0, ranks[r], back.mul_(weights[r, :, None]))
    return d_table.view(v.shape), d_weight.t().contiguous().view(weight.shape), d_kernel


@rank_conv_backward.register_fake
def _(grad: Tensor, v: Tensor, index: Tensor, weight: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), weight.new_empty(weight.shape), kernel.new_empty(kernel.shape)


def _rank_conv_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    v, index, weight, kernel = ctx.saved_tensors
    d_v, d_weight, d_kernel = rank_conv_backward(grad, v, index, weight, kernel)
    return d_v, None, d_weight, d_kernel


rank_conv.register_autograd(_rank_conv_backward, setup_context=_save_inputs)


# ---------------------------------------------------------------- half precision, and what a FLOP counter sees

for _op in (nearest, bag, spread, pair_dot, rank_conv, rank_conv_backward):
    for _device in ("cpu", "cuda"):
        _op.register_autocast(_device, torch.float32)  # selection and sums in float32, whatever the projections use


@register_flop_formula(torch.ops.neighbors.nearest)
def _nearest_flops(q: Any, k: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q) * k[-2]


@register_flop_formula([torch.ops.neighbors.bag, torch.ops.neighbors.spread])
def _bag_flops(v: Any, index: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(index) * v[-1]


@register_flop_formula(torch.ops.neighbors.pair_dot)
def _pair_dot_flops(x: Any, y: Any, index: Any, **_: Any) -> int:
    return 2 * math.prod(index) * x[-1]


@register_flop_formula(torch.ops.neighbors.rank_conv)
def _rank_conv_flops(v: Any, index: Any, weight: Any, kernel: Any, **_: Any) -> int:
    per_neighbor = 3 * v[-1] if len(kernel) == 2 else v[-1] + 2 * kernel[1] * kernel[2]
    return math.prod(index) * per_neighbor


@register_flop_formula(torch.ops.neighbors.rank_conv_backward)
def _rank_conv_backward_flops(grad: Any, v: Any, index: Any, weight: Any, kernel: Any, **_: Any) -> int:
    return 2 * _rank_conv_flops(v, index, weight, kernel)
