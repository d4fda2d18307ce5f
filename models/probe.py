"""What would hard top-K attention do to a trained model? Asked without training and without editing the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from utils import BadOption, did_you_mean, say

MODES = ("topk", "mass")
Count = int | Literal["all"]
BUDGET = 1 << 25  # logits alive at once: 128 MB in float32

_ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


@contextmanager
def neighbor_probe(model: nn.Module, K: Count, mode: str = "topk", *, cut_one_token: bool = False) -> Iterator[Probe]:
    """Within it, attention in `model` reads only the K tokens of the largest logits; K="all" or K >= N changes nothing.

    `mode` "topk" takes the softmax over the K; "mass" keeps the weights that these K have in the softmax over all.
    Queries of one token (attention pooling) stay dense unless `cut_one_token`. The yielded Probe counts what it saw
    (`calls`, `one_token_calls`, `by_hand`). Leaving raises RuntimeError if no attention was seen.

    Works for any model that calls scaled_dot_product_attention or nn.MultiheadAttention in this thread. Modules with
    timm's `fused_attn` switched off are switched on for the time; whatever else computes its softmax by hand stays
    dense and is announced. What a "token" is, the model says: attention over channels (XCiT) is cut to K channels.
    """
    probe = Probe(K, mode, cut_one_token=cut_one_token)
    with probe.watching(model):
        yield probe
    probe.require_calls()
    probe.announce()


@dataclass(frozen=True)
class KRow:
    """What a model does with K neighbors: correct and same-as-dense predictions, as counts over `rows`."""

    K: Count
    accuracy: float
    agreement: float
    rows: int


def accuracy_by_k(
    model: nn.Module, batches: Iterable[Sequence[Any]], ks: Sequence[Count], mode: str = "topk", device: torch.device | str | None = None
) -> list[KRow]:
    """Accuracy, and agreement with the dense prediction, for every K of `ks`, in one pass over the data.

    A batch is (images, labels, ...); it is loaded once, and goes through `model` once for each K, and once dense.
    `model` gives scores (B, classes), and runs in eval().
    """
    probes = [Probe(k, mode) for k in ks]
    correct, agree = [0] * len(ks), [0] * len(ks)
    rows = 0
    modes = [(module, module.training) for module in model.modules()]  # a part may be in eval() by itself
    model.eval()
    try:
        with torch.no_grad():
            for images, labels, *_ in batches:
                images, labels = images.to(device), labels.to(device)  # (B, C, H, W), (B,)
                dense = model(images).argmax(-1)  # (B,)
                rows += len(labels)
                for i, probe in enumerate(probes):
                    predicted = dense if probe.K == "all" else probe.predict(model, images)  # (B,)
                    correct[i] += int((predicted == labels).sum())
                    agree[i] += int((predicted == dense).sum())
    finally:
        for module, training in modes:
            module.training = training
    if not rows:
        raise ValueError("there are no rows to probe: the data is empty")
    for probe in [p for p in probes if p.K != "all"][:1]:  # the same for every K
        probe.announce()
    return [KRow(k, c / rows, a / rows, rows) for k, c, a in zip(ks, correct, agree, strict=True)]


class Probe(TorchFunctionMode):
    """Sees every torch function of this thread, and answers for attention itself."""

    def __init__(self, K: Count, mode: str = "topk", *, cut_one_token: bool = False) -> None:
        super().__init__()
        if K != "all" and (isinstance(K, bool) or not isinstance(K, int) or K < 1):
            raise BadOption("K", "must be a whole number of at least 1, or 'all'", K)
        if mode not in MODES:
            raise BadOption("mode", f"must be one of {', '.join(MODES)}{did_you_mean(mode, MODES)}", mode)
        self.K, self.mode, self.cut_one_token = K, mode, cut_one_token
        self.calls = 0  # attention calls with more than one query, cut if they had more than K keys
        self.one_token_calls = 0
        self.by_hand = 0  # softmaxes that look like attention and stayed dense

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            if self.K != "all":  # the two ways differ in the last bits, and "all" must not
                stack.enter_context(_fused(model))
            stack.enter_context(self)
            yield

    def predict(self, model: nn.Module, images: Tensor) -> Tensor:
        """The most likely classes (B,)."""
        with self.watching(model):
            scores: Tensor = model(images)
        self.require_calls()
        return scores.argmax(-1)

    def require_calls(self) -> None:
        if self.calls or (self.one_token_calls and self.cut_one_token):
            return
        if self.K == "all" and self.by_hand:
            return  # left as it is, by-hand softmax and all
        seen = f"{self.one_token_calls} calls with one query token, and {self.by_hand} softmaxes computed by hand"
        raise RuntimeError(f"the model called scaled_dot_product_attention not once, so nothing was probed (seen: {seen})")

    def announce(self) -> None:
        if self.by_hand and self.K != "all":
            say(f"probe: {self.by_hand} softmaxes were computed outside scaled_dot_product_attention; attention among them stayed dense")

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTION or getattr(func, "overloadpacket", None) in _ATTENTION:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _with_globals(func, scaled_dot_product_attention=self._attend, softmax=self._softmax)(*args, **kwargs)
        if func in _SOFTMAX and args and args[0].dim() > 2 and args[0].shape[-2] > 1:
            self.by_hand += 1
        return func(*args, **kwargs)

    def _sees(self, queries: int, keys: int) -> bool:
        """Counts a call; True if it is to be cut."""
        one_token = queries == 1
        self.one_token_calls += one_token
        self.calls += not one_token
        return self.K != "all" and keys > self.K and (not one_token or self.cut_one_token)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.is_nested or key.is_nested:
            raise ValueError("neighbor_probe cannot cut attention over nested tensors: give padded ones and a mask")
        if not self._sees(query.shape[-2], key.shape[-2]):
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        assert self.K != "all"
        return topk_attention(query, key, value, *args, K=self.K, mode=self.mode, **kwargs)

    def _softmax(self, logits: Tensor, dim: int) -> Tensor:
        """The softmax inside nn.MultiheadAttention when its weights are asked for: logits (B*H, L, S)."""
        if not self._sees(logits.shape[-2], logits.shape[-1]):
            return F.softmax(logits, dim=dim)
        assert self.K != "all"
        return _topk_weights(logits, self.K, self.mode)


# ---------------------------------------------------------------- hard top-K attention


def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    K: int,
    mode: str = "topk",
) -> Tensor:
    """scaled_dot_product_attention over each query's K largest logits: (..., L, E), (..., S, E), (..., S, V) to (..., L, V).

    Queries are independent, so they are taken in slices: the logits of BUDGET of them, not of all L x S, are alive at once.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must not be given with is_causal=True")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    length, keys = query.shape[-2], key.shape[-2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    step = max(1, BUDGET // max(1, math.prod(query.shape[:-2]) * keys))
    half = query.dtype in (torch.float16, torch.bfloat16)
    key_t = (key.float() if half else key).transpose(-2, -1)  # (..., E, S)
    slices = []
    with torch.autocast(query.device.type, enabled=False):  # it would round the logits, and make ties of them
        for start in range(0, length, step):
            rows = query[..., start : start + step, :]  # (..., l, E)
            logits = ((rows.float() if half else rows) * scale) @ key_t  # (..., l, S)
            if is_causal:
                here = torch.arange(start, start + rows.shape[-2], device=query.device)
                logits.masked_fill_(torch.arange(keys, device=query.device) > here[:, None], -math.inf)
            elif attn_mask is not None:
                logits = _masked(logits, attn_mask, slice(start, start + step))
            weights = _topk_weights(logits, min(K, keys), mode)  # (..., l, S)
            slices.append(F.dropout(weights, dropout_p).to(value.dtype) @ value)
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=-2)


def _masked(logits: Tensor, mask: Tensor, rows: slice) -> Tensor:
    if mask.dim() > 1 and mask.shape[-2] > 1:  # else the same for all queries
        mask = mask[..., rows, :]
    return logits.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else logits.add_(mask)


def _topk_weights(logits: Tensor, K: int, mode: str) -> Tensor:
    """Logits (..., L, S) to weights of the same shape, of which at most K a row are not 0."""
    values, index = logits.topk(K, dim=-1)  # each (..., L, K); exactly K, where a threshold would let ties in
    total = values if mode == "topk" else logits
    weights = (values - total.logsumexp(-1, keepdim=True)).exp()  # (..., L, K)
    # A query that may read nothing gets nothing, as in scaled_dot_product_attention; -inf - -inf is NaN.
    weights = weights.masked_fill(values == -math.inf, 0.0)
    return torch.zeros_like(logits).scatter_(-1, index, weights)


# ---------------------------------------------------------------- reaching the attention


@contextmanager
def _fused(model: nn.Module) -> Iterator[None]:
    """timm's modules compute softmax by hand when `fused_attn` is False: switched on, and back."""
    off = [m for m in model.modules() if vars(m).get("fused_attn") is False]
    try:
        for module in off:
            module.fused_attn = True  # type: ignore[assignment]
        yield
    finally:
        for module in off:
            module.fused_attn = False  # type: ignore[assignment]


def _with_globals(function: Callable[..., Any], **replaced: Any) -> Callable[..., Any]:
    """The same code reading other globals.

    Inside a handler the mode is off, and multi_head_attention_forward would call scaled_dot_product_attention unseen.
    Replacing the name in torch.nn.functional would do it for every thread.
    """
    plain: Any = function
    copy = FunctionType(plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy
