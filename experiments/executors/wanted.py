"""`--executor local`, `ray(...)` or `slurm(...)`: read, checked and made."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.executors.base import Executor
from utils import BadOption, Call, check_options, one_of, parse_call

PACKAGES = {"local": "", "ray": "ray", "slurm": "submitit"}


@dataclass(frozen=True)
class Wanted:
    """`--executor` and `--jobs` as they were typed. `jobs`: None where it was not."""

    call: Call = field(default_factory=lambda: Call("local"))
    jobs: int | None = None

    @property
    def is_local(self) -> bool:
        return self.call.name == "local"

    @property
    def forecast(self) -> int | None:
        """Runs at once, as far as it can be known before anything is started; None: as many as there is room for."""
        return self.jobs or (1 if self.is_local else None)

    @property
    def threads(self) -> int:
        """Of each run, where a plan that is new does not say: the cores here over the jobs, or what a run asks the cluster for."""
        if self.is_local:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            return max(1, cores // (self.jobs or 1))
        cores = self.call.options.get("num_cpus", self.call.options.get("cpus_per_task"))
        return max(1, int(cores or 1))

    @property
    def words(self) -> str:
        """For the command that goes on."""
        jobs = f" --jobs {self.forecast}" if self.forecast else ""
        return jobs if self.is_local else f"{jobs} --executor {shlex.quote(str(self.call))}"

    def make(self, folder: Path, threads: int, modules: Sequence[str]) -> Executor:
        if self.is_local:
            from experiments.executors.local import Workers

            return Workers(threads, modules, self.jobs or 1)
        make, options = parts_of(self.call.name)
        made: Executor = make(folder, threads, self.jobs, options(**self.call.options))
        return made


def wanted(text: str | None, jobs: int | None) -> Wanted:
    """Refuses what is not there: the executor, its options, or its package."""
    call = parse_call(text or "local", "executor")
    package = PACKAGES[one_of("executor", call.name, PACKAGES)]
    if package:
        check_options(call.name, parts_of(call.name)[1], call.options)
    elif call.options:
        raise BadOption("executor", "local has no options", text)
    if package and importlib.util.find_spec(package) is None:
        raise BadOption("executor", f"needs an optional package: pip install {package}", call.name)
    return Wanted(call, jobs)


def parts_of(name: str) -> tuple[Any, Any]:
    """An executor of a cluster, and what its options are."""
    part = importlib.import_module(f"experiments.executors.on_{name}")
    return getattr(part, name.capitalize()), part.Options
