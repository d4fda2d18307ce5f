"""Runs what is left of a comparison, several at once, by an executor."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from experiments.cells import Place, note_failure, note_retry, read_note, state_of
from experiments.executors.base import ELSEWHERE, SECONDS, STOPPED, Ended, Executor
from experiments.grid import Arm
from run.directory import RESULTS
from utils import Halt, say


class FailedFast(Halt):
    """A run failed, and none should go on then."""


class View(Protocol):
    """Shows how far the runs are."""

    def line(self, text: str) -> None: ...
    def show(self) -> None: ...
    def finished(self, place: Place) -> None: ...


@dataclass
class Launch:
    """A comparison that runs. `made_with`: digests by arm; `retry`: states that are tried again."""

    arms: Mapping[str, Arm]
    made_with: Mapping[str, Mapping[str, str]]
    threads: int
    view: View
    retry: frozenset[str] = frozenset()
    fail_fast: bool = False
    shared: Callable[[Arm, int], Mapping[str, Any]] = lambda arm, seed: {}  # flags that a run of an arm and seed is given
    retried: set[Path] = field(default_factory=set)

    def run(self, places: Sequence[Place], executor: Executor) -> None:
        """Until each of them is done, has failed, or was stopped. One failure stops nothing, unless asked."""
        queue, at_work, elsewhere = list(places), dict[str, Place](), list[Place]()
        try:
            while queue or at_work or elsewhere:
                while queue and len(at_work) < executor.at_once:
                    self.next(queue.pop(0), executor, at_work, elsewhere)
                if not (at_work or elsewhere):
                    continue
                for ended in executor.ended(SECONDS) if at_work else self.wait():
                    self.end(at_work.pop(ended.run), ended, elsewhere)
                for place in [p for p in elsewhere if self.state(p) != "running"]:  # another `compare` has finished it, or died
                    elsewhere.remove(place)
                    queue.insert(0, place)
                self.view.show()
        except (KeyboardInterrupt, FailedFast):
            self.stop(executor, at_work)
            raise

    def wait(self) -> list[Ended]:
        time.sleep(SECONDS)
        return []

    def state(self, place: Place) -> str:
        return state_of(place, self.made_with[place.arm])

    def next(self, place: Place, executor: Executor, at_work: dict[str, Place], elsewhere: list[Place]) -> None:
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
        executor.start({**job, "flags": given, "threads": self.threads, "again": again})
        at_work[str(place.run)] = place

    def end(self, place: Place, ended: Ended, elsewhere: list[Place]) -> None:
        """A run has ended: well, or what is to be said about it."""
        if ended.code == ELSEWHERE:
            elsewhere.append(place)
        elif ended.code == 0:
            self.view.finished(place)
        elif ended.code in STOPPED:
            self.view.line(f"stopped: {place.title} (not by this command); another compare goes on with it")
        else:
            if "failed" not in read_note(place):  # nobody was left to note it
                killed = f"killed by {signal.Signals(-ended.code).name}" if ended.code < 0 else "error: it could not begin"
                note_failure(place, ended.why or killed, ended.code)
            self.view.line(failure(place))
            if self.fail_fast:
                raise FailedFast("error: stopped because a run failed (--fail_fast)", 1)

    def stop(self, executor: Executor, at_work: dict[str, Place]) -> None:
        """Each run finishes its step and is saved."""
        if at_work:
            self.view.line(f"stopping: {len(at_work)} runs finish their step and are saved (Ctrl-C again ends at once)")
        with contextlib.suppress(Halt):
            for run, code, _ in executor.stop():
                if place := at_work.pop(run, None):
                    how = "done" if code == 0 else "failed" if code == 1 else "stopped"
                    self.view.line(f"{how}: {place.title}")


def failure(place: Place) -> str:
    """What a run failed of, and where all of it stands."""
    noted = read_note(place).get("failed", {})
    return f"failed: {place.title}: {noted.get('line', 'no result')} (log: {place.log})"


def tell_jobs(jobs: int, threads: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs * threads > cores:
        say(f"jobs: {jobs} runs at once with {threads} threads each, on {cores} cores")
