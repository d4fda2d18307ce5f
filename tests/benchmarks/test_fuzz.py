"""The fuzzer, a short form of it: what must be 0 is 0, and it would see what is not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.fuzz import COLUMNS, as_text, bad, mutated, outcome, run, with_another_value
from utils import BadOption


def test_damaged_files_and_random_command_lines_end_in_a_line(without_a_stopwatch):
    table, shown = run(mutations=8, commands=12, seed=7)
    assert bad(table) == 0, "\n".join(shown)
    assert all(counts["tries"] == sum(counts[name] for name in COLUMNS[1:]) for counts in table.values())
    assert sum(counts["refused"] for counts in table.values()) > 30
    assert table["command line"]["same"] > 0
    assert "command line" in as_text(table)


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
