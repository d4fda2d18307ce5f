"""Comparisons on a real Ray cluster of this machine, and through submitit's local executor: one directory, whatever works on it.

A step of its own in .ci/run: clusters take seconds to start, and cores of their own.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments.cells import Place, holder, place_of, state_of
from experiments.live import last_epoch
from tests.experiments.sweeps import FAKE, FRAGILE, ROOT, THREE, begun, check_runs, numbers, until

pytestmark = pytest.mark.cluster
SLURM = "slurm(cluster='local')"
LONG = [*FAKE, "--num_epochs", "100", "--layer", "Attention | KvtAttention(K=2)", "--seeds", "1"]

MORTAL = f"""{FRAGILE}
import os, signal

@LAYERS.register()
class Killed(Attention):
    def mix(self, q, k, v):
        if self.training and len(q) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().mix(q, k, v)
"""


@pytest.fixture(scope="module")
def slurm() -> str:
    pytest.importorskip("submitit", reason="pip install submitit runs this")
    return SLURM


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    """One cluster for all tests, as `--executor` finds it."""
    library = pytest.importorskip("ray", reason="pip install ray runs this")
    library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield "ray(address='auto')"
    library.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, two seeds, by the executor of this machine."""
    folder = tmp_path_factory.mktemp("alone") / "sweep"
    process = begun(folder, *THREE, "--jobs", "2")
    assert process.wait() == 0, process.communicate()[1][-3000:]
    return folder


def no_one_works_on(folder: Path) -> bool:
    return not any(holder(Place("", 0, lock.with_suffix(""))) for lock in folder.glob("cells/*/*.lock"))


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_begun_on_ray_and_finished_here_with_the_help_of_submitit(alone: Path, ray: str, slurm: str, tmp_path: Path) -> None:
    """It is stopped after its first run; the others at work save. What is done stays, and the end is that of one go."""
    folder = tmp_path / "sweep"
    process = begun(folder, *THREE, "--executor", ray)
    until(process, "done")
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert process.returncode == 143, said[-3000:]
    again = f"python main.py compare --output_dir {folder} --executor {shlex.quote(ray)}"
    assert f"stopped by SIGTERM; what was done is saved. Go on with: {again}" in said
    assert no_one_works_on(folder)
    done = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*/results.json")}
    assert 1 <= len(done) < 6
    assert len([*folder.glob("cells/*/*/config.yaml")]) - len(done) <= 2  # of those that had begun: a cluster of two CPUs
    for process in [begun(folder, "--executor", slurm), begun(folder)]:
        said = process.communicate()[1]
        assert process.returncode == 0, said[-3000:]
    assert {path: path.stat().st_mtime_ns for path in done} == done
    check_runs(folder, alone, epochs=3)
    assert numbers(folder) == numbers(alone)


@pytest.mark.parametrize("cluster", ["ray", "slurm"])
def test_failures_there_are_noted_as_here(cluster: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    executor = request.getfixturevalue(cluster)
    (tmp_path / "mine.py").write_text(MORTAL)
    words = [*FAKE, "--num_epochs", "1", "--layer", "Fragile | Killed", "--seeds", "1", "--plugin", str(tmp_path / "mine.py")]
    folder = tmp_path / "sweep"
    process = begun(folder, *words, "--executor", executor, "--jobs", "2")
    said = process.communicate()[1]
    assert process.returncode == 1, said[-3000:]
    broke, killed = (place_of(folder, arm, 0) for arm in ("Fragile", "Killed"))
    line = "error: plugin mine.py, line 8, in mix: RuntimeError: it broke"
    assert said.count(f"failed: Fragile, seed 0: {line} (log: {broke.log})") == 2
    assert said.count(f"failed: Killed, seed 0: killed by SIGKILL (log: {killed.log})") == 2
    assert "it broke" in broke.log.read_text()
    assert json.loads(broke.note.read_text())["failed"] == {"line": line, "code": 1, "log": str(broke.log)}


ELSEWHERE = f"""
import sys
from pathlib import Path
sys.path.append({str(ROOT)!r})
from experiments.executors.on_ray import Options, Ray
with Ray(Path("sweep"), 1, 1, Options(address="auto")) as ray:
    ray.start({{"run": "one"}})
    print(ray.ended(60)[0].why)
"""


def test_a_worker_that_lacks_this_program_tells_which_module(ray: str, tmp_path: Path) -> None:
    """As on a machine of a cluster that has it at another path: here, by a script of another directory."""
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.check_output([sys.executable, "elsewhere.py"], cwd=tmp_path, env=environment, text=True)
    assert said == "error: ray: ModuleNotFoundError: No module named 'experiments'\n"


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_job_that_is_taken_away_goes_on_and_one_that_is_cancelled_saves(slurm: str, tmp_path: Path) -> None:
    """SIGUSR2 goes to the process that Slurm sends it to before it takes a job's machine; Ctrl-C to `compare`, in the other arm."""
    folder = tmp_path / "sweep"
    process = begun(folder, *LONG, "--executor", slurm)
    taken, cancelled = (place_of(folder, arm, 0) for arm in ("Attention", "KvtAttention(K=2)"))
    wait_until(lambda: last_epoch(taken))
    os.kill(parent_of(holder(taken)["process"]), signal.SIGUSR2)
    wait_until(lambda: last_epoch(cancelled))
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130, said[-3000:]
    assert "done: Attention, seed 0" in said
    assert "stopped: KvtAttention(K=2), seed 0" in said
    assert f"$ python main.py --resume {taken.run}" in taken.log.read_text()
    assert "Requeued job" in "".join(path.read_text() for path in folder.glob("submitit/*.out"))
    assert [json.loads(line)["epoch"] for line in (taken.run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 101)]
    for place in (taken, cancelled):
        assert "SIGTERM: finishing this step, then saving" in place.log.read_text()
    assert state_of(cancelled, json.loads(cancelled.note.read_text())["made_with"]) == "stopped"
