"""Runs what is left of a comparison, several at once, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from experiments.cells import Place, note_failure, note_retry, read_note, state_of
from experiments.grid import Arm
from run.directory import RESULTS
from utils import BadOption, Halt, say

ELSEWHERE = 75  # as in experiments/worker.py, which loads torch
ROOT = Path(__file__).parent.parent
SECONDS = 0.5  # between looks at the directories


class FailedFast(Halt):
    """A run failed, and none should go on then."""


class View(Protocol):
    """Shows how far the runs are."""

    def line(self, text: str) -> None: ...
    def show(self) -> None: ...
    def finished(self, place: Place) -> None: ...


@dataclass
class Workers:
    """The process that forks the runs, and how to talk to it. It is started by the first run, or by `warm_up` while there is other work."""

    threads: int
    modules: Sequence[str] = ()
    process: Any = None
    _text: bytes = b""

    def __enter__(self) -> Workers:
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
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        # A session of its own: Ctrl-C on the terminal is for `compare`, which tells the runs.
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "experiments.worker", *self.modules]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0, start_new_session=True
        )

    def start(self, job: Mapping[str, Any]) -> None:
        self.warm_up()
        self.process.stdin.write((json.dumps(job) + "\n").encode())

    def stop(self) -> Iterator[tuple[str, int]]:
        """Tells every run to save and end; gives those that do, until none is left."""
        self.process.stdin.close()
        while self.process.poll() is None:
            yield from self.ended(SECONDS)

    def ended(self, seconds: float) -> list[tuple[str, int]]:
        """Runs that ended, with their exit codes; waits at most so long for one."""
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return []
        text = os.read(self.process.stdout.fileno(), 1 << 16)
        if not text and self.process.poll() is not None:
            raise Halt(f"error: the process that starts the runs ended (exit code {self.process.returncode})", 1)
        *lines, self._text = (self._text + text).split(b"\n")
        told = [json.loads(line) for line in lines]
        return [(line["run"], line["code"]) for line in told if "run" in line]


@dataclass
class Launch:
    """A comparison that runs. `made_with`: digests by arm; `retry`: states that are tried again."""

    arms: Mapping[str, Arm]
    made_with: Mapping[str, Mapping[str, str]]
    threads: int
    jobs: int
    view: View
    retry: frozenset[str] = frozenset()
    fail_fast: bool = False
    shared: Callable[[Arm, int], Mapping[str, Any]] = lambda arm, seed: {}  # flags that a run of an arm and seed is given
    retried: set[Path] = field(default_factory=set)

    def run(self, places: Sequence[Place], workers: Workers) -> None:
        """Until each of them is done, has failed, or was stopped. One failure stops nothing, unless asked."""
        queue, at_work, elsewhere = list(places), dict[str, Place](), list[Place]()
        try:
            while queue or at_work or elsewhere:
                while queue and len(at_work) < self.jobs:
                    self.next(queue.pop(0), workers, at_work, elsewhere)
                if not (at_work or elsewhere):
                    continue
                for run, code in workers.ended(SECONDS) if at_work else self.wait():
                    self.end(at_work.pop(run), code, elsewhere, queue)
                for place in [p for p in elsewhere if self.state(p) != "running"]:  # another `compare` has finished it, or died
                    elsewhere.remove(place)
                    queue.insert(0, place)
                self.view.show()
        except (KeyboardInterrupt, FailedFast):
            self.stop(workers, at_work)
            raise

    def wait(self) -> list[tuple[str, int]]:
        time.sleep(SECONDS)
        return []

    def state(self, place: Place) -> str:
        return state_of(place, self.made_with[place.arm])

    def next(self, place: Place, workers: Workers, at_work: dict[str, Place], elsewhere: list[Place]) -> None:
        """Starts a run, if there is something to do."""
        state = self.state(place)
        if state == "running":
            elsewhere.append(place)
            return
        finished = (place.run / RESULTS).exists()
        again = state in self.retry and place.run not in self.retried
        if not again and (state in ("done", "failed") or finished):
            return
        if again:
            self.retried.add(place.run)
            note_retry(place)
        if state == "stale" and not finished:
            self.view.line(f"stale: {place.title} was begun with other code, data or plugin, and begins anew")
        job = {"arm": place.arm, "seed": place.seed, "run": str(place.run), "made_with": self.made_with[place.arm]}
        arm = self.arms[place.arm]
        given = {**self.shared(arm, place.seed), **arm.flags, "seed": place.seed}
        workers.start({**job, "flags": given, "threads": self.threads, "again": again})
        at_work[str(place.run)] = place

    def end(self, place: Place, code: int, elsewhere: list[Place], queue: list[Place]) -> None:
        """A run has ended: well, or what is to be said about it."""
        if code == ELSEWHERE:
            elsewhere.append(place)
        elif code == 0:
            self.view.finished(place)
        elif code in (128 + signal.SIGTERM, -signal.SIGTERM, 130):
            self.view.line(f"stopped: {place.title} (not by this command); another compare goes on with it")
        else:
            if code < 0:  # nobody was left to note it
                note_failure(place, f"killed by {signal.Signals(-code).name}", code)
            self.view.line(failure(place))
            if self.fail_fast:
                raise FailedFast("error: stopped because a run failed (--fail_fast)", 1)

    def stop(self, workers: Workers, at_work: dict[str, Place]) -> None:
        """Each run finishes its step and is saved."""
        if at_work:
            self.view.line(f"stopping: {len(at_work)} runs finish their step and are saved (Ctrl-C again ends at once)")
        with contextlib.suppress(Halt):
            for run, code in workers.stop():
                if place := at_work.pop(run, None):
                    how = "done" if code == 0 else "failed" if code == 1 else "stopped"
                    self.view.line(f"{how}: {place.title}")


def failure(place: Place) -> str:
    """What a run failed of, and where all of it stands."""
    noted = read_note(place).get("failed", {})
    return f"failed: {place.title}: {noted.get('line', 'no result')} (log: {place.log})"


def check_can_fork() -> None:
    if not hasattr(os, "fork"):
        raise BadOption(
            "compare", "needs a system whose processes can fork (Linux, macOS) to run anything; finished runs by path it can compare"
        )


def tell_jobs(jobs: int, threads: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs * threads > cores:
        say(f"jobs: {jobs} runs at once with {threads} threads each, on {cores} cores")
