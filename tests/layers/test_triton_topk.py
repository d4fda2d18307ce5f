"""The Triton kernel without a GPU: interpreted, it computes what the operators do; compiled for two GPUs, it fits their registers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from layers import lists

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent


def python(*words: str, interpreted: bool) -> str:
    """In a process of its own: which of both Triton does is decided when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_interpreted_it_is_what_the_operators_compute() -> None:
    assert python("-m", "tests.layers.interpreted", interpreted=True).endswith("equal\n")


COMPILE = """
import subprocess, sys, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from layers import triton_topk

kernel = triton_topk.forward_kernel
types = {f"{name}_base": "*fp32" for name in ("q", "k", "v", "out", "weight")} | {"index_base": "*i32", "scale": "fp32"}
for capability, D, K in ((80, 64, 9), (90, 64, 9), (80, 128, 64)):
    sizes, warps = triton_topk.shape_of(D, K)
    signature = {name: types.get(name, "constexpr" if name in sizes else "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=sizes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    print("tf32" if "tf32" in made.asm["ptx"] else "float32")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        words = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}", file.name, "-o", file.name + ".o"]
        print(subprocess.run(words, capture_output=True, text=True, check=True).stderr)
"""


def test_compiled_for_two_gpus_nothing_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit registers goes to memory and back in the innermost loop."""
    pytest.importorskip("triton.backends.nvidia")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # made anew: an old entry would tell nothing
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = python("-c", COMPILE, interpreted=False)
    assert re.findall("^.*32$", said, re.MULTILINE) == ["float32"] * 3  # TF32 rounds scores to 10 bits: others would be the nearest
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == 3
    assert max(registers) < 256
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said) == [("0", "0")] * 3


class OnGpu:
    """A tensor by its description."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype, *shape: int) -> None:
        self.dtype, self.shape = dtype, shape

    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@pytest.mark.parametrize(
    ("dtype", "shape", "K", "taken"),
    [
        (torch.float32, (2, 3, 197, 64), 9, True),
        (torch.float32, (2, 3, 197, 80), 64, True),
        (torch.float64, (2, 3, 197, 64), 9, False),
        (torch.float32, (2, 3, 197, 64), 65, False),
        (torch.float32, (2, 3, 197, 160), 9, False),
        (torch.float32, (0, 3, 197, 64), 9, False),
    ],
)
def test_what_the_kernel_takes(dtype: torch.dtype, shape: tuple[int, ...], K: int, taken: bool) -> None:
    q: Any = OnGpu(dtype, *shape)
    assert lists.in_one_kernel(q, q, q, None, K, None, None, None, None) == taken
    assert not lists.in_one_kernel(q, q, q, torch.zeros(197, K), K, None, None, None, None)  # lists are given
    for option in range(4):  # a bias, a score of the first, dropout, a convolution
        assert not lists.in_one_kernel(q, q, q, None, K, *(torch.ones(1) if n == option else None for n in range(4)))
    there = torch.zeros(shape)
    assert not lists.in_one_kernel(there, there, there, None, K, None, None, None, None)  # on the CPU
