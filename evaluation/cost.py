"""What a model costs: parameters, FLOPs and measured speed side by side."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from classifiers.classifier import Classifier

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # older torch counts it as nothing
ROUNDS, NARROW = 7, 0.03  # of a measurement: at least so many; quartiles so far apart, of the median, are near enough
UNCOUNTED = {} if _CPU_ATTENTION in flop_registry else {_CPU_ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}


def cost_of(model: Classifier, x: Tensor) -> dict[str, Any]:
    """Parameters of backbone and head, measured speed on a batch, and memory. What calibration adds is a copy of the head's predictor."""
    return {
        "params": parameters(model.backbone) + parameters(model.head),
        **speed_of(model.eval(), x),
        "peak_memory_mb": peak_memory_mb(x.device),
    }


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def gflops(model: nn.Module, x: Tensor) -> float:
    """GFLOPs of one forward pass of one row, counted by torch. A multiply and an add are two; top-k and gather count as none."""
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        model(x[:1])
    return counter.get_total_flops() / 1e9


def speed_of(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Throughput with its quartiles, and how busy the machine was (processes that want a core, over the last minute)."""
    low, median, high = rows_per_second(model, x)
    return {"images_per_second": median, "images_per_second_quartiles": [low, high], "load": load()}


def load() -> float | None:
    """Processes that wanted a core, on average over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def load_of(machine: float | None) -> str:
    return "load unknown" if machine is None else f"load {machine:.1f} on {os.cpu_count()} cores"


@torch.no_grad()
def rows_per_second(model: nn.Module, x: Tensor, least: float = 0.1, most: float = 0.5) -> tuple[float, float, float]:
    """Measured forward throughput on one batch, after a warm-up: quartile, median, quartile over at least 7 rounds.

    For `least` seconds of rounds, and longer, up to `most`, while the quartiles are not near each other.
    """
    timed(lambda: model(x), x.device)
    durations: list[float] = []
    total, wanted = 0.0, least
    while True:
        while len(durations) < ROUNDS or total < wanted:
            durations.append(timed(lambda: model(x), x.device))
            total += durations[-1]
        fast, middle, slow = statistics.quantiles(durations, n=4)
        if wanted >= most or slow - fast <= NARROW * middle:
            return len(x) / slow, len(x) / middle, len(x) / fast
        wanted = min(most, max(wanted, total) + most / 5)


def timed(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory_mb(device: torch.device) -> float | None:
    """Most memory so far: allocated by torch on a GPU, resident in the process otherwise. None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
