"""nearest.c: compiled at its first use with the machine's C compiler, kept in the user's cache, called by ctypes.

Everything that the C code does, layers/kernels.py can do without it. `available()` says whether it is there; where it is not, one line
tells why. NEIGHBORS_NATIVE=0 does without it by hand.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils import say

SOURCE = Path(__file__).with_name("nearest.c")
COMPILERS = ("cc", "gcc", "clang")
ALWAYS = ("-std=gnu11", "-O3", "-shared", "-fPIC")
# The first that the compiler takes. Without OpenMP one thread does all the work.
OPTIONAL = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ())
FUNCTIONS = ("nearest", "bag", "pair_dot", "spread", "factor_gradient", "softmax", "softmax_gradient")
MOST_RANKS = 64  # of a list that is selected here: beyond, sorting whole rows is faster
SWITCH = "NEIGHBORS_NATIVE"
_lock = threading.Lock()


class View(ctypes.Structure):
    """A tensor (B, H, rows, D) in memory, with the distances from one to the next in numbers."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("image", "head", "row"))]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, View) for name in ("rows", "columns", "out")),
        *((name, ctypes.c_void_p) for name in ("index", "weight", "factor", "own", "score", "chosen")),
        *((name, ctypes.c_int64) for name in ("B", "H", "N", "M", "D", "K", "threads")),
        ("scale", ctypes.c_float),
    ]


# ---------------------------------------------------------------- compiling and loading


class Unbuilt(Exception):
    """Why there is no compiled code."""


def available() -> bool:
    return library() is not None


@functools.cache
def library() -> Any:
    """The compiled code, or None; why is said once."""
    with _lock:
        try:
            return _load(built())
        except Unbuilt as why:
            say(f"kernels: torch ({why})")
            return None


def built() -> Path:
    """The compiled file, made now if the cache has none of this source, compiler and processor."""
    if os.environ.get(SWITCH) == "0":
        raise Unbuilt(f"{SWITCH}=0")
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unbuilt("no C compiler found; with one, hard top-K attention is faster")
    known = "\n".join([SOURCE.read_text(), *ALWAYS, repr(OPTIONAL), compiler, version_of(compiler), processor()])
    folder = private_folder()
    path = folder / f"nearest-{hashlib.sha256(known.encode()).hexdigest()[:20]}.so"
    if not path.exists():
        compile_to(path, compiler)
    if not only_ours(path):
        raise Unbuilt(f"{path} may be written by others")
    return path


def compile_to(path: Path, compiler: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    said = ""
    try:
        for more in OPTIONAL:
            done = subprocess.run([compiler, *ALWAYS, *more, "-o", temporary, str(SOURCE)], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.chmod(temporary, 0o700)
                os.replace(temporary, path)
                return
            said = said or (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unbuilt(f"{compiler} failed: {said[:200]}")
    except OSError as error:
        raise Unbuilt(f"{compiler} can't be run: {error.strerror}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def version_of(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise Unbuilt(f"{compiler} can't be run: {error.strerror}") from None


def processor() -> str:
    """What -march=native follows: code for one processor may stop another one that shares the home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def private_folder() -> Path:
    """Where compiled code is kept: nobody else may write there, or their code would run here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neighbor-attention"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if cache.is_symlink() or not only_ours(cache):
            raise Unbuilt(f"{cache} may be written by others")
    except (OSError, RuntimeError):  # no home, or it is not ours to write
        raise Unbuilt(f"{cache} can't be made") from None
    return cache


def only_ours(path: Path) -> bool:
    found = path.stat()
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _load(path: Path) -> Any:
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unbuilt(f"{path} can't be loaded: {error}") from None
    for name in FUNCTIONS:
        function = getattr(found, f"neighbors_{name}")
        function.argtypes, function.restype = [ctypes.POINTER(Call)], ctypes.c_int64
    return found


# ---------------------------------------------------------------- calling it


def takes(*tensors: Tensor) -> bool:
    """Whether the C code computes with these: float32 on the CPU, none of them empty."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in tensors) and available()


def nearest(q: Tensor, k: Tensor, K: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """q (B, H, N, D), k (B, H, M, D) to scores and index (B, H, N, K), best first, equals by column; `own` (M,): a row's own column."""
    (B, H, N, _), M = q.shape, k.shape[2]
    score, index = q.new_empty(B, H, N, K), torch.empty(B, H, N, K, dtype=torch.int64)
    column = None
    if own is not None:
        here = (own >= 0) & (own < N)
        column = torch.full((N,), -1).index_put((own[here],), torch.arange(M)[here])
    call("nearest", rows=q, columns=k, K=K, score=score, chosen=index, own=column)
    return score, index


def bag(v: Tensor, index: Tensor, weight: Tensor, factor: Tensor | None = None) -> Tensor:
    """sum_r weight[n, r] factor[r] v[index[n, r]]: (B, H, N, D), in memory (B, N, H, D), which is what a layer goes on with."""
    B, H, N, _ = index.shape
    out = v.new_empty(B, N, H, v.shape[3]).transpose(1, 2)
    call("bag", columns=v, out=out, index=index, weight=weight, factor=factor)
    return out


def spread(x: Tensor, index: Tensor, weight: Tensor, columns: int, factor: Tensor | None = None) -> Tensor:
    """out[index[n, r]] += weight[n, r] factor[r] x[n]: (B, H, columns, D)."""
    B, H, _, D = x.shape
    out = x.new_zeros(B, H, columns, D)
    call("spread", rows=x, out=out, index=index, weight=weight, factor=factor)
    return out


def pair_dot(x: Tensor, y: Tensor, index: Tensor, factor: Tensor | None = None) -> Tensor:
    """sum_d x[n] factor[r] y[index[n, r]]: (B, H, N, K)."""
    score = x.new_empty(index.shape)
    call("pair_dot", rows=x, columns=y, index=index, factor=factor, score=score)
    return score


def factor_gradient(x: Tensor, y: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """sum_n weight[n, r] x[n] y[index[n, r]] over all groups: (K, D)."""
    B, H, _, K = index.shape
    parts = x.new_zeros(B * H, K, x.shape[3])
    call("factor_gradient", rows=x, columns=y, index=index, weight=weight, score=parts)
    return parts.sum(0)


def softmax(x: Tensor, scale: float) -> Tensor:
    """Softmax of scale x over the last of (B, H, N, K)."""
    found = torch.empty(x.shape)
    call("softmax", weight=x, score=found, scale=scale)
    return found


def softmax_gradient(grad: Tensor, weight: Tensor, scale: float) -> Tensor:
    """The gradient of x, from that of its softmax."""
    found = torch.empty(weight.shape)
    call("softmax_gradient", factor=grad, weight=weight, score=found, scale=scale)
    return found


def call(
    name: str,
    *,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    out: Tensor | None = None,
    K: int | None = None,
    scale: float = 1.0,
    **parts: Tensor | None,
) -> None:
    """Sizes follow from the tensors. What is not written may lie anywhere in memory, if its channels lie side by side."""
    rows, columns = (t if t is None or t.stride(3) == 1 else t.contiguous() for t in (rows, columns))
    written = {part: parts[part] for part in ("score", "chosen") if parts.get(part) is not None}
    read = {part: t.contiguous() for part, t in parts.items() if t is not None and part not in written}
    if "index" in read:
        read["index"] = read["index"].long()
    of_rows, of_columns = (next(t for t in (these, out, read.get("weight")) if t is not None) for these in (rows, columns))
    B, H, N, D = of_rows.shape
    asked = Call(B=B, H=H, N=N, M=of_columns.shape[2], D=D, K=K or lists_of(read), threads=torch.get_num_threads(), scale=scale)
    check_sizes(name, asked, {"columns": of_columns, **read})
    for part, t in {"rows": rows, "columns": columns, "out": out}.items():
        if t is not None:
            setattr(asked, part, View(t.data_ptr(), *t.stride()[:3]))
    for part, t in (read | written).items():
        setattr(asked, part, None if t is None else t.data_ptr())
    if getattr(library(), f"neighbors_{name}")(ctypes.byref(asked)):
        raise IndexError(f"{name}: an index lies outside of the {asked.M} columns, or there is no memory")


def lists_of(parts: dict[str, Tensor]) -> int:
    """How long the lists are."""
    return parts["index" if "index" in parts else "weight"].shape[-1]


def check_sizes(name: str, asked: Call, parts: dict[str, Tensor]) -> None:
    """The C code believes its sizes: what is too small would be read beyond its end."""
    lists, by_rank = (asked.B, asked.H, asked.N, asked.K), (asked.K, asked.D)
    columns = lists if name.startswith("softmax") else (asked.B, asked.H, asked.M, asked.D)
    wanted = {"columns": columns, "index": lists, "weight": lists, "own": (asked.N,)}
    wanted["factor"] = lists if name == "softmax_gradient" else by_rank
    for part, tensor in parts.items():
        if tensor.shape != wanted[part]:
            raise ValueError(f"{name}: {part} must be {wanted[part]}, got {tuple(tensor.shape)}")
