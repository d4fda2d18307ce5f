"""The fuzzer, a short form of it: what must be 0 is 0, and it would see what is not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import forked
from benchmarks.fuzz import COLUMNS, as_text, bad, came_to, mutated, outcome, with_another_value
from tests.run.test_run import ROOT
from utils import BadOption


def test_damaged_files_and_random_command_lines_end_in_a_line(tmp_path: Path) -> None:
    """In a process of its own: it forks, and tests before this one have searched with threads."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.fuzz",
        "--mutations",
        "8",
        "--commands",
        "12",
        "--seed",
        "7",
        "--json",
        str(tmp_path / "json"),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = {kind: Counter(counts) for kind, counts in json.loads((tmp_path / "json").read_text())["table"].items()}
    assert bad(table) == 0
    assert all(counts["tries"] == sum(counts[name] for name in COLUMNS[1:]) for counts in table.values())
    assert sum(counts["refused"] for counts in table.values()) > 30
    assert table["command line"]["same"] > 0
    assert as_text(table) == done.stdout.rstrip("\n")


@contextlib.contextmanager
def that(ends: Callable[[], object]) -> Iterator[None]:
    ends()
    yield


def spins() -> None:
    while True:
        pass


def raises() -> None:
    raise ArithmeticError("nobody foresaw it")


@pytest.mark.parametrize(
    ("ends", "code", "kind"),
    [
        (spins, forked.HANG, "hang"),  # by the CPU time that it takes
        (signal.pause, forked.HANG, "hang"),  # by the time that it waits
        (raises, forked.CAME_THROUGH, "traceback"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, "traceback"),
        (lambda: None, 2, "refused"),
    ],
)
def test_how_a_command_line_ended(
    ends: Callable[[], object], code: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "CPU_SECONDS", 1)
    monkeypatch.setattr(forked, "SECONDS", 1 if ends is signal.pause else 600)
    found, said = forked.run(["--lr", "-1"], tmp_path / "said.txt", that(ends))
    assert found == code
    assert came_to(found, said, tmp_path / "run") == kind


def test_what_a_command_line_left_behind(tmp_path: Path) -> None:
    """Something where an option is wrong; nothing where all is said to be well."""
    assert came_to(0, "", tmp_path / "run") == "silent"
    assert came_to(1, "error: KeyError: 'x', in training; the traceback is in x.txt", tmp_path / "run") == "traceback"
    assert came_to(1, "", tmp_path / "run") == "silent"
    (tmp_path / "run").mkdir()
    assert came_to(2, "error: --lr must be above 0", tmp_path / "run") == "lost"
    (tmp_path / "run" / "results.json").touch()
    assert came_to(0, "", tmp_path / "run") == "same"
    assert came_to(0, "Traceback (most recent call last):", tmp_path / "run") == "traceback"


def test_what_comes_of_a_file():
    """Also what the others must be 0 of: another number, an exception."""

    def refuses() -> int:
        raise BadOption("a", "is wrong")

    shown: list[str] = []
    reads = {"same": lambda: 3, "silent": lambda: 4, "traceback": lambda: [][0], "refused": refuses}
    assert {name: outcome(read, 3, shown, name) for name, read in reads.items()} == {name: name for name in reads}
    assert len(shown) == 2


@pytest.mark.parametrize("seed", range(5))
def test_mutations_follow_from_their_seed_and_change_something(seed):
    content = np.random.default_rng(0).bytes(997)
    found = [mutated(content, random.Random(seed)) for _ in range(2)]
    assert found[0] == found[1] != content
    changed = with_another_value({"a": [1, {"b": 2}], "c": "d"}, random.Random(seed))
    assert changed != {"a": [1, {"b": 2}], "c": "d"}
