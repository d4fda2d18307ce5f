"""FAISS, loaded when first needed: safe to fork, with kernels for the processor, silent where it would print lines by the thousand."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

import native
from utils import say

CORETYPE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}  # what the kernels are compiled for
_forks_are_safe = False
_silence = threading.Lock()  # descriptor 2 is one for all threads


def load_faiss() -> Any:
    """FAISS, loaded when first needed, and made safe to fork."""
    global _forks_are_safe
    with fast_blas():
        import faiss
    if not _forks_are_safe and hasattr(os, "register_at_fork"):
        # NOTE: OpenMP's threads do not survive a fork, and a parallel region in the child would wait for them for ever.
        def in_child() -> None:
            faiss.omp_set_num_threads(1)
            torch.set_num_threads(1)

        os.register_at_fork(after_in_child=in_child)
        # A child must find descriptor 2 as it was, and the lock free.
        os.register_at_fork(before=_silence.acquire, after_in_parent=_silence.release, after_in_child=_silence.release)
        _forks_are_safe = True
    return faiss


@contextmanager
def fast_blas() -> Iterator[None]:
    """What is loaded in here multiplies matrices with AVX-512 where the processor has it. FAISS comes with an OpenBLAS of 2021, which takes
    its kernels of 2013 for processors that it does not know. Children do not inherit the variable: it is read when FAISS loads."""
    if "faiss" in sys.modules or CORETYPE in os.environ or not set(native.processor().split()) >= AVX512:
        yield
        return
    say(f"faiss: {CORETYPE}=SkylakeX (the processor has AVX-512, which FAISS's OpenBLAS may not see; set it to choose another)")
    os.environ[CORETYPE] = "SkylakeX"
    try:
        yield
    finally:
        del os.environ[CORETYPE]


@contextmanager
def silenced() -> Iterator[None]:
    """Drops what C++ writes to stderr. That goes to file descriptor 2, whatever Python's sys.stderr is."""
    with _silence:
        with suppress(AttributeError, OSError, ValueError):  # there may be none, or it may be closed
            sys.stderr.flush()
        stderr = None
        with suppress(OSError):  # closed: there is nothing to drop
            stderr = os.dup(2)
        try:
            if stderr is not None:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            if stderr is not None:
                os.dup2(stderr, 2)
                os.close(stderr)


def pointers(*tensors: Tensor) -> list[Any]:
    """For the functions of FAISS that are told addresses. NOTE: they check nothing; the sizes are the caller's to get right."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("what FAISS reads must be contiguous")
    return [load_faiss().swig_ptr(tensor.numpy()) for tensor in tensors]
