"""What each layer costs, forward and backward, beside plain attention and beside the ways in which others compute the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import layers
from benchmarks import rivals
from benchmarks.rivals import SAMPLED, WINDOW, K
from benchmarks.targets import BOTH, FORWARD
from benchmarks.timing import Ask, Group, Side, Watch
from layers.compiled import native

PART, DIM, HEADS, PREFIX = "layers", 192, 3, 1
DENSE = "Attention (SDPA)"
OURS = {
    DENSE: "Attention",
    "KvtAttention": f"KvtAttention(K={K})",
    "ConvNN depthwise": f"ConvNNAttention(K={K})",
    "ConvNN standard": f"ConvNNAttention(K={K}, convolution_type='standard')",
    "ConvNN separable": f"ConvNNAttention(K={K}, convolution_type='depthwise-separable')",
    "ConvNN cosine": f"ConvNNAttention(K={K}, magnitude_type='cosine')",
    "ConvNN euclidean": f"ConvNNAttention(K={K}, magnitude_type='euclidean')",
    "ConvNN random 32": f"ConvNNAttention(K={K}, sampling_type='random', num_samples={SAMPLED})",
    "SampledKnn": f"SampledKnnAttention(K={K}, num_samples=8)",
    "Neighborhood 1-D": f"NeighborhoodAttention(K={K})",
    "Neighborhood 7 x 7": "NeighborhoodAttention(K=7, window_dims=2)",
    "SparseAttention local": f"SparseAttention(sparse_context_window={K})",
    "LocalAttention 16": f"LocalAttention(window={WINDOW})",
    "BranchConv": f"BranchConv(K={K}, branch_ratio=0.5)",
    "BranchAttention": f"BranchAttention(K={K}, branch_ratio=0.5)",
}
RIVALS: dict[str, Callable[[int, int], nn.Module]] = {
    "timm's Attention": rivals.timm_attention,
    "dense, plain operators": rivals.PlainAttention,
    "dense top-K mask (KVT)": rivals.MaskedTopK,
    "expand + gather (ConvNN depthwise)": rivals.PublishedConvNN,
    "expand + gather (ConvNN standard)": rivals.PublishedStandard,
    "expand + gather (ConvNN random 32)": rivals.PublishedSampled,
    "dense window mask": rivals.MaskedWindow,
    "natten 1-D": rivals.NattenWindow,
    "local-attention 16": rivals.LocalWindows,
    "KvtAttention, qk_norm": lambda dim, heads: layers.KvtAttention(dim, num_heads=heads, K=K, qk_norm=nn.LayerNorm),  # ours, at what price
}
NOTES = {} if torch.cuda.is_available() else {"natten 1-D": "its CPU fallback"}  # what it has kernels for is CUDA
PACKAGES = {"natten 1-D": "natten", "local-attention 16": "local-attention"}
MAIN = (DENSE, "KvtAttention", "ConvNN depthwise", "ConvNN standard", "ConvNN random 32", "SampledKnn", "Neighborhood 7 x 7")
COMPILED = (DENSE, "KvtAttention", "ConvNN depthwise")  # compiling one takes half a minute on a CPU
WITHOUT = ", torch alone"  # the layer without compiled kernels


@dataclass(frozen=True)
class Sizes:
    grids: dict[int, tuple[int, int]]  # number of tokens: the grid of patches behind one class token
    images: dict[int, int]
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    rounds: int = 30
    seconds: float = 60  # of a group


GRIDS = {65: (8, 8), 197: (14, 14), 785: (28, 28), 1025: (32, 32), 3137: (56, 56)}
IMAGES = {65: 16, 197: 16, 785: 4, 1025: 4, 3137: 1}  # beyond 65 tokens: about as many tokens in each call
FULL = Sizes(GRIDS, IMAGES, ("float32", "bfloat16"), ("eager", "compiled"))
QUICK = Sizes({n: GRIDS[n] for n in (65, 197)}, IMAGES, ("float32",), ("eager",))


def groups(ask: Ask, sizes: Sizes | None = None) -> Iterator[Group]:
    """Every layer and rival in float32, the main ones in bfloat16, a few compiled."""
    sizes = sizes or (QUICK if ask.quick and not ask.tokens else FULL)
    for tokens in ask.tokens or sizes.grids:
        for mode in ask.modes or sizes.modes:
            for dtype in ask.dtypes or (sizes.dtypes if mode == "eager" else ("float32",)):
                if mode == "eager" or tokens == 197 or ask.modes:
                    yield group(ask, sizes, tokens, dtype, mode)


def group(ask: Ask, sizes: Sizes, tokens: int, dtype: str, mode: str) -> Group:
    torch.manual_seed(0)
    grid, images = sizes.grids[tokens], ask.batch_size or sizes.images[tokens]
    full = (dtype, mode) == ("float32", "eager")
    names = COMPILED if mode == "compiled" else tuple(OURS) if full and not ask.quick else MAIN
    x = torch.randn(images, tokens, DIM, device=ask.device, requires_grad=True)
    made = {
        name: layers.build(OURS[name], dim=DIM, num_heads=HEADS, grid=grid, num_prefix_tokens=PREFIX) for name in names if fits(name, grid)
    }
    sides: dict[str, Side] = {}
    for name, layer in made.items():
        sides[name] = side(layer, x, dtype, mode)
        if full and native.available() and ask.device.type == "cpu" and name in MAIN[1:]:
            sides[name + WITHOUT] = without_native(sides[name])
    absent = {}
    if mode == "eager":
        for name, make in RIVALS.items():
            try:
                sides[name] = side(make(DIM, HEADS), x, dtype, mode)
            except ImportError:
                absent[name] = f"{PACKAGES.get(name, 'timm')} is not installed"
    setting = f"{tokens} tokens, {images} images, {DIM} channels, {HEADS} heads, K = {K}, {dtype}, {mode}"
    facts = {"tokens": tokens, "images": images, "dtype": dtype, "mode": mode}
    effort = ask.effort(sizes.rounds, sizes.seconds)
    return Group(PART, setting, (FORWARD, BOTH), (DENSE,), sides, effort, ask.device, facts, absent, NOTES, short=tokens <= 197)


def fits(name: str, grid: tuple[int, int]) -> bool:
    return name != "Neighborhood 7 x 7" or min(grid) >= 7


def side(layer: nn.Module, x: torch.Tensor, dtype: str, mode: str) -> Side:
    """A forward pass, and its backward where there is one; both compiled in the mode "compiled"."""
    layer = layer.to(x.device)
    forward_only = getattr(layer, "forward_only", False)
    call: Any = torch.compile(layer) if mode == "compiled" else layer

    def run(watch: Watch) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        half = torch.autocast(x.device.type, torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
        with half, torch.no_grad() if forward_only else contextlib.nullcontext():
            watch.lap()
            out = call(x)
            watch.lap()
        if not forward_only:
            out.backward(torch.ones_like(out))
            watch.lap()

    return run


def without_native(run: Side) -> Side:
    """The same with what torch and NumPy compute where there is no compiler."""

    def alone(watch: Watch) -> None:
        available = native.available
        native.available = lambda: False
        try:
            run(watch)
        finally:
            native.available = available

    return alone
