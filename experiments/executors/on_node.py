"""A job of Slurm where it runs: what submitit calls there, and asks before the job is taken away."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from experiments.executors.base import GRACE, STOPPED
from experiments.executors.process import RunProcess
from utils import shortened


class OnNode:
    """What submitit calls on a node: in the first process of the job's step."""

    run: RunProcess | None = None
    told = False  # Slurm has sent SIGTERM, to every process of the step: the run has got it, too, and saves

    def __call__(self, job: Mapping[str, Any]) -> tuple[int, str]:
        """Exit code, and why, where the run can't have noted it."""
        from submitit.core.utils import UncompletedJobError

        signal.signal(signal.SIGTERM, self.note)
        try:
            self.run = RunProcess(job)
            code = self.run.wait()
            if self.told and code in STOPPED:
                time.sleep(GRACE)  # NOTE: a job that ended now would count as done, and not be requeued
            return code, ""
        except UncompletedJobError:  # out of requeues; the run has saved
            return STOPPED[0], ""
        except Exception as error:  # no such directory here; it may not be requeued
            return 1, f"error: slurm: {type(error).__name__}: {shortened(error, 200)}"
        except KeyboardInterrupt:  # cancelled, where there is no Slurm
            if self.run is not None:
                self.run.stop()
                self.run.wait()
            raise

    def note(self, number: int, frame: object) -> None:
        self.told = True

    def checkpoint(self, job: Mapping[str, Any]) -> Any:
        """SIGUSR2: the run saves, and submitit requeues what is given back."""
        from submitit.helpers import DelayedSubmission

        if self.run is not None:
            if not self.told:
                self.run.stop()
            self.run.ended()
        return DelayedSubmission(OnNode(), job)
