"""Comparisons that can't be made end in one line, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from main import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.rglob("*"))  # nothing written


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--layer", "Attention | KvtAttention(K=4)", "--baseline", "KvtAttention"], r"--baseline must be one of the arms .*did you mean"),
        (["--layer", "Attention | Kvt(K=4)"], r"--layer must be one of .*, in arm Kvt\(K=4\), got 'Kvt'"),
        (["--layer", "Attention | KvtAttention(K=99)"], r"--K must be at most .*, in arm KvtAttention\(K=99\), got 99"),
        (["--layer", "Attention"], "needs at least two arms"),
        (["--layer", "Attention | BranchConv", "--metric", "acuracy"], r"--metric must be one of .*did you mean 'accuracy'"),
        (["--layer", "Attention | BranchConv", "--seed", "3"], "--seed is given to each run by the comparison: use --seeds, got '3'"),
        (["--layer", "Attention | BranchConv", "--seeds", "none"], "--seeds must be how many"),
        (["--layer", "Attention | BranchConv", "--looks", "2,9", "--seeds", "3"], "--looks must be rising numbers of seeds from 2 to 3"),
        (["--layer", "Attention | BranchConv", "--retry", "all"], "--retry must be of failed, stale"),
        (["--layer", "Attention | BranchConv", "--jobs", "0"], "--jobs must be a whole number of at least 1"),
        (["--dataset", "digits | fake"], "--dataset must give all arms the same test rows"),
        (["--plan", "no.yaml"], "--plan must be a file that can be read"),
        ([], "--output_dir must hold a plan.json to go on with, where nothing else is typed, got 'sweep'"),
        (["--layer", "Attention | BranchConv", "--seeds", "1,1"], "--seeds must name each seed once, got '1,1'"),
        (
            ["--layer", "Attention | BranchConv", "--within", "linear.raw, atention.raw"],
            r"--within must name predictors that every run will have; those of Attention will have .*did you mean 'attention.raw'",
        ),
        (
            ["--layer", "Attention | BranchConv", "--calibrated", "--calibrate", "none"],
            "--calibrated needs runs that calibrate, and those of Attention do not",
        ),
        (["runs/a", "runs/b"], "compare must name finished runs; this does not exist, got 'runs/a'"),
        (["runs/a", "--layer", "Attention"], "compare takes finished runs, or flags that make runs, not both"),
        (["runs/a", "runs/b", "--dry_run"], "compare takes finished runs, or flags that make runs, not both"),
        (["runs/a", "runs/b", "--jobs", "2"], "compare takes finished runs, or flags that make runs, not both"),
        (["--augment", "maybe | yes"], "takes finished runs, or flags"),
    ],
)
def test_wrong_comparisons_end_in_one_line(here: Path, capfd: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert main(["compare", *words, "--output_dir", "sweep"]) == 2
    said = [text for text in capfd.readouterr().err.splitlines() if not text.startswith(("device:", "ignored", "resize:"))]
    assert len(said) == 1
    assert re.search(line, said[0])


def test_what_it_needs_is_said_where_nothing_was_typed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare"]) == 2
    assert "error: compare needs something to compare: --layer" in capfd.readouterr().err
