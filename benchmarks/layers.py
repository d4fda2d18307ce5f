"""What each layer costs, beside plain attention and beside the way it was published, all in one interleaved run.

    python benchmarks/layers.py             N = 65, 197 and 1025 tokens, 16 images, 192 channels, 3 heads, K = 9
    python benchmarks/layers.py --quick     a first idea in half a minute

A ratio is the median over rounds of this layer's time to Attention's in the same round, with the quartiles: what else
the machine does slows both. "published" is the same layer's published computation (expand and gather; a dense mask).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: `layers` is the package of the toolkit, not this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as main.py has it

import torch
from torch import Tensor, nn

import layers
from inputs.memory import keep_memory
from layers.base import TokenMixer

BATCH, DIM, HEADS, K = 16, 192, 3, 9
PREFIX = 1
GRIDS = {65: (8, 8), 197: (14, 14), 1025: (32, 32)}

# ---------------------------------------------------------------- the published ways


def top_scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    values, index = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).topk(K)
    return values.softmax(-1), index


def expand_and_gather(v: Tensor, weight: Tensor, index: Tensor, conv: nn.Conv1d) -> Tensor:
    """Every neighbor of every token laid out, weighted, and convolved: v (G, D, N), weight and index (G, N, K)."""
    g, d, n = v.shape
    expanded = v[..., None].expand(g, d, n, K).contiguous()
    laid_out = torch.gather(expanded, 2, index[:, None].expand(g, d, n, K))  # (G, D, N, K)
    return conv((laid_out * weight[:, None].expand(g, d, n, K)).reshape(g, d, n * K))


class PublishedConvNN(TokenMixer):
    """All tokens as candidates."""

    convolution_type = "depthwise"

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        groups = self.head_dim if self.convolution_type == "depthwise" else 1
        self.conv = nn.Conv1d(self.head_dim, self.head_dim, K, stride=K, groups=groups, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weight, index = top_scores(q, k)
        out = expand_and_gather(v.flatten(0, 1).transpose(1, 2), weight.flatten(0, 1), index.flatten(0, 1), self.conv)
        return out.transpose(1, 2).unflatten(0, v.shape[:2])


class PublishedStandard(PublishedConvNN):
    convolution_type = "standard"


class PublishedSampled(PublishedConvNN):
    """32 random candidates, and the token itself first."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        drawn = torch.randperm(n)[:32]
        scores = q @ k[:, :, drawn].transpose(-1, -2) * self.scale
        values, column = scores.topk(K - 1)
        own = torch.arange(n).view(n, 1).expand(*q.shape[:3], 1)
        weight = torch.cat([torch.ones_like(values[..., :1]), values], -1).softmax(-1)
        index = torch.cat([own, drawn[column]], -1)
        out = expand_and_gather(v.flatten(0, 1).transpose(1, 2), weight.flatten(0, 1), index.flatten(0, 1), self.conv)
        return out.transpose(1, 2).unflatten(0, v.shape[:2])


class PublishedKvt(TokenMixer):
    """A mask over all scores from torch.topk."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.scale
        mask = torch.zeros_like(scores, requires_grad=False)
        mask.scatter_(-1, scores.topk(K).indices, 1.0)
        return torch.where(mask > 0, scores, torch.full_like(scores, -torch.inf)).softmax(-1) @ v


class PublishedMask(TokenMixer):
    """Dense scores, a pattern that is built for each call, softmax."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        mask = (place[:, None] - place).abs() <= K // 2
        scores = q @ k.transpose(-1, -2) * self.scale
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@dataclass(frozen=True)
class Entry:
    name: str
    spec: str
    published: type[TokenMixer] | None = None


ENTRIES = (
    Entry("Attention", "Attention"),
    Entry("KvtAttention", f"KvtAttention(K={K})", PublishedKvt),
    Entry("ConvNN depthwise", f"ConvNNAttention(K={K})", PublishedConvNN),
    Entry("ConvNN standard", f"ConvNNAttention(K={K}, convolution_type='standard')", PublishedStandard),
    Entry("ConvNN separable", f"ConvNNAttention(K={K}, convolution_type='depthwise-separable')"),
    Entry("ConvNN cosine", f"ConvNNAttention(K={K}, magnitude_type='cosine')"),
    Entry("ConvNN euclidean", f"ConvNNAttention(K={K}, magnitude_type='euclidean')"),
    Entry("ConvNN random 32", f"ConvNNAttention(K={K}, sampling_type='random', num_samples=32)", PublishedSampled),
    Entry("ConvNN spatial 32", f"ConvNNAttention(K={K}, sampling_type='spatial', num_samples=32)", PublishedSampled),
    Entry("SampledKnnAttention", f"SampledKnnAttention(K={K}, num_samples=8)"),
    Entry("NeighborhoodAttention", f"NeighborhoodAttention(K={K})", PublishedMask),
    Entry("Neighborhood 2-D 7x7", "NeighborhoodAttention(K=7, window_dims=2)", PublishedMask),
    Entry("SparseAttention local", f"SparseAttention(sparse_context_window={K})", PublishedMask),
    Entry("SparseAttention strided", "SparseAttention(sparse_mode='strided', sparse_context_window=14)", PublishedMask),
    Entry("LocalAttention 16", "LocalAttention(window=16)", PublishedMask),
    Entry("BranchConv 0.5", f"BranchConv(K={K}, branch_ratio=0.5)"),
    Entry("BranchAttention 0.5", f"BranchAttention(K={K}, branch_ratio=0.5)"),
)

# ---------------------------------------------------------------- measuring


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def times(layer: nn.Module, x: Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a forward, and of the forward with its backward."""
    start = clock()
    out = layer(x)
    middle = clock()
    out.backward(torch.ones_like(out))
    return middle - start, clock() - start


def measure(candidates: dict[str, nn.Module], x: Tensor, rounds: int, clock: Callable[[], float]) -> dict[str, Tensor]:
    """Every candidate once a round, in turn: (rounds, 2) seconds of each, after a round to warm up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, layer in candidates.items():
            layer.zero_grad(set_to_none=True)
            x.grad = None
            seconds = times(layer, x, clock)
            if round_number:
                taken[name].append(seconds)
    return {name: torch.tensor(seconds, dtype=torch.float64) for name, seconds in taken.items()}


def ratio(seconds: Tensor, base: Tensor) -> str:
    """Median and quartiles of the ratio in the same round."""
    low, middle, high = (seconds / base).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return f"{middle:5.2f} ({low:.2f}-{high:.2f})"


def table(tokens: int, rounds: int, clock: Callable[[], float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, tokens, DIM, requires_grad=True)
    context = {"dim": DIM, "num_heads": HEADS, "grid": GRIDS[tokens], "num_prefix_tokens": PREFIX}
    candidates: dict[str, nn.Module] = {}
    for entry in ENTRIES:
        candidates[entry.name] = layers.build(entry.spec, **context)  # type: ignore[arg-type]
        if entry.published:
            candidates[f"{entry.name}, published"] = entry.published(DIM, HEADS)
    seconds = measure(candidates, x, rounds, clock)
    base = seconds["Attention"]
    print(f"\nN = {tokens}: ratio to Attention, median (quartiles) of {rounds} rounds")
    print(f"{'layer':26}{'forward':>20}{'forward+backward':>20}{'ms':>8}{'published forward':>20}{'fwd+bwd':>20}")
    for entry in ENTRIES:
        own = seconds[entry.name]
        row = f"{entry.name:26}{ratio(own[:, 0], base[:, 0]):>20}{ratio(own[:, 1], base[:, 1]):>20}{1e3 * own[:, 1].median():8.1f}"
        if entry.published:
            published = seconds[f"{entry.name}, published"]
            row += f"{ratio(published[:, 0], base[:, 0]):>20}{ratio(published[:, 1], base[:, 1]):>20}"
        print(row, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What each layer costs, beside plain attention and its published way.")
    parser.add_argument("--tokens", type=int, nargs="+", choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--rounds", type=int, help="rounds at 65 and 197 tokens (a fifth of them at 1025); 30 if not given")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu, with --threads 1, where the machine is busy")
    parser.add_argument("--quick", action="store_true", help="5 rounds, 65 and 197 tokens")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    keep_memory()  # as every run does
    rounds = chosen.rounds or (5 if chosen.quick else 30)
    how = f"{chosen.threads} threads, {chosen.clock} clock, torch {torch.__version__}"
    print(f"{BATCH} images, {DIM} channels, {HEADS} heads, K = {K}; {how}", flush=True)
    for tokens in [n for n in chosen.tokens if n < 1000 or not chosen.quick]:
        table(tokens, rounds if tokens < 1000 else max(3, rounds // 5), CLOCKS[chosen.clock])


if __name__ == "__main__":
    main()
