"""`main.py explain`: its help, which answers before anything slow is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from main import main


def test_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(--what tokens)" in said
    assert "(--what neighbors)" in said
    assert "--mistakes" in said


def test_help_reads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, main; main.main(['explain', '--help']); print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"
