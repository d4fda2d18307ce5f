"""Runs as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.executors.base import EVERY, SECONDS, STOPPED, Ended
from experiments.executors.process import RunProcess
from utils import BadOption, say, shortened


@dataclass(frozen=True, kw_only=True)
class Options:
    """`address`: of the cluster; "auto": one that must be found; by default one that is found, or a new one, of this machine alone. The
    others: what a run needs, `num_cpus` its threads unless it says more."""

    address: str | None = None
    num_cpus: float | None = None
    num_gpus: float = 0
    memory_gb: float | None = None
    resources: Any = None


class Ray:
    """`--jobs`: the most that run at once; by default all are handed over, and as many run as fit."""

    def __init__(self, folder: Path, threads: int, jobs: int | None, options: Options) -> None:
        if options.resources is not None and not isinstance(options.resources, dict):
            raise BadOption("resources", "must be names with numbers, as {'tpu': 1}", options.resources)
        self.options, self.at_once, self.room = options, jobs or EVERY, jobs or 1
        cpus = threads if options.num_cpus is None else options.num_cpus
        memory = None if options.memory_gb is None else int(options.memory_gb * 2**30)
        self.needs: dict[str, Any] = {"num_cpus": cpus, "num_gpus": options.num_gpus, "memory": memory, "resources": options.resources}
        self.task: Any = None
        self.gate: Any = None
        self.at_work: dict[Any, Mapping[str, Any]] = {}  # by what Ray calls a task

    def __enter__(self) -> Ray:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        before = signal.getsignal(signal.SIGTERM)
        try:
            check_answers(self.options.address)
            ray.init(address=self.options.address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
            self.task = ray.remote(there).options(**self.needs)
            beside = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            kept = {"max_restarts": -1, "max_task_retries": -1}
            self.gate = ray.remote(Gate).options(num_cpus=0, scheduling_strategy=beside, **kept).remote()
        except Exception as error:  # of many kinds, bare ones among them
            ray.shutdown()
            raise BadOption("executor", f"ray: {shortened(error, 200)}", self.options.address or "ray") from None
        finally:
            if threading.current_thread() is threading.main_thread():  # Ray takes SIGTERM for itself
                signal.signal(signal.SIGTERM, before)
        fit = sum(map(self.fit, nodes := [node["Resources"] for node in ray.nodes() if node["Alive"]]))
        self.room = max(1, min(fit, self.at_once))
        cpus, gpus = (sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU"))
        say(f"executor: ray, {len(nodes)} nodes with {cpus:g} CPUs and {gpus:g} GPUs; {fit} runs fit at once")
        if not fit:  # NOTE: Ray lets a task wait for ever for what no node has, and a cluster may grow
            say("warning: no node of the cluster has room for a run; they wait until one has")
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        ray.shutdown()  # NOTE: it kills what still runs

    def fit(self, node: Mapping[str, float]) -> int:
        """How many runs a node has room for."""
        needs = {
            "CPU": self.needs["num_cpus"],
            "GPU": self.needs["num_gpus"],
            "memory": self.needs["memory"],
            **(self.needs["resources"] or {}),
        }
        return int(min((node.get(name, 0.0) // need for name, need in needs.items() if need), default=EVERY))

    def warm_up(self) -> None:
        pass

    def start(self, job: Mapping[str, Any]) -> None:
        self.at_work[self.task.remote({**job, "cwd": os.getcwd()}, self.gate)] = job

    def ended(self, seconds: float) -> list[Ended]:
        import ray

        ready = ray.wait(list(self.at_work), num_returns=1, timeout=seconds)[0]
        return [self.outcome(task, self.at_work.pop(task)["run"]) for task in ready]

    def outcome(self, task: Any, run: str) -> Ended:
        import ray

        try:
            return Ended(run, ray.get(task))
        except ray.exceptions.RayError as error:
            return Ended(run, 1, f"error: ray: {shortened(reason(getattr(error, 'cause', None) or error), 200)}")

    def stop(self) -> Iterator[Ended]:
        import ray

        entered = ray.get(self.gate.close.remote())
        for task, run in [(task, job["run"]) for task, job in self.at_work.items() if job["run"] not in entered]:
            del self.at_work[task]
            yield Ended(run, STOPPED[0])
        while self.at_work:
            yield from self.ended(SECONDS)


class Gate:
    """An actor that every task asks: before it starts its run, and while the run is at work.

    NOTE: in the place of ray.cancel, which may end this whole process with a failed check of Ray's own where it meets a task that is
    just starting or ending.
    """

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self.closed = False

    def enter(self, run: str) -> bool:
        """Whether it may start."""
        if not self.closed:
            self.entered.add(run)
        return not self.closed

    def close(self) -> set[str]:
        """No run starts from now on; those that have are to save and end."""
        self.closed = True
        return self.entered

    def is_closed(self) -> bool:
        return self.closed


def reason(error: BaseException) -> str:
    """A worker that can't import this program tells so in a long message, at whose end is the reason."""
    _, traceback, said = str(error).rpartition("\nTraceback (most recent call last):\n")
    return said.strip().splitlines()[-1] if traceback else f"{type(error).__name__}: {error}"


def check_answers(address: str | None) -> None:
    """NOTE: Ray asks an address at which nobody is for minutes, and says nothing."""
    given = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    host, _, port = (given or "").rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def there(job: Mapping[str, Any], gate: Any) -> int:
    """In a worker of the cluster: the run's exit code."""
    if not answer(gate.enter.remote(job["run"])):
        return STOPPED[0]
    run = RunProcess(job)
    while not run.ended(SECONDS):
        if answer(gate.is_closed.remote()):
            run.stop()
    return run.wait()


def answer(question: Any) -> Any:
    """NOTE: by another thread, because Ray lends the CPUs of a task whose main thread waits for an answer to the next task."""
    import ray

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ray.get, question).result()
