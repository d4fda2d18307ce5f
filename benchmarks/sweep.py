"""What a comparison costs beside its runs alone, and whether it survives being killed.

    python benchmarks/sweep.py overhead     12 digits runs one after the other by hand, and by `compare --jobs 1`: wall clock and CPU time
    python benchmarks/sweep.py hundred      100 tiny runs: seconds a run
    python benchmarks/sweep.py killed       12 digits runs killed with SIGKILL twice, then gone on with by two `compare` at once

Wall clock needs a machine that does nothing else; CPU time is that of all processes, and hardly depends on what else runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.cells import holder, place_of  # noqa: E402

LAYERS = ("Attention", "KvtAttention(K=4)", "KvtAttention(K=9)")
SEEDS = 4
TINY = ["--num_layers", "1", "--num_heads", "1", "--d_hidden", "8", "--d_mlp", "8", "--patch_size", "4", "--num_epochs", "1"]
FAKE = ["--dataset", "fake(train=60, test=30, size=8, classes=3)", *TINY, "--no-baselines"]


def started(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "main.py"), *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str]) -> str:
    said = process.communicate()[1]
    assert process.returncode == 0, said[-2000:]
    return said


def overhead(folder: Path, epochs: str = "20") -> None:
    start = clocks()
    for layer in LAYERS:
        for seed in range(SEEDS):
            words = ["--layer", layer, "--seed", str(seed), "--num_epochs", epochs, "--output_dir", str(folder / f"{layer}-{seed}")]
            finished(started(*words))
    middle = clocks()
    finished(started(*compared(folder / "sweep", epochs), "--jobs", "1"))
    end = clocks()
    print(f"12 digits runs of {epochs} epochs")
    for name, a, b, c in zip(("wall clock", "CPU time"), start, middle, end, strict=True):
        print(f"{name}: by hand {b - a:.1f} s, compare {c - b:.1f} s ({(c - b) / (b - a) - 1:+.1%})")


def clocks() -> tuple[float, float]:
    """Wall clock, and CPU time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), used.ru_utime + used.ru_stime


def compared(folder: Path, epochs: str) -> list[str]:
    words = ["--layer", " | ".join(LAYERS), "--seeds", str(SEEDS), "--dataset", "digits", "--num_epochs", epochs, "--threads", "1"]
    return ["compare", *words, "--output_dir", str(folder)]


def hundred(folder: Path) -> None:
    begun = time.perf_counter()
    words = ["--layer", "Attention", "--lr", "|".join(f"{n}e-4" for n in range(1, 11)), "--seeds", "10", "--threads", "1", "--jobs", "2"]
    finished(started("compare", *FAKE, *words, "--output_dir", str(folder / "hundred")))
    seconds = time.perf_counter() - begun
    count = len(list((folder / "hundred").glob("cells/*/*/results.json")))
    print(f"{count} tiny runs, 2 at once: {seconds:.1f} s, {seconds / count:.2f} s a run")


def killed(folder: Path, epochs: str = "4") -> None:
    finished(started(*compared(folder / "alone", epochs), "--jobs", "2"))
    sweep = folder / "killed"
    for words in ([*compared(sweep, epochs), "--jobs", "2"], ["compare", "--output_dir", str(sweep), "--jobs", "1", "--retry", "failed"]):
        process = started(*words)
        assert process.stderr
        next(line for line in process.stderr if line.startswith("done"))
        process.kill()
        for place in (place_of(sweep, layer, seed) for layer in LAYERS for seed in range(SEEDS)):
            if (who := holder(place)) and who["process"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(who["process"], signal.SIGKILL)
        process.wait()
    again = ["compare", "--output_dir", str(sweep), "--retry", "failed", "--jobs"]
    for process in [started(*again, "2"), started(*again, "1")]:
        finished(process)
    one, other = (differences(f) for f in (folder / "alone", sweep))
    print("the tables are the same" if one == other else f"the tables differ: {one} and {other}")
    sys.exit(one != other)


def differences(folder: Path) -> list[Any]:
    body = json.loads((folder / "comparison.json").read_text())
    return [[c[name] for name in ("arm", "difference", "low", "high", "p_holm", "verdict", "variance")] for c in body["comparisons"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        {"overhead": overhead, "hundred": hundred, "killed": killed}[sys.argv[1]](Path(temporary))
