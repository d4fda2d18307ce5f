"""What was measured on, and with what."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from typing import Any

import torch

from benchmarks.timing import Ask
from evaluation.cost import load
from layers import linear
from layers.compiled import native
from run.provenance import git_state, versions

SET = (
    "OPENBLAS_CORETYPE",
    "NEIGHBORS_NATIVE",
    "OMP_PROC_BIND",
    "MKL_ENABLE_INSTRUCTIONS",
    "ATEN_CPU_CAPABILITY",
)  # by who calls, if at all
RIVALS = ("scikit-learn", "local-attention", "triton")


def about(ask: Ask) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(ask.device) if ask.device.type == "cuda" else None,
        "threads": ask.threads,
        "clock": ask.clock,
        "device": str(ask.device),
        "quick": ask.quick,
        "compiled_kernels": native.available(),
        "environment": {name: os.environ[name] for name in SET if name in os.environ},
        "load_before": load(),
        "versions": {**versions(), **{name: version for name in RIVALS if (version := version_of(name))}},
        "code": git_state(),
    }


def processor() -> str:
    """Its name, and the numbers by which makers tell those apart that have the same name."""
    facts = linear.processor()
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = ", ".join(f"{label} {facts[key]}" for label, key in (("family", "cpu family"), ("model", "model")) if key in facts)
    return f"{name} ({numbers})" if numbers else name


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def threads_of(facts: dict[str, Any]) -> str:
    return f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"


def sentence(facts: dict[str, Any]) -> str:
    """The machine in two lines."""
    busy = " to ".join(f"{facts[name]:.1f}" for name in ("load_before", "load_after") if facts.get(name) is not None) or "unknown"
    clock = {"wall": "wall clock", "cpu": "CPU time of the process"}[facts["clock"]] + (", CUDA events" if facts["gpu"] else "")
    where = f"{facts['processor']}, {facts['cores']} cores, load {busy}" + (f"; {facts['gpu']}" if facts["gpu"] else "")
    environment = "".join(f", {name}={value}" for name, value in facts["environment"].items())
    native_code = "with compiled kernels" if facts["compiled_kernels"] else "without compiled kernels"
    code = f", commit {facts['code']['commit'][:7]}{' (changed)' if facts['code']['changed'] else ''}" if facts["code"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{where}; {threads_of(facts)}, {clock}, {native_code}{environment}\n{facts['date']}{code}; {packages}"
