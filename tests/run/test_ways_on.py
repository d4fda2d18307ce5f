"""No dead ends: after any stop a run goes on, and what is lost is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from classifiers import HEADS, LinearHead
from config import Action
from explain.subject import read_run
from inputs.indexed import INDEX
from main import main
from run.directory import MARKER, state_of
from run.model import load
from run.run import run
from run.saved import own_checkpoint
from tests.run.test_run import TINY, assert_same, everything
from utils import BadOption, Halt, Stopped

SMALL: dict[str, Any] = {**TINY, "num_epochs": 3, "select": "nll"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, one that was stopped after two epochs, and another run's."""
    folder = tmp_path_factory.mktemp("runs")
    run({**SMALL, "output_dir": str(folder / "whole")}, Action())
    for name, seed in (("stopped", 0), ("other", 5)):
        with pytest.raises(Stopped):
            run({**SMALL, "seed": seed, "output_dir": str(folder / name)}, Action(stop_after=2))
    return folder


@pytest.fixture
def stopped(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "stopped", tmp_path / "stopped"))


# ---------------------------------------------------------------- best and last


def test_the_best_of_another_run_is_set_aside_and_the_run_goes_on(made: Path, stopped: Path) -> None:
    best = stopped / "checkpoints" / "best"
    shutil.rmtree(best)
    shutil.copytree(made / "other" / "checkpoints" / "best", best)
    results = run({}, Action(resume=str(stopped)))
    line = "best: checkpoints/best is that of another run, so the best epoch so far is lost"
    assert [w for w in results["warnings"] if w.startswith(line)]
    assert results["about"]["epoch"] in (2, 3)
    assert results["val"] == next(e["val"] for e in everything(stopped)["lines"] if e["epoch"] == results["about"]["epoch"])
    aside = stopped / "checkpoints" / "best-set-aside-1"
    files = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in (aside, made / "other" / "checkpoints" / "best")]
    assert files[0] == files[1]


@pytest.mark.parametrize("lacks", ["nothing", MARKER, "checkpoints/last"])
def test_the_best_of_another_run_is_not_tested_or_asked_in_the_name_of_this_one(made: Path, stopped: Path, lacks: str) -> None:
    """Found by what the marker, best and last say of each other, whichever of them is there."""
    if lacks == MARKER:
        (stopped / MARKER).unlink()
    elif lacks != "nothing":
        shutil.rmtree(stopped / lacks)
    assert own_checkpoint(stopped) == stopped / "checkpoints" / "best"
    shutil.rmtree(stopped / "checkpoints" / "best")
    shutil.copytree(made / "other" / "checkpoints" / "best", stopped / "checkpoints" / "best")
    rule = "^checkpoint must be the run's own, and its checkpoints/best is that of another run"
    before = sorted(stopped.rglob("*"))
    for use in (lambda: run({}, Action(test_only=True, checkpoint=str(stopped))), lambda: load(stopped), lambda: find_run(stopped)):
        with pytest.raises(BadOption, match=rule):
            use()
    assert sorted(stopped.rglob("*")) == before
    if lacks != "checkpoints/last":
        assert own_checkpoint(stopped / "checkpoints" / "last") == stopped / "checkpoints" / "last"


def find_run(folder: Path) -> object:
    return read_run({"checkpoint": str(folder)})


def test_a_best_of_an_earlier_epoch_is_not_tested_either(tmp_path: Path) -> None:
    """A copy of an old best, put back over the run's. Between the two saves of an epoch, where a kill may come, it is the run's own."""
    folder, old = tmp_path / "run", tmp_path / "old"
    with pytest.raises(Stopped):
        run({**SMALL, "select": "last", "output_dir": str(folder)}, Action(stop_after=1))
    shutil.copytree(folder, old)
    with pytest.raises(Stopped):
        run({}, Action(resume=str(folder), stop_after=2))
    best, old = folder / "checkpoints" / "best", old / "checkpoints" / "best"
    shutil.copytree(old, best, dirs_exist_ok=True)
    assert own_checkpoint(folder) == best
    shutil.rmtree(best)
    shutil.copytree(old, best)
    with pytest.raises(BadOption, match=r"^checkpoint must be the run's own, and its checkpoints/best is not the one that"):
        own_checkpoint(folder)


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_best_that_is_damaged_is_lost_and_said(harm: str, stopped: Path) -> None:
    model = next((stopped / "checkpoints" / "best").glob("model-*"))
    model.unlink() if harm == "gone" else model.write_bytes(model.read_bytes()[:-3])
    results = run({}, Action(resume=str(stopped)))
    assert [w for w in results["warnings"] if w.startswith("best: ") and model.name in w]
    assert state_of(stopped) == "done"


def test_a_best_whose_index_is_gone_is_written_again(made: Path, stopped: Path) -> None:
    (stopped / "checkpoints" / "best" / INDEX).unlink()
    results = run({}, Action(resume=str(stopped)))
    assert not [w for w in results["warnings"] if w.startswith("best")]
    assert_same(made / "whole", stopped)


def test_a_last_of_another_run_is_refused(made: Path, stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints" / "last")
    shutil.copytree(made / "other" / "checkpoints" / "last", stopped / "checkpoints" / "last")
    with pytest.raises(BadOption, match="has a checkpoints/last that is another run's"):
        run({}, Action(resume=str(stopped)))


# ---------------------------------------------------------------- metrics, temporary files, no checkpoint


@pytest.mark.parametrize("harm", ["torn", "lost", "gone", "another's"])
def test_lines_of_metrics_come_from_the_checkpoint(harm: str, made: Path, stopped: Path) -> None:
    path = stopped / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if harm == "gone":
        path.unlink()
    else:
        path.write_text({"torn": lines[0] + lines[1][:40], "lost": lines[0], "another's": "".join(lines) + '{"epoch": 3}\n[1]\n'}[harm])
    run({}, Action(resume=str(stopped)))
    assert_same(made / "whole", stopped)


def test_what_a_killed_save_left_is_swept(made: Path, stopped: Path) -> None:
    left = [stopped / ".abcd1234.tmp", stopped / "checkpoints" / "last" / ".abcd1235.tmp"]
    for path in left:
        path.write_bytes(b"half")
    run({}, Action(resume=str(stopped)))
    assert not [path for path in left if path.exists()]
    assert_same(made / "whole", stopped)


def test_a_run_without_a_checkpoint_begins_anew(made: Path, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(stopped / "checkpoints" / "last")
    shutil.rmtree(stopped / "checkpoints" / "best")
    for name in ("config.yaml", "args.txt", "model.txt", "metrics.jsonl"):
        (stopped / name).unlink()  # run.json is enough
    with pytest.raises(BadOption, match="--resume begins it anew"):
        run({**SMALL, "output_dir": str(stopped)}, Action())
    with pytest.raises(BadOption, match="seed contradicts --resume"):
        run({"seed": 9}, Action(resume=str(stopped)))
    run({}, Action(resume=str(stopped)))
    assert f"resume: {stopped} has no checkpoint yet, so the run begins anew" in capsys.readouterr().err
    assert_same(made / "whole", stopped)


def test_a_run_of_before_gets_a_marker(made: Path, stopped: Path) -> None:
    (stopped / MARKER).unlink()
    assert state_of(stopped) == "stopped"
    run({}, Action(resume=str(stopped)))
    assert_same(made / "whole", stopped)
    run({**SMALL, "num_epochs": 1, "output_dir": str(stopped)}, Action(overwrite=True))
    assert state_of(stopped) == "done"


# ---------------------------------------------------------------- signals and errors


class Ending(LinearHead):
    """Ends the run from inside, in the way and at the moment that are asked for."""

    when, how = "", ""

    def loss(self, *inputs: Any) -> dict[str, Any]:
        if self.when == ("training" if self.training else "before"):
            end(self.how)
        return super().loss(*inputs)

    def part_of(self, name: str) -> str:  # asked when the optimizer is made
        if self.when == "loop":
            end(self.how)
        return super().part_of(name)


def end(how: str) -> None:
    Ending.when = ""
    if how == "error":
        raise ZeroDivisionError("of a head")
    os.kill(os.getpid(), signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)


HEADS.register("ending")(Ending)


@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("Ctrl-C", 130)])
@pytest.mark.parametrize("when", ["before", "loop", "training", "after"])
def test_a_signal_says_the_same_everywhere(
    how: str, code: int, when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from run import finish

    whole = finish.measure
    monkeypatch.setattr(finish, "measure", lambda *a, **k: end(how) if Ending.when == "after" else whole(*a, **k))
    out = tmp_path / "run"
    words = [f"--{k}={v}" if not isinstance(v, bool) else f"--{k}" for k, v in {**SMALL, "num_epochs": 1, "head": "ending"}.items()]
    Ending.when, Ending.how = when, how
    assert main([*words, "--output_dir", str(out)]) == code
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"stopped by {how} in ")
    if when == "before":
        assert line.endswith("; no run was begun")
        assert not out.exists()
        return
    assert line.endswith(f"resume with: python main.py --resume {out}")
    assert main(["--resume", str(out)]) == 0
    assert state_of(out) == "done"


def test_what_nobody_expected_is_one_line_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = [f"--{k}={v}" if not isinstance(v, bool) else f"--{k}" for k, v in {**SMALL, "num_epochs": 1, "head": "ending"}.items()]
    Ending.when, Ending.how = "training", "error"
    assert main([*words, "--output_dir", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == f"error: ZeroDivisionError: of a head, in training; the traceback is in {out / 'error.txt'}"
    assert "Traceback" not in said
    assert "raise ZeroDivisionError" in (out / "error.txt").read_text()
    assert state_of(out) == "failed"
    assert main(["--resume", str(out)]) == 0
    assert not (out / "error.txt").exists()


def test_a_run_whose_directory_is_deleted_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"

    def deleting(self: Any, *inputs: Any) -> dict[str, Any]:
        shutil.rmtree(out, ignore_errors=True)
        return LinearHead.loss(self, *inputs)

    monkeypatch.setattr(Ending, "loss", deleting)
    with pytest.raises(Halt, match="was deleted or replaced while the run wrote it"):
        run({**SMALL, "head": "ending", "output_dir": str(out)}, Action())
    assert not out.exists()


def test_a_users_own_configuration_stays(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 0.01 # because of the last one\n")
    with pytest.raises(BadOption, match=r"no run has listed config\.yaml as its own"):
        run({**SMALL, "output_dir": str(tmp_path)}, Action(config=str(tmp_path / "config.yaml"), overwrite=True))
    assert (tmp_path / "config.yaml").read_text() == "lr: 0.01 # because of the last one\n"
    assert json.dumps(sorted(p.name for p in tmp_path.iterdir())) == '["config.yaml"]'
