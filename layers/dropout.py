"""Random draws of a training step that follow from (seed, epoch, row, place), with no generator that runs.

So what is dropped from a row does not depend on the rows around it, on the processes that share a batch, or on where a run was stopped.
`place` counts the draws of a forward pass. What is drawn for all rows of a batch alike, such as candidates, comes from torch's generator,
which each batch sets anew.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.compiled import native
from utils import fold_in

ROWS, BATCH = 20, 21  # names of the random streams
M1, M2 = 0x7FEB352D, 0x846CA68B - 2**32  # factors of a hash of 32 bits (lowbias32, C. Wellons)
PLACES = 32  # whose keys are made at once
SIZES = 64


def scattered(x: Tensor) -> Tensor:
    """int32 to int32 that looks random, each to one of its own."""
    x = (x ^ (x >> 16 & 0xFFFF)) * M1
    x = (x ^ (x >> 15 & 0x1FFFF)) * M2
    return x ^ (x >> 16 & 0xFFFF)


_numbered: dict[tuple[int, torch.device], Tensor] = {}


def numbered(count: int, device: torch.device) -> Tensor:
    """The numbers below count, scattered; kept, for the few sizes that a model has."""
    if torch.compiler.is_compiling():  # what is made in a graph stays in it
        return scattered(torch.arange(count, dtype=torch.int32, device=device))
    if (count, device) not in _numbered:
        if len(_numbered) >= SIZES:
            _numbered.clear()
        _numbered[count, device] = scattered(torch.arange(count, dtype=torch.int32, device=device))
    return _numbered[count, device]


class Draws:
    """What the rows of a batch draw, place by place. index: row numbers (B,), or (B, 2) of mixed rows: the first decides."""

    def __init__(self, seed: int, index: Tensor) -> None:
        rows = index.reshape(len(index), -1)[:, 0].to(torch.int32)
        low, high = (seed & 0x7FFFFFFF), (seed >> 31 & 0x7FFFFFFF)
        self.rows = scattered(scattered(rows ^ low) ^ high)
        self.place = 0

    def keys(self) -> Tensor:
        """Of the next place: a number a row, (B,)."""
        chunk, at = divmod(self.place, PLACES)
        if at == 0:
            places = numbered((chunk + 1) * PLACES, self.rows.device)[-PLACES:, None]
            self.of_places = scattered(self.rows ^ places)  # (PLACES, B)
        self.place += 1
        return self.of_places[at]

    def bits(self, count: int) -> Tensor:
        """(B, count) numbers, uniform over int32 (the upper bits are the good ones)."""
        x = self.keys()[:, None] ^ numbered(count, self.rows.device)
        x *= M1
        x ^= x >> 15
        x *= M2
        return x


_current: list[Draws] = []


@contextlib.contextmanager
def drawing(seed: int, epoch: int, batch: int, index: Tensor) -> Iterator[None]:
    """Around the forward pass of a batch in training."""
    for_all = fold_in(seed, BATCH, epoch, batch)
    torch.default_generator.manual_seed(for_all)  # torch.manual_seed asks for all kinds of devices, which takes 70 times as long
    if index.device.type in ("cuda", "mps"):
        getattr(torch, index.device.type).manual_seed(for_all)
    random.seed(for_all)  # what a plugin draws from
    np.random.seed(for_all % 2**32)
    _current.append(Draws(fold_in(seed, ROWS, epoch), index))
    try:
        yield
    finally:
        _current.pop()


class _Dropped(torch.autograd.Function):
    """NOTE: keeps bytes for the way back, as torch does; four times as fast with a mask of floats for each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x * keep.to(x.dtype).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return gradients[0] * keep.to(gradients[0].dtype).mul_(ctx.scale), None, None


class _DroppedInOneCall(torch.autograd.Function):
    """The same by the compiled code, which draws again on the way back: nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        found: Tensor = native.dropped(x, *how)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _DroppedInOneCall.apply(gradients[0], *ctx.how), None, None, None, None


def dropped(x: Tensor, p: float) -> Tensor:
    """Dropout of x, whose first dimension is the rows of the batch, or rows and more (heads, windows)."""
    draws = _current[-1] if _current else None
    if draws is None or x.shape[0] % len(draws.rows) or not 0 < p < 1:
        return F.dropout(x, p)
    count, below, scale = x.numel() // len(draws.rows), min(round(p * 2**32), 2**32 - 1) - 2**31, 1 / (1 - p)
    found: Tensor
    if type(x) is Tensor and native.takes(x) and not torch.compiler.is_compiling():
        found = _DroppedInOneCall.apply(x, draws.keys(), numbered(count, x.device), below, scale)
    else:
        found = _Dropped.apply(x, (draws.bits(count) >= below).view(x.shape), scale)
    return found


def shuffled(rows: int, count: int, device: torch.device) -> Tensor:
    """(rows, count): for each row the numbers below count in an order of its own."""
    draws = _current[-1] if _current else None
    if draws is None or rows != len(draws.rows):
        return torch.rand(rows, count, device=device).argsort(1)
    return draws.bits(count).argsort(1)


class Dropout(nn.Dropout):
    """nn.Dropout by rows."""

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.p) if self.training and self.p else x


def drop_by_rows(model: nn.Module) -> None:
    """Every dropout of a model, its own or of a library, draws by rows."""
    for part in model.modules():
        if type(part) is nn.Dropout:
            part.__class__ = Dropout
        if getattr(part, "fused_attn", False) and getattr(getattr(part, "attn_drop", None), "p", 0):
            part.register_forward_pre_hook(_fused_in_evaluation)


def _fused_in_evaluation(part: Any, _: Any) -> None:
    """timm's attention: torch's kernel would draw for all rows at once."""
    part.fused_attn = not part.training


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Softmax attention, (B, H, N, D) each. With dropout not torch's kernel, which draws for all rows at once."""
    if not dropout:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, N, N)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return dropped(logits.softmax(-1), dropout).to(v.dtype) @ v
