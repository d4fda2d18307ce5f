"""Runs as jobs of Slurm, through submitit: what waits is submitted as one array.

Slurm takes jobs away: at the end of their time, or for others that come first. submitit is told by a signal, SIGUSR2, the run saves, and
the job goes back into the queue; begun again, it goes on from the run's last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cells import Place, holder
from experiments.executors.base import ELSEWHERE, EVERY, GRACE, SECONDS, STOPPED, Ended
from experiments.executors.on_node import OnNode
from experiments.executors.process import environment
from run.directory import RESULTS
from utils import BadOption, Halt, one_of, say, shortened

FOLDER = "submitit"  # in the directory of the comparison: what submitit hands over, and what Slurm says
MOST = 256  # jobs of an array at once, where --jobs does not say
LOOK = 2.0  # seconds between looks at the jobs


@dataclass(frozen=True, kw_only=True)
class Options:
    """sbatch's, by the names that submitit has for them. `time`: minutes; a run that needs more goes on in the next ones, `requeues`
    times. `cpus_per_task`: a run's threads unless it says more. `setup`: commands before a run, as ["module load cuda"].
    `additional_parameters`: any other, as {"reservation": "x"}. `signal_delay_s`: what a run has to save itself. `cluster`: "local" does
    the same on this machine, without Slurm, to try it.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: int = 240
    gpus_per_node: int | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    comment: str | None = None
    setup: Any = None
    additional_parameters: Any = None
    signal_delay_s: int = 90
    requeues: int = 100
    cluster: str = "slurm"

    def parameters(self, folder: Path, threads: int, parallel: int) -> dict[str, Any]:
        """As submitit takes them: what all its executors have in common, and what is of Slurm alone."""
        own = dataclasses.asdict(self) | {"additional_parameters": {"requeue": True, **(self.additional_parameters or {})}}
        common = {"timeout_min": own.pop("time"), "gpus_per_node": own.pop("gpus_per_node"), "name": folder.resolve().name}
        common["cpus_per_task"] = own.pop("cpus_per_task") or threads
        for name in ("requeues", "cluster"):
            del own[name]
        return {**common, **{f"slurm_{name}": value for name, value in own.items()}, "slurm_array_parallelism": parallel}


class Slurm:
    """`--jobs`: jobs of an array at once (256); with `cluster="local"`, of all (1)."""

    def __init__(self, folder: Path, threads: int, jobs: int | None, options: Options) -> None:
        one_of("cluster", options.cluster, ("slurm", "local"))
        if not isinstance(setup := options.setup or [], list) or not all(isinstance(line, str) for line in setup):
            raise BadOption("setup", "must be commands, as ['module load cuda']", setup)
        if not isinstance(more := options.additional_parameters or {}, dict):
            raise BadOption("additional_parameters", "must be names with values, as {'reservation': 'x'}", more)
        self.folder, self.threads, self.options = folder, threads, options
        self.at_once, self.room = (jobs or 1, jobs or 1) if options.cluster == "local" else (EVERY, jobs or MOST)
        self.submitter: Any = None
        self.waiting: list[dict[str, Any]] = []  # to be submitted
        self.at_work: dict[str, tuple[Any, Mapping[str, Any]]] = {}  # by run: submitit's job, and ours
        self.preempted: dict[str, float] = {}  # since when
        self.looked = 0.0

    def __enter__(self) -> Slurm:
        import submitit

        try:
            place = (self.folder / FOLDER).resolve()
            times = {"slurm_max_num_timeout": self.options.requeues}
            self.submitter = submitit.AutoExecutor(folder=place, cluster=self.options.cluster, **times)
            self.submitter.update_parameters(**self.options.parameters(self.folder, self.threads, self.room))
        except RuntimeError as error:  # no srun
            raise BadOption("executor", f"slurm: {shortened(error, 200)} (cluster='local' tries it without Slurm)", "slurm") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise BadOption("executor", f"slurm: {shortened(error, 200)}", "slurm") from None
        return self

    def __exit__(self, *error: object) -> None:
        for job, _ in self.at_work.values() if error[0] is not None else ():
            with contextlib.suppress(OSError):
                job.cancel(check=False)

    def warm_up(self) -> None:
        pass

    def start(self, job: Mapping[str, Any]) -> None:
        self.waiting.append({**job, "cwd": os.getcwd()})

    def submit(self) -> None:
        """All that wait, as one array."""
        import submitit

        jobs, self.waiting = self.waiting, []
        if not jobs:
            return
        with submitit.helpers.environment_variables(PYTHONPATH=environment(self.threads)["PYTHONPATH"]):
            try:
                found = self.submitter.map_array(OnNode(), jobs)
            except (OSError, RuntimeError) as error:  # sbatch refuses: its last line says why
                last = [line for line in str(error).splitlines() if line.strip()][-1:]
                raise Halt(f"error: slurm: {shortened(''.join(last) or type(error).__name__, 300)}", 1) from None
        self.at_work |= {job["run"]: (there, job) for job, there in zip(jobs, found, strict=True)}
        if self.options.cluster == "slurm":
            say(f"executor: slurm, {len(jobs)} jobs ({found[0].job_id.partition('_')[0]}), at most {self.room} at once")

    def ended(self, seconds: float) -> list[Ended]:
        self.submit()
        time.sleep(max(0.0, min(seconds, self.looked + LOOK - time.monotonic())))
        if time.monotonic() < self.looked + LOOK:
            return []
        self.looked = time.monotonic()
        done = [run for run, (job, _) in self.at_work.items() if job.done() or self.is_lost(run, job)]
        return [self.outcome(run, self.at_work.pop(run)[0]) for run in done]

    def is_lost(self, run: str, job: Any) -> bool:
        """NOTE: a site may end the jobs that it preempts and not requeue them; submitit waits for them for ever."""
        if str(job.state) != "PREEMPTED":
            self.preempted.pop(run, None)
            return False
        return self.looked - self.preempted.setdefault(run, self.looked) > GRACE

    def outcome(self, run: str, job: Any) -> Ended:
        if job.paths.result_pickle.exists():
            if job.exception() is None:
                return Ended(run, *job.result())
            return Ended(run, 1, f"error: slurm: job {job.job_id} could not begin (log: {job.paths.stderr})")
        state = str(job.state)
        if state.startswith("CANCELLED"):
            return Ended(run, STOPPED[0])
        if state in ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED"):
            return Ended(run, ELSEWHERE)
        return Ended(run, 1, f"error: slurm: job {job.job_id} ended as {state} (log: {job.paths.stderr})")

    def stop(self) -> Iterator[Ended]:
        """Slurm takes what waits out of its queue, and sends SIGTERM to what runs."""
        dropped, self.waiting = self.waiting, []
        for job, _ in self.at_work.values():
            job.cancel(check=False)
        yield from (left_behind(job["run"]) for job in dropped)
        while self.at_work:
            for run in [run for run, (there, job) in self.at_work.items() if has_ended(there, job)]:
                del self.at_work[run]
                yield left_behind(run)
            time.sleep(SECONDS if self.at_work else 0.0)


def has_ended(there: Any, job: Mapping[str, Any]) -> bool:
    """A job that was cancelled: nobody works on its run, or somebody else does."""
    return there.paths.result_pickle.exists() or not holder(Place(job["arm"], job["seed"], Path(job["run"])))


def left_behind(run: str) -> Ended:
    """A run that nobody works on any more, by what its directory holds."""
    return Ended(run, 0 if (Path(run) / RESULTS).exists() else STOPPED[0])
