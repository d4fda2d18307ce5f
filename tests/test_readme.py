"""README and docs/: their code runs as it stands, their links lead somewhere, and what they say of flags and files is so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config import FIELDS, kind_of
from inputs.yaml_file import read_yaml
from main import OPTIONS
from run.complete import with_defaults

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]  # in this order: docs use the README's runs
OTHERS = {"help", "help_all", "install_completion", "quick"}  # of a command line that are no options of ours
OTHERS |= {"nproc_per_node", "nnodes", "rdzv_id", "rdzv_backend", "rdzv_endpoint"}  # torchrun's
OTHERS |= {"nodes", "ntasks_per_node", "gpus_per_node", "signal", "me"}  # Slurm's
OTHERS |= {"address"}  # Ray's
OTHERS |= {"rows"}  # of benchmarks/bank.py
OTHERS |= {"data"}  # of benchmarks/training.py

# One process for all commands: loading torch takes longer than most of them.
DRIVER = """
import json, shlex, subprocess, sys
import main
for page, command in json.load(sys.stdin):
    words = shlex.split(command)
    if words[:2] == ["python", "main.py"]:
        sys.argv = words[1:]
        code = main.main(words[2:])
    else:
        code = subprocess.run(command.replace("python ", sys.executable + " ", 1), shell=True).returncode
    if code:
        sys.exit(f"{page}: exit code {code} of {command}")
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def python(*words: str, folder: Path, stdin: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_blocks(tmp_path: Path) -> None:
    """Python blocks are files, named in their first line; bash blocks are run; text blocks need a network or data, and are not."""
    commands: list[tuple[str, str]] = []
    for page in PAGES:
        for block in blocks(page, "python"):
            name = block.partition("\n")[0].removeprefix("# ")
            assert re.fullmatch(r"\w+\.py", name), block
            (tmp_path / name).write_text(block)
            if page.name == "plugins.md":
                lines = [line for line in block.splitlines() if line.strip()]
                assert len(lines) <= 14  # a part is a dozen lines, give or take its name and docstring
        typed = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
        if page.name == "layers.md":
            typed.insert(0, "python swapping.py")
        commands += [(page.name, line) for line in typed]
    pages = {"README.md", "data.md", "heads.md", "layers.md", "plugins.md", "report.md", "runs.md", "use.md"}
    assert pages == {page for page, _ in commands}
    python("-c", DRIVER, folder=tmp_path, stdin=json.dumps(commands))
    written = {"runs/dense/results.json", "runs/kvt/explain-tokens-3.png", "runs/neighbors/explain-neighbors-3.png"}
    written |= {"runs/wine/results-epoch4.json", "runs/dense/checkpoints/best/results.json", "runs/report/report.html"}
    assert [name for name in sorted(written) if not (tmp_path / name).exists()] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    named = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", page.read_text())}
    known = OPTIONS | OTHERS | {f"no_{name}" for name, field in FIELDS.items() if kind_of(field) is bool}
    assert sorted(named - known - {"no_NAME", "a", "b", "num_epochs"}) == []


def test_every_flag_is_described() -> None:
    """In a table of flags.md, with the default that it has."""
    rows = re.findall(r"^\| `--(\w+)` \| (.+?) \| .+ \|$", (ROOT / "docs" / "flags.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(FIELDS)
    for name, text in rows:
        field, told = FIELDS[name], text.strip("`")
        if field.metadata["preset"]:
            assert told == "data set", name
        elif field.default in (True, False) and kind_of(field) is bool:
            assert told == ("on" if field.default else "off"), name
        elif field.default is not None and field.default is not dataclasses.MISSING:
            assert told == str(field.default), name


# ---------------------------------------------------------------- files


def test_every_file_has_its_line() -> None:
    """Each file of the program stands in the tree of architecture.md, in its folder."""
    (tree, *_) = blocks(ROOT / "docs" / "architecture.md", "text")
    folder, named = "", set[str]()
    for line in tree.splitlines():
        if found := re.match(r"(\w+)/ ", line):
            folder = found[1]
        elif line.strip():
            files = re.findall(r"\w+\.py", line)
            named |= {f"{folder}/{file}" if line.startswith(" ") else file for file in files}
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/*.py") if path.name != "__init__.py" and path.parent.name != "tests"}
    here = {name for name in named if (ROOT / name).parent.is_dir()}  # native/ may be removed
    assert here == there | {path.name for path in ROOT.glob("*.py")}


SINGLE = [path for path in sorted((ROOT / "recipes").glob("*.yaml")) if "\narms:" not in path.read_text()]  # others are plans


@pytest.mark.parametrize("recipe", SINGLE, ids=lambda path: path.stem)
def test_recipes_read(recipe: Path) -> None:
    values = with_defaults(read_yaml(str(recipe)), shape=(3, 32, 32), summary={"train": 50_000})
    if recipe.stem.startswith("convnn"):
        assert (values["num_layers"], values["d_hidden"]) == (12, 192)
    else:
        assert values["head"] == "linear+attn-knn"


def test_default_run(tmp_path: Path) -> None:
    """`python main.py`, as the README has it: no download, at least 97 % on the test split, and a table at the end."""
    assert "pip install -r requirements.txt && python main.py\n" in PAGES[0].read_text()
    table = python(str(ROOT / "main.py"), folder=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    results = json.loads((folder / "results.json").read_text())
    assert results["test"]["accuracy"] >= 0.97
    assert f"{results['test']['accuracy']:.2%}" in table
    assert f"written to runs/{folder.name}" in table
