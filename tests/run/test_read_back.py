"""What a run holds besides checkpoints is read back by `check`, `compare` and `report`: damaged or made up, it is one line at most."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from config import Action
from main import main
from run.run import run
from tests.run.test_resigned import STRANGE, places
from tests.run.test_run import TINY

FILES = ("results.json", "metrics.jsonl", "run.json", "predictions.safetensors", "config.yaml", "args.txt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, layer in (("one", "Attention"), ("two", "KvtAttention(K=2)")):
        run({**TINY, "num_epochs": 1, "calibrate": "head", "layer": layer, "output_dir": str(folder / name)}, Action())
    return folder


def damage(path: Path, how: str, draws: random.Random) -> None:
    content = path.read_bytes()
    if how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "cut":
        path.write_bytes(content[: draws.randrange(len(content))])
    elif path.suffix in (".json", ".jsonl"):
        body: Any = json.loads(content.splitlines()[0] if path.suffix == ".jsonl" else content)
        way = draws.choice(places(body))
        owner = body
        for key in way[:-1]:
            owner = owner[key]
        owner[way[-1]] = draws.choice(STRANGE)
        path.write_text(json.dumps(body) + "\n")
    else:
        at = draws.randrange(min(len(content), 400))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << draws.randrange(8)]) + content[at + 1 :])


def said_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    code = main(words)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) <= 1
    assert not any("traceback" in line for line in errors), errors
    assert code in (0, 1, 2)
    return code


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_a_run(name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draws = random.Random(name)
    for how in ("pipe", "cut", "other", "other", "other"):
        here = Path(shutil.copytree(runs, tmp_path / "runs"))
        damage(here / "one" / name, how, draws)
        said_of(["check", str(here)], capsys)
        said_of(["compare", str(here / "one"), str(here / "two"), "--output_dir", str(tmp_path / "compared")], capsys)
        if how == "pipe" and name in ("results.json", "metrics.jsonl"):  # it draws many figures
            assert said_of(["report", str(here), "--without_pictures", "--output_dir", str(tmp_path / "page")], capsys) == 0
        shutil.rmtree(here)


def test_made_up_results_do_not_compare(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(shutil.copytree(runs, tmp_path / "runs"))
    results = json.loads((here / "one" / "results.json").read_text())
    about = results["about"]
    for made_up in ({"about": {**about, "config": -1}}, {"about": {**about, "config": {}}}, {"about": {**about, "data": 7}}, {"test": 3}):
        (here / "one" / "results.json").write_text(json.dumps({**results, **made_up}))
        words = ["compare", str(here / "one"), str(here / "two"), "--output_dir", str(tmp_path / "compared")]
        assert said_of(words, capsys) == 2, made_up
