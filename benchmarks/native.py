"""What the compiled code of native/ saves: layers with and without it, beside plain attention, in turn in one process.

    python benchmarks/native.py     N = 65, 197 and 1025 tokens, 192 channels, 3 heads, K = 9, forward / forward + backward

CPU time of one thread, which hardly depends on what else the machine does; a ratio is the median over rounds of this layer's time to
Attention's in the same round.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import layers
import native

LAYERS = {
    "Attention": "Attention",
    "KvtAttention": "KvtAttention(K=9)",
    "ConvNN depthwise": "ConvNNAttention(K=9)",
    "ConvNN standard": "ConvNNAttention(K=9, convolution_type='standard')",
    "ConvNN random 32": "ConvNNAttention(K=9, sampling_type='random', num_samples=32)",
    "SampledKnnAttention": "SampledKnnAttention(K=9)",
}
SIZES = ((65, (8, 8), 16, 9), (197, (14, 14), 16, 5), (1025, (32, 32), 4, 5))  # tokens, grid, images, rounds
DIM, HEADS = 192, 3
Times = tuple[float, float]


def timed(layer: nn.Module, x: torch.Tensor) -> Times:
    """Seconds of the forward pass, and of both."""
    start = time.process_time()
    out = layer(x)
    middle = time.process_time()
    out.sum().backward()
    return middle - start, time.process_time() - start


def measure(grid: tuple[int, int], tokens: int, images: int, rounds: int) -> dict[tuple[str, bool], list[Times]]:
    """By layer, and with or without the compiled code."""
    made = {name: layers.build(call, dim=DIM, num_heads=HEADS, grid=grid, num_prefix_tokens=1) for name, call in LAYERS.items()}
    x = torch.randn(images, tokens, DIM, requires_grad=True)
    found: dict[tuple[str, bool], list[Times]] = {}
    takes = native.takes
    try:
        for _ in range(rounds + 1):  # the first one warms up
            for name, layer in made.items():
                for compiled in (True, False):
                    native.takes = takes if compiled else lambda *_: False
                    found.setdefault((name, compiled), []).append(timed(layer, x))
    finally:
        native.takes = takes
    return {key: times[1:] for key, times in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    if not native.available():
        sys.exit("there is no compiled code to measure")
    print("| layer | " + " | ".join(f"{tokens} tokens | without" for tokens, *_ in SIZES) + " |")
    print("|---|" + "---|---|" * len(SIZES))
    cells: dict[str, list[str]] = {name: [] for name in LAYERS}
    for tokens, grid, images, rounds in SIZES:
        found = measure(grid, tokens, images, rounds)
        for (name, _), times in found.items():
            of_both = [statistics.median(t[i] / base[i] for t, base in zip(times, found["Attention", True], strict=True)) for i in (0, 1)]
            cells[name].append(" / ".join(f"{ratio:.2f}" for ratio in of_both))
    for name, ratios in cells.items():
        print(f"| {name} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
