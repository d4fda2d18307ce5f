"""What an executor is: it starts runs and tells which have ended.

All else is in the directory of the comparison: who works on a run, how far it is, how it failed. So executors can follow each other, or
work side by side, on one comparison.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

SECONDS = 0.5  # between looks at the directories
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM, 130)  # exit codes of a run that was told to save and end
ELSEWHERE = 75  # that of a run which another process works on, or which is to be begun again for another reason
GRACE = 600.0  # seconds after SIGTERM within which Slurm requeues a job, or ends it
EVERY = 1 << 30  # runs are handed over at once where the cluster has a queue of its own


class Ended(NamedTuple):
    """A run that has ended: its directory, its exit code, and, where nobody was left to note it, why."""

    run: str
    code: int
    why: str = ""


class Executor(Protocol):
    """Used in a `with` statement; leaving it by an error ends what still runs. `at_once`: how many runs it is given before one has
    ended; `room`: how many of them are likely to run side by side."""

    @property
    def at_once(self) -> int: ...

    @property
    def room(self) -> int: ...

    def __enter__(self) -> Executor: ...

    def __exit__(self, *error: object) -> None: ...

    def warm_up(self) -> None:
        """What can be got ready while the plan is checked."""

    def start(self, job: Mapping[str, Any]) -> None:
        """`job`: as experiments/worker.py takes it."""

    def ended(self, seconds: float) -> list[Ended]:
        """Runs that have ended since it was asked; waits at most so long for one."""

    def stop(self) -> Iterator[Ended]:
        """Tells every run to save and end; gives those that do, until none is left."""
