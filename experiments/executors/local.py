"""Runs on this machine: each in a process of its own, forked by one that has loaded torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.executors.base import SECONDS, Ended
from experiments.executors.process import environment
from utils import BadOption, Halt


@dataclass
class Workers:
    """The process that forks the runs, and how to talk to it. It is started by the first run, or by `warm_up` while there is other work."""

    threads: int
    modules: Sequence[str]
    at_once: int
    process: Any = None
    _text: bytes = b""

    @property
    def room(self) -> int:
        return self.at_once

    def __enter__(self) -> Workers:
        if not hasattr(os, "fork"):
            rule = "needs a system whose processes can fork (Linux, macOS) to run anything; finished runs by path it can compare"
            raise BadOption("compare", rule)
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is None:
            return
        self.process.stdin.close()
        if error[0] is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def warm_up(self) -> None:
        if self.process is not None:
            return
        # A session of its own: Ctrl-C on the terminal is for `compare`, which tells the runs.
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "experiments.worker", *self.modules]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment(self.threads), bufsize=0, start_new_session=True)

    def start(self, job: Mapping[str, Any]) -> None:
        self.warm_up()
        self.process.stdin.write((json.dumps(job) + "\n").encode())

    def stop(self) -> Iterator[Ended]:
        self.process.stdin.close()
        while self.process.poll() is None:
            yield from self.ended(SECONDS)

    def ended(self, seconds: float) -> list[Ended]:
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return []
        text = os.read(self.process.stdout.fileno(), 1 << 16)
        if not text and self.process.poll() is not None:
            raise Halt(f"error: the process that starts the runs ended (exit code {self.process.returncode})", 1)
        *lines, self._text = (self._text + text).split(b"\n")
        told = [json.loads(line) for line in lines]
        return [Ended(line["run"], line["code"]) for line in told if "run" in line]
