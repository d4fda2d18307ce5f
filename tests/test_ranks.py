"""Several processes train as one does: the same numbers, from any number of them to any other; and nobody waits for who is gone."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ranks
from config import Action
from layers.dropout import drop_by_rows
from main import main
from models import ModelSpec, build
from ranks import Alone, here
from run import load
from run.complete import complete
from run.parts import loader
from run.run import run as run_it
from run.shared import check_shards, draws_itself
from tests import many
from utils import BadOption

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parent.parent


class Ended(NamedTuple):
    code: int
    said: str
    seconds: float


def launched(processes: int, *words: str, **environment: str) -> Ended:
    """A command under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *words]
    start = time.monotonic()
    inherited = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    ended = subprocess.run(
        command, cwd=ROOT, env={**inherited, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, timeout=300
    )
    return Ended(ended.returncode, ended.stdout + ended.stderr, time.monotonic() - start)


# ---------------------------------------------------------------- the same numbers


class Trained(NamedTuple):
    one: dict[str, Any]
    two: dict[str, Any]
    three: dict[str, Any]
    last: dict[str, Any]  # by one process again


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All cases by one, two and three processes; some trainings go from two to three and to one of them."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two", "three")]
    one = many.main(folders[0], 3)
    found = []
    for processes, folder in ((2, folders[1]), (3, folders[2])):
        if processes == 3:
            for name in many.GOES_ON:
                shutil.copytree(folders[1] / name, folder / name)
        ended = launched(processes, "-m", "tests.many", str(folder), str(processes - 1))
        assert ended.code == 0, ended.said[-3000:]
        found.append(json.loads((folder / "found.json").read_text()))
    return Trained(one, found[0], found[1], {name: many.goes_on(name, folders[2], 3) for name in many.GOES_ON})


def numbers(value: Any, name: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in numbers(part, f"{name}/{key}").items()}
    if isinstance(value, list):
        return numbers(dict(enumerate(value)), name)
    return {} if value is None else {name: value}


@pytest.mark.parametrize("name", many.CASES)
def test_two_and_three_processes_give_the_numbers_of_one(trained: Trained, name: str) -> None:
    one = numbers(trained.one[name])
    epochs = len(trained.one[name]["lines"])
    if name == "patience":
        assert 2 < epochs < many.CASES[name]["num_epochs"]  # it stopped early
    else:
        assert epochs == many.CASES[name].get("num_epochs", 3)
    for several in (trained.two, trained.three):
        assert numbers(several[name]) == pytest.approx(one, rel=1e-6, abs=1e-6)


def test_the_rate_fell_on_a_plateau(trained: Trained) -> None:
    rates = [line["lr"] for line in trained.three["plateau"]["lines"]]
    assert rates[-1] == pytest.approx(0.1 * max(rates))


@pytest.mark.parametrize("name", many.GOES_ON)
def test_a_run_goes_from_two_processes_to_three_and_to_one(trained: Trained, name: str) -> None:
    assert [len(part[name]["lines"]) for part in (trained.two, trained.three, trained.one)] == [1, 2, 3]
    assert numbers(trained.last[name]) == pytest.approx(numbers(trained.one[name]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("processes", ["one", "two", "three"])
def test_a_bank_in_parts_finds_what_a_whole_one_finds_to_the_last_bit(trained: Trained, processes: str) -> None:
    found = getattr(trained, processes)["bank"]
    assert found["compared"] > 1000
    assert found["different"] == 0, f"torchrun -m tests.sharded says where: {found}"


PARTS = ["--shard_bank", "--head", "attn-knn", "--k_train", "5", "--embed_dim", "8"]


def test_a_run_with_its_bank_in_parts_is_whole_at_its_end(tmp_path: Path) -> None:
    run, rows = tmp_path / "run", 130
    ended = launched(2, "main.py", *TINY_FLAGS, *PARTS, "--num_epochs", "1", "--output_dir", str(run))
    assert ended.code == 0, ended.said[-3000:]
    bank = load(run).classifier.head.bank
    assert bank is not None
    assert bank.ids.tolist() == list(range(rows))
    assert not list((run / "checkpoints" / "last").glob("bank-*"))
    again = run_it({"output_dir": str(tmp_path / "again")}, Action(test_only=True, checkpoint=str(run)))  # one process
    first = json.loads((run / "results.json").read_text())
    for name in ("test", "test_calibrated"):
        assert again[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6)
    one, two = (found["predictors"]["scores"] for found in (again, first))
    assert numbers(one) == pytest.approx(numbers(two), rel=1e-4, abs=1e-6)


# ---------------------------------------------------------------- who gets which rows


class Many(Alone):
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"bank_cap": 50}, "bank_cap needs all rows in each process, to tell which leave; without --shard_bank it works, got 50"),
        ({"continual": True}, "continual needs all rows in one process, which others join; without --shard_bank it works, got True"),
        ({"k_train": 44}, "shard_bank leaves a process 43 of 130 rows, fewer than the 44 neighbors of a query, got True"),
        ({}, ""),
    ],
)
def test_what_a_bank_in_parts_can_not_do(given: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = many.data_of(0.1)
    config = complete({**many.SMALL, "head": "attn-knn", "shard_bank": True, **given}, data)
    monkeypatch.setattr(ranks, "_here", [Many(1, 3)])
    with pytest.raises(BadOption, match=re.escape(line)) if line else contextlib.nullcontext():
        check_shards(config, data, frozenset())


@pytest.mark.parametrize(("rows", "world"), [(7, 2), (8, 3), (2, 3), (1, 2), (23, 5)])
def test_a_batch_is_shared_in_pairs_of_mirror_rows(rows: int, world: int) -> None:
    parts = [Many(rank, world).pairs(rows) for rank in range(world)]
    assert sorted(np.concatenate(parts)) == list(range(rows))
    for part in parts:
        assert np.array_equal(part + part[::-1], np.full(len(part), rows - 1))  # its own mirror is that of the batch
    pairs = [-(-len(part) // 2) for part in parts]
    assert max(pairs) - min(pairs) <= 1


@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_read_as_many_batches_in_evaluation(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is a search in a bank that may be in parts; rows that stand in for none do not count."""
    data = many.data_of(0.1)
    rows = loader(complete({**many.SMALL, "batch_size": 4}, data), data, "val", many.CPU)
    assert rows is not None
    found = []
    for rank in range(world):
        monkeypatch.setattr(ranks, "_here", [Many(rank, world)])
        found.append(list(rows.epoch()))
    most = math.ceil(len(rows.target) / world)
    assert {len(batches) for batches in found} == {math.ceil(most / 4)}
    assert [row for batches in found for batch in batches for row in batch.index[: len(batch)].tolist()] == list(range(len(rows.target)))


@pytest.mark.parametrize(("rows", "world"), [(7, 2), (8, 3), (2, 3), (0, 2)])
def test_rows_that_are_looked_at_are_shared_in_order(rows: int, world: int) -> None:
    parts = [list(range(rows))[Many(rank, world).part(rows)] for rank in range(world)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("name", "dropout", "itself"), [("vit_tiny_patch16_224", 0.3, False), ("resnet10t", 0.0, False), ("resnet10t", 0.3, True)]
)
def test_a_model_that_draws_itself_is_found_out(name: str, dropout: float, itself: bool) -> None:
    backbone = build(ModelSpec(name=f"timm/{name}", shape=(3, 32, 32), num_classes=5, dropout=dropout, attention_dropout=dropout))
    drop_by_rows(backbone)
    before = torch.random.get_rng_state()
    assert draws_itself(backbone, (3, 32, 32)) == itself
    assert torch.equal(before, torch.random.get_rng_state())


# ---------------------------------------------------------------- when one is gone


TINY = {"dataset": "digits", "subset": 0.1, "batch_size": 20, "num_layers": 1, "d_hidden": 8, "d_mlp": 8, "device": "cpu", "timeout": 10}
TINY_FLAGS = [f"--{k}={v}" for k, v in TINY.items()]
RUN = ["main.py", "--plugin", "tests/lost.py", "--head", "lost", *TINY_FLAGS, "--num_epochs"]


@pytest.mark.parametrize(
    ("way", "processes", "why"), [("killed", 2, "it ended"), ("hangs", 3, "10 s (--timeout)"), ("fails", 2, "ValueError: made to fail")]
)
def test_who_is_lost_is_named_and_the_others_end(way: str, processes: int, why: str, tmp_path: Path) -> None:
    ended = launched(processes, *RUN, "4", "--output_dir", str(tmp_path / "run"), LOST=way)
    assert ended.code
    lines = [line for line in ended.said.splitlines() if "lost process" in line]
    assert lines == [line for line in lines if line.startswith(f"error: lost process {processes - 1} of {processes} (") and why in line], (
        ended.said
    )
    assert len(lines) == 1, ended.said
    assert (tmp_path / "run" / "checkpoints" / "last").is_dir()


def test_a_signal_to_the_launcher_saves_one_checkpoint_and_one_process_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    ended = launched(2, *RUN, "3", "--output_dir", str(run))
    assert "stopped by SIGTERM in epoch 2, batch " in ended.said, ended.said
    assert ended.said.count("; saved. resume with:") == 1
    files = [path.name.partition("-")[0] for path in (run / "checkpoints" / "last").glob("*.safetensors")]
    assert sorted(files) == ["ema", "model", "training"]
    again = launched(1, "main.py", "--resume", str(run), "--plugin", "tests/lost.py", LOST="nobody")
    assert again.code == 0, again.said
    monkeypatch.setenv("LOST", "nobody")
    monkeypatch.chdir(ROOT)
    assert main([*RUN[1:], "3", "--output_dir", str(tmp_path / "whole")]) == 0
    one, other = ([json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (run, tmp_path / "whole"))
    assert [line["epoch"] for line in one] == [1, 2, 3]
    for a, b in zip(one, other, strict=True):
        assert a["train"] == pytest.approx(b["train"], rel=1e-4)


def test_a_batch_has_two_rows_for_each_process(tmp_path: Path) -> None:
    ended = launched(2, "main.py", "--batch_size", "3", "--output_dir", str(tmp_path / "run"))
    assert ended.code
    assert "error: --batch_size is of all processes together, and must be at least 2 rows for each of the 2, got 3" in ended.said
    assert not (tmp_path / "run").exists()


def test_other_commands_run_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():  # as torchrun does
        monkeypatch.setenv(name, value)
    assert main(["list"])
    assert "error: list runs in one process; torchrun, which started 2, is for training" in capsys.readouterr().err


def test_alone_everything_is_as_it_is() -> None:
    alone = here()
    assert (alone.world, alone.total(5), alone.largest(3), alone.summed({"a": 2.0})) == (1, 5, 3, {"a": 2.0})
    assert alone.on_first(lambda: 7) == 7
