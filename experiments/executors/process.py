"""One run in a process of its own, on a machine of a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.cells import Place
from inputs.files import NO_FOLLOW

ROOT = Path(__file__).parent.parent.parent


def environment(threads: int) -> dict[str, str]:
    """Of a process that runs; GOMP_SPINCOUNT as main.py has it."""
    return {"GOMP_SPINCOUNT": "1000", **os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


class RunProcess:
    """A run, begun in the directory where `compare` was typed, so that relative paths lead where they led there.

    It saves and ends when its input is closed: on `stop`, and also when this process dies. That it has ended is seen by the end of a
    pipe, which a signal handler may look at too, in whatever it has interrupted.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        place = Place(job["arm"], job["seed"], Path(job["cwd"], job["run"]))
        place.log.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_FOLLOW, 0o644)
        self.living, living = os.pipe()
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "experiments.worker", "--alone"]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(living,), cwd=job["cwd"], env=environment(job["threads"])
            )
        finally:
            os.close(log)
            os.close(living)
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps(job) + "\n").encode())
            self.process.stdin.flush()

    def stop(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def ended(self, seconds: float | None = None) -> bool:
        """Whether it has, or does within so many seconds; by default, when it has."""
        return bool(select.select([self.living], [], [], seconds)[0])

    def wait(self) -> int:
        """The exit code."""
        self.ended()
        return self.process.wait()
