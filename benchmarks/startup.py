"""How long it takes until something happens: the help, the first step of the default run, its end. In processes of their own."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.timing import Ask, Effort, Group, Side, Watch

PART, TORCH = "startup", "import torch"
ROOT = Path(__file__).resolve().parent.parent
# The command line as it is, up to the end of the first step.
FIRST_STEP = """
import os, sys
import main, train_eval
step = train_eval.step
def first_step(*given):
    step(*given)
    sys.stdout.flush()
    os._exit(0)
train_eval.step = first_step
main.main(sys.argv[1:])
sys.exit("there was no step")
"""
PROGRAMS: dict[str, list[str]] = {
    "python alone": ["-c", "pass"],
    TORCH: ["-c", "import torch"],
    "--help": [str(ROOT / "main.py"), "--help"],
    "first training step": ["-c", FIRST_STEP],
    "default run": [str(ROOT / "main.py")],
}


@dataclass(frozen=True)
class Sizes:
    programs: tuple[str, ...]
    flags: list[str] = field(default_factory=list)  # of the runs
    rounds: int = 7


ALL = Sizes(tuple(PROGRAMS))
WITHOUT_RUN = Sizes(("python alone", TORCH, "--help", "first training step"), rounds=15)


def groups(ask: Ask, sizes: Sizes | None = None) -> Iterator[Group]:
    sizes = sizes or (WITHOUT_RUN if ask.quick else ALL)
    sides = {name: program(name, sizes.flags, ask) for name in sizes.programs}
    short = {name: side for name, side in sides.items() if name != "default run"}
    effort = ask.effort(sizes.rounds, 60)
    yield Group(
        PART, "processes, from start to end", ("process",), (TORCH,), short, Effort(effort.rounds, effort.seconds, warm_up=0), memory=False
    )
    if "default run" in sides:
        once = Effort(1, 0, warm_up=0, fewest=1)
        both = {TORCH: sides[TORCH], "default run": sides["default run"]}
        yield Group(PART, "the default run, once", ("process",), (TORCH,), both, once, memory=False)


def program(name: str, flags: Sequence[str], ask: Ask) -> Side:
    words = PROGRAMS[name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(ask.threads), "PYTHONPATH": str(ROOT)}

    def run(watch: Watch) -> None:
        with tempfile.TemporaryDirectory() as folder:
            given = ["--output_dir", f"{folder}/run", *flags] if name in ("first training step", "default run") else []
            watch.took(seconds_of([sys.executable, *words, *given], environment, ask.clock, folder))

    return run


def seconds_of(words: list[str], environment: dict[str, str], clock: str, folder: str) -> float:
    """Of a process and of those that it started: by the wall, or of all processors."""
    said = Path(folder) / "said"
    start = time.perf_counter()
    with said.open("wb") as file:
        sent = [(os.POSIX_SPAWN_DUP2, file.fileno(), 1), (os.POSIX_SPAWN_DUP2, file.fileno(), 2)]
        child = os.posix_spawn(words[0], words, environment, file_actions=sent)
        _, status, used = os.wait4(child, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"exit code {code} of {' '.join(words[1:3])}: {said.read_text()[-300:]}")
    return used.ru_utime + used.ru_stime if clock == "cpu" else time.perf_counter() - start
