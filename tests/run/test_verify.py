"""`python main.py check`: every byte that a run wrote, and which run its checkpoints are of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from config import Action
from main import main
from run.run import run
from run.verify import verify_run
from tests.run.test_run import TINY
from utils import Stopped


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and one that was stopped."""
    folder = tmp_path_factory.mktemp("runs")
    run({**TINY, "num_epochs": 2, "output_dir": str(folder / "a")}, Action())
    with pytest.raises(Stopped):
        run({**TINY, "seed": 1, "output_dir": str(folder / "deep" / "b")}, Action(stop_after=1))
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def test_a_folder_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(runs)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"whole       {runs / 'a'}: ")
    assert second == f"unfinished  {runs / 'deep' / 'b'}: resume with: python main.py --resume {runs / 'deep' / 'b'}"
    assert main(["check", str(runs / "nothing")]) == 2


def test_one_changed_byte_of_any_file_is_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "deep/b"):
        folder = runs / name
        index_only = {"config.yaml", "args.txt", "model.txt", "metrics.jsonl"} if name != "a" else set()  # no digests before the end
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            if path.name in index_only | {"run.json"}:
                continue
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
            assert main(["check", str(folder)]) == 1, path
            line = capsys.readouterr().out
            assert line.startswith("damaged")
            assert path.name in line
            path.unlink()
            assert verify_run(folder).state != "whole", path
            path.write_bytes(whole)
    assert main(["check", str(runs)]) == 0


def test_the_best_of_another_run_is_found(runs: Path) -> None:
    shutil.rmtree(runs / "a" / "checkpoints" / "best")
    shutil.copytree(runs / "deep" / "b" / "checkpoints" / "best", runs / "a" / "checkpoints" / "best")
    found = verify_run(runs / "a")
    assert found.state == "damaged"
    assert "checkpoints/best is not the one that checkpoints/last belongs to" in found.damage
