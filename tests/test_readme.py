"""The README's code runs as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from config import read_yaml

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("python ")]


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    words = [sys.executable, *(str(ROOT / w) if (ROOT / w).is_file() and w.endswith(".py") else w for w in words[1:])]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_blocks(tmp_path: Path) -> None:
    for block in blocks("python"):
        name = block.partition("\n")[0].removeprefix("# ")
        assert name.endswith(".py")
        assert len([line for line in block.splitlines() if line.strip()]) <= 14  # a part is ten lines, give or take its name and docstring
        (tmp_path / name).write_text(block)
        if "register" not in block:
            run(f"python {name}", tmp_path)
    for block in blocks("bash"):
        for command in commands(block):
            run(command, tmp_path)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_read(recipe: Path) -> None:
    config = resolve(read_yaml(str(recipe)), shape=(3, 32, 32))
    if recipe.stem.startswith("convnn"):
        assert (config.num_layers, config.d_hidden) == (12, 192)
    else:
        assert config.head == "linear+attn-knn"


def test_default_run(tmp_path: Path) -> None:
    """`python main.py`, as the README has it: no download, at least 97 % on the test split, and a table at the end."""
    assert "pip install -r requirements.txt && python main.py\n" in README
    table = run("python main.py", tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    results = json.loads((folder / "results.json").read_text())
    assert results["test"]["accuracy"] >= 0.97
    assert f"{results['test']['accuracy']:.2%}" in table
    assert f"written to runs/{folder.name}" in table
