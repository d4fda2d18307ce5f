"""Plugins of saved runs: their code runs where it was typed, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import Action
from inputs import store
from main import main
from run.run import run
from tests.run.test_run import ROOT, TINY
from utils import BadOption, Stopped


def test_a_head_of_a_plugin_is_there_for_a_process_that_begins(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("from classifiers import HEADS, LinearHead\n\n@HEADS.register('mine')\nclass Mine(LinearHead):\n    pass\n")
    out = str(tmp_path / "run")
    with pytest.raises(Stopped):
        run({**TINY, "num_epochs": 2, "head": "mine", "plugin": str(plugin), "output_dir": out}, Action(stop_after=1))
    for words in (["--resume", out, "--plugin", str(plugin)], ["--test_only", "--checkpoint", out, "--plugin", str(plugin)]):
        again = subprocess.run([sys.executable, str(ROOT / "main.py"), *words], capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr


def test_a_pipe_is_no_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who opens it waits for ever."""
    os.mkfifo(tmp_path / "pipe.py")
    for words in (["--dataset", "iris"], ["list"], ["compare", "--layer", "Attention | KvtAttention"]):
        assert main([*words, "--plugin", str(tmp_path / "pipe.py")]) == 2
        assert "--plugin must be a Python file that exists" in capsys.readouterr().err


EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def test_no_code_runs_because_a_checkpoint_or_a_file_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint, signed anew, that names a file beside it; and a configuration that does."""
    folder = tmp_path / "run"
    run({**TINY, "num_epochs": 1, "output_dir": str(folder)}, Action())
    (tmp_path / "evil.py").write_text(EVIL)
    for name in ("best", "last"):
        tensors, facts = store.load(folder / "checkpoints" / name)
        store.save(folder / "checkpoints" / name, tensors, {**facts, "config": {**facts["config"], "plugin": str(tmp_path / "evil.py")}})
    (tmp_path / "evil.yaml").write_text(f"plugin: {tmp_path / 'evil.py'}\n")
    commands = ["--test_only --checkpoint run", "--resume run --num_epochs 2", "--config evil.yaml"]
    commands += [f"{c} --checkpoint run" for c in ("explain --what tokens", "explain --what neighbors", "probe", "export", "predict run")]
    with contextlib.chdir(tmp_path):
        for command in commands:
            assert main(command.split()) == 2, command
            assert "error: --plugin must be typed: " in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_another_file_than_the_runs_plugin_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("import utils\nutils.say('b.py runs')\n")
    folder = str(tmp_path / "run")
    run({**TINY, "num_epochs": 1, "plugin": str(tmp_path / "a.py"), "output_dir": folder}, Action())
    with pytest.raises(BadOption, match=r"plugin must be typed: the run needs a.py, SHA-256 [0-9a-f]{64}, and no code runs"):
        run({}, Action(test_only=True, checkpoint=folder))
    same, other = (run({"plugin": str(tmp_path / name)}, Action(test_only=True, checkpoint=folder)) for name in ("a.py", "b.py"))
    assert not [w for w in same["warnings"] if "plugin" in w]
    assert [w for w in other["warnings"] if "plugin: b.py" in w and "is not the file that the run was made with" in w]
    said = capsys.readouterr().err
    assert said.index("warning: plugin: b.py") < said.index("b.py runs")
