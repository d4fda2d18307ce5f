"""The crash benchmark in short: a few of each kind of end, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys

from tests.run.test_run import ROOT


def test_runs_survive() -> None:
    command = [sys.executable, "-m", "benchmarks.crash", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names, *rows = done.stdout.splitlines()[1:]
    assert names.split() == ["tries", "same", "refused", "lost", "silent", "traceback", "hang"]
    counts = [list(map(int, row[44:].split())) for row in rows]
    assert len(counts) == 8
    assert all(tries == same + refused > 0 and not any(faults) for tries, same, refused, *faults in counts)
