"""What a model costs: parameters, FLOPs and measured speed side by side."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # older torch counts it as nothing
UNCOUNTED = {} if _CPU_ATTENTION in flop_registry else {_CPU_ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def gflops(model: nn.Module, x: Tensor) -> float:
    """GFLOPs of one forward pass of one row, counted by torch. A multiply and an add are two; top-k and gather count as none."""
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        model(x[:1])
    return counter.get_total_flops() / 1e9


@torch.no_grad()
def rows_per_second(model: nn.Module, x: Tensor, seconds: float = 0.5) -> float:
    """Measured forward throughput on one batch: the median over repeats, after a warm-up."""
    durations: list[float] = []
    while not durations or sum(durations) < seconds or len(durations) < 4:
        durations.append(timed(lambda: model(x), x.device))
    return len(x) / statistics.median(durations[1:])  # the first one warms up


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


def peak_memory_mb(device: torch.device) -> float:
    """Most memory so far: allocated by torch on a GPU, resident in the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
