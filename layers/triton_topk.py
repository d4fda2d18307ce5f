"""Hard top-K attention on a GPU in one Triton kernel: scores, selection, softmax and weighted sum without a table of all scores.

Composed of operators, the N x M scores of each head are written to memory, read by the selection, and read again. Here a program takes
BLOCK_M queries of one head and goes over the keys, BLOCK_N at a time. The scores of a tile stay in registers, and so do the K best of each
query so far. What is written is the output, and the K columns (32 bits) and weights of each query, which are all that the backward needs.

A score and its column make one 64-bit key, so that the larger key is the better neighbor: the score in the upper half, as an integer of
the same order, and in the lower half a number that falls with the column, so that of equal scores the lower column comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_RANKS = 64  # the K best have to fit registers, beside a tile
BLOCK_M, BLOCK_N = 16, 64
MOST_CHANNELS = 128


@triton.jit
def as_keys(score: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Keys of scores and their columns: int64, in the order that neighbors are taken in."""
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats order as their bits do, the negative ones in reverse
    bits = tl.where(score != score, 0x7FFFFFFF, bits)  # NaN above all, whatever its sign
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def scores_of(key: tl.tensor) -> tl.tensor:
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def columns_of(key: tl.tensor) -> tl.tensor:
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def load_rows(base: tl.tensor, row: tl.tensor, row_stride: tl.tensor, rows: tl.tensor, D: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Rows of D channels as (number of rows, WIDTH); zeros beyond the last row and channel."""
    channel = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (channel < D)[None, :]
    return tl.load(base + row[:, None] * row_stride + channel[None, :], mask=there, other=0.0)


@triton.jit
def forward_kernel(
    q_base: tl.tensor, k_base: tl.tensor, v_base: tl.tensor, out_base: tl.tensor, index_base: tl.tensor, weight_base: tl.tensor,
    q_image: tl.tensor, q_head: tl.tensor, q_row: tl.tensor, k_image: tl.tensor, k_head: tl.tensor, k_row: tl.tensor,
    v_image: tl.tensor, v_head: tl.tensor, v_row: tl.tensor, out_image: tl.tensor, out_head: tl.tensor, out_row: tl.tensor,
    H: tl.tensor, N: tl.tensor, M: tl.tensor, K: tl.tensor, scale: tl.tensor,
    D: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """A program for BLOCK_M rows of one head of one image. WIDTH and RANKS are D and K, rounded up to a power of two."""
    group = tl.program_id(1).to(tl.int64)
    image, head = group // H, group % H
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_base + image * q_image + head * q_head, row, q_row, N, D, WIDTH)  # (BLOCK_M, WIDTH)

    # The best RANKS keys of each row, in falling order. Nothing is below WORST, so columns that are not there never come in.
    WORST: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    best = tl.full((BLOCK_M, RANKS), WORST, tl.int64)
    for first in range(0, M, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        k = load_rows(k_base + image * k_image + head * k_head, column, k_row, M, D, WIDTH)  # (BLOCK_N, WIDTH)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")  # TF32 has 10 bits: other neighbors would be the nearest
        key = tl.where((column < M)[None, :], as_keys(score, tl.broadcast_to(column[None, :], (BLOCK_M, BLOCK_N))), WORST)
        # Late in a long sequence most tiles hold no neighbor of any row, and need no ordering.
        better = tl.max(key, 1) > tl.min(best, 1)
        if tl.max(better.to(tl.int32), 0) > 0:
            both = tl.join(best, tl.topk(key, RANKS))  # (BLOCK_M, RANKS, 2)
            best = tl.topk(tl.reshape(both, (BLOCK_M, 2 * RANKS)), RANKS)

    rank = tl.arange(0, RANKS)
    asked = (rank < K)[None, :]
    column = tl.where(asked, columns_of(best), 0)  # (BLOCK_M, RANKS)
    score = tl.where(asked, scores_of(best) * scale, float("-inf"))
    weight = tl.exp(score - tl.max(score, 1)[:, None])
    weight = weight / tl.sum(weight, 1)[:, None]
    there = (row < N)[:, None] & asked
    place = (group * N + row[:, None]) * K + rank[None, :]
    tl.store(index_base + place, column, mask=there)
    tl.store(weight_base + place, weight, mask=there)

    out = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    values = v_base + image * v_image + head * v_head
    for r in range(K):  # a column of a matrix in registers is taken out by a sum over all but it
        here = (rank == r)[None, :]
        neighbor = tl.sum(tl.where(here, column, 0), 1)  # (BLOCK_M,)
        share = tl.sum(tl.where(here, weight, 0.0), 1)
        out += share[:, None] * load_rows(values, neighbor, v_row, M, D, WIDTH)
    channel = tl.arange(0, WIDTH)
    at = out_base + image * out_image + head * out_head + row[:, None] * out_row + channel[None, :]
    tl.store(at, out, mask=(row < N)[:, None] & (channel < D)[None, :])


def shape_of(D: int, K: int) -> tuple[dict[str, int], int]:
    """What the kernel is compiled for, and with how many warps: such that all fits registers."""
    width, ranks = max(16, triton.next_power_of_2(D)), max(2, triton.next_power_of_2(K))
    return {"D": D, "WIDTH": width, "RANKS": ranks, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}, 4 if width <= 64 else 8


def attend(q: Tensor, k: Tensor, v: Tensor, K: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the K largest scale q . k of each row, and the sum of their values: q (B, H, N, D), k and v (B, H, M, D) to
    (B, H, N, D); with it the columns (int32) and weights, (B, H, N, K), best first."""
    (B, H, N, D), M = q.shape, k.shape[2]
    sizes, warps = shape_of(D, K)
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    out = v.new_empty(B, N, H, D).transpose(1, 2)  # in memory as a layer goes on with it
    index, weight = q.new_empty(B, H, N, K, dtype=torch.int32), q.new_empty(B, H, N, K, dtype=torch.float32)
    with torch.cuda.device_of(q):
        forward_kernel[triton.cdiv(N, BLOCK_M), B * H](
            q, k, v, out, index, weight,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            H, N, M, K, scale,
            **sizes, num_warps=warps,
        )  # fmt: skip
    return out, index, weight


def takes(q: Tensor, k: Tensor, v: Tensor, K: int) -> bool:
    """Whether the kernel computes this: float32 on a CUDA device, and sizes that fit registers."""
    on_gpu = all(t.is_cuda and t.dtype == torch.float32 and t.numel() > 0 for t in (q, k, v))
    return on_gpu and K <= MOST_RANKS and q.shape[3] == v.shape[3] <= MOST_CHANNELS
