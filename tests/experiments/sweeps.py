"""Small comparisons, begun from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from evaluation.predictions import read

ROOT = Path(__file__).parent.parent.parent
FAKE = ["--dataset", "fake(train=60, test=30, size=8, classes=3)", "--patch_size", "4", "--num_layers", "1", "--num_heads", "1"]
FAKE += ["--d_hidden", "6", "--d_mlp", "7", "--batch_size", "16", "--no-baselines", "--threads", "1"]
THREE = [*FAKE, "--num_epochs", "3", "--layer", "Attention | KvtAttention(K=2|3)", "--seeds", "2"]
FRAGILE = """
from layers import Attention, LAYERS

@LAYERS.register()
class Fragile(Attention):
    def mix(self, q, k, v):
        if self.training and len(q) > 1:
            raise RuntimeError("it broke")
        return super().mix(q, k, v)
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.experiments.comparing", "compare", "--output_dir", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=folder.parent)


def until(process: subprocess.Popen[str], start: str) -> str:
    """The first line of what a process says that starts so."""
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith(start):
            return line
    raise AssertionError("".join(lines[-20:]))


def numbers(folder: Path) -> dict[str, Any]:
    """comparison.json without what is measured with a clock."""
    body = json.loads((folder / "comparison.json").read_text())
    for cell in body["cells"]:
        cell["run"] = Path(cell["run"]).relative_to(folder).as_posix()
    return without_times(body)


def without_times(value: Any) -> Any:
    timed = ("second", "time", "memory", "images", "throughput", "peak", "notes", "sentence")  # notes tell of a busy machine
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not any(word in k for word in timed)}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def check_runs(folder: Path, other: Path, epochs: int) -> None:
    """All runs of a comparison are those of another one, bit for bit, and no epoch was trained twice."""
    runs = sorted(path.parent.relative_to(other) for path in other.glob("cells/*/*/results.json"))
    assert sorted(path.parent.relative_to(folder) for path in folder.glob("cells/*/*/results.json")) == runs
    for run in runs:
        found, wanted = read(folder / run)[0], read(other / run)[0]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        lines = (folder / run / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [*range(1, epochs + 1)]
