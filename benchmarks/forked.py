"""Command lines in processes that are forked from one that has loaded everything: each is cheap, and what ends one ends no other.

NOTE: the one that forks must have a single thread, and neither FAISS nor OpenMP may have searched in it: their threads do not survive
a fork, and a child that needs them would wait for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from main import main as command

CPU_SECONDS, SECONDS = 120, 1800  # of a process that hangs: it computes, or waits, for longer. Other processes make it slow, not hang
CAME_THROUGH, HANG = 99, 998  # an exception that nobody caught; killed because it hung


def start(words: Sequence[str], said: Path, around: contextlib.AbstractContextManager[Any] | None = None) -> int:
    """Runs a command line in a forked process, inside of `around`; its number. What it says is written to `said`."""
    process = os.fork()
    if process:
        return process
    code = CAME_THROUGH
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        nothing, handle = os.open(os.devnull, os.O_RDONLY), os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number, file in enumerate((nothing, handle, handle)):
            os.dup2(file, number)
        sys.stdout = sys.stderr = os.fdopen(handle, "w", buffering=1)  # what stood there may write elsewhere, as under a test
        with around or contextlib.nullcontext():
            code = command(words)
    finally:
        os._exit(code)


def run(
    words: Sequence[str], said: Path, around: contextlib.AbstractContextManager[Any] | None = None, after: float = math.inf
) -> tuple[int, str]:
    """Its exit code (minus a signal, or HANG), and what it said. `after`: seconds until SIGKILL."""
    ends, end = os.pipe()  # the child alone holds its other end
    process = start(words, said, around)
    os.close(end)
    in_time = bool(select.select([ends], [], [], min(after, SECONDS))[0])
    os.close(ends)
    if not in_time:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    hung = code == -signal.SIGXCPU or (not in_time and after > SECONDS)
    return HANG if hung else code, said.read_text(errors="replace")


def at_once(model: Any, x: Any, least: float = 0.0, most: float = 0.0) -> tuple[float, float, float]:
    """Instead of half a second of measuring how fast a model is."""
    return 1.0, 1.0, 1.0
