"""The house: imports point one way and never in a circle; files and functions stay short enough to read."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A room may import from rooms of a lower floor, and from those of its own floor that stand before it.
FLOORS = (
    ("utils", "config", "ranks"),
    ("native",),
    ("layers",),
    ("inputs", "dataset", "models", "classifiers"),
    ("training",),
    ("train_eval",),
    ("evaluation",),
    ("run",),
    ("explain", "experiments"),
    ("main",),
)
LOOSE = {"config", "dataset", "main", "ranks", "train_eval", "utils"}
OPEN = {"tests", "benchmarks"}  # they may import everything; of ours, main alone imports benchmarks, when it is asked to measure
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60
KNOW_OF_SEVERAL_PROCESSES = {  # and the places that they stand for
    "inputs.batches": "batches: each process its rows, and what is made of all of them in order",
    "train_eval": "the step, and evaluation: scores are the same everywhere",
    "training.progress": "stopping",
    "inputs.features": "features: read and kept by one",
    "classifiers.sharded_bank": "the bank in parts",
    "classifiers.neighbor_heads": "the contrastive loss, over the whole batch",
    "classifiers.embedder": "statistics, of the whole batch",
    "training.checkpoint": "saving",
    "run.shared": "a run's directory, and what is refused",
    "run.finish": "results, written and printed",
}


def floor_of(room: str) -> tuple[int, int]:
    return next((i, rooms.index(room)) for i, rooms in enumerate(FLOORS) if room in rooms)


@cache
def files() -> list[Path]:
    """All Python files, relative to the root."""
    found = (f.relative_to(ROOT) for f in ROOT.rglob("*.py"))
    return sorted(f for f in found if not any(part.startswith(".") for part in f.parts))


@cache
def modules() -> dict[str, Path]:
    """Name to file of each module of ours, tests and benchmarks left out."""
    ours = [f for f in files() if f.parts[0] not in OPEN]
    return {".".join(f.with_suffix("").parts).removesuffix(".__init__"): ROOT / f for f in ours}


def imported_by(name: str) -> set[str]:
    """Modules of ours that a module imports: at its top, inside functions, and for types only."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
    return found & set(known)


def test_every_room_has_its_floor_and_nothing_lies_about() -> None:
    rooms = {name.partition(".")[0] for name in modules()}
    assert rooms <= {room for floor in FLOORS for room in floor}
    assert {f.stem for f in ROOT.glob("*.py")} == LOOSE


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name: str) -> None:
    own = name.partition(".")[0]
    wrong = [other for other in imported_by(name) if (room := other.partition(".")[0]) != own and floor_of(room) >= floor_of(own)]
    assert not wrong, f"{name} must not import {', '.join(wrong)}"


def test_no_module_imports_itself_in_a_circle() -> None:
    imports = {name: imported_by(name) - {name} for name in modules()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(imports[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(imports):
        visit(name, ())


def test_who_imports_what_measures_and_tests() -> None:
    found = {}
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        of_open = [
            n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) and {p.partition(".")[0] for p in names_of(n)} & OPEN
        ]
        if of_open:
            found[name] = sorted(p for node in of_open for p in names_of(node))
            assert not set(of_open) & set(tree.body), f"{name} imports them at its top: --help would load them"
    assert found == {"main": ["benchmarks.bench", "benchmarks.bench"]}


def taken_from(room: str, name: str) -> set[str]:
    """What a module imports of another; all of it where it imports the module itself."""
    tree = ast.parse(modules()[name].read_text())
    whole = {"*" for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names if alias.name == room}
    return whole | {alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == room for alias in n.names}


def test_few_know_that_several_processes_train() -> None:
    """Who needs more asks one of these; nobody asks which process it is."""
    asks = {name for name in modules() if taken_from("ranks", name) - {"together"}}
    others = sorted(asks - set(KNOW_OF_SEVERAL_PROCESSES))
    assert not others, f"{', '.join(others)} must not ask ranks.here(); these do: {', '.join(KNOW_OF_SEVERAL_PROCESSES)}"
    assert asks == set(KNOW_OF_SEVERAL_PROCESSES)  # who asks no more is no longer listed
    assert {name for name in modules() if "together" in taken_from("ranks", name)} == {"run.run"}
    assert not [name for name in asks if re.search(r"\bhere\(\)\.rank\b", modules()[name].read_text())]


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def test_a_walk_sees_imports_inside_functions() -> None:
    assert "models.backbones" in imported_by("models")  # late, because timm takes its time


@pytest.mark.parametrize("file", [str(f) for f in files()])
def test_files_and_functions_are_short_enough_to_read(file: str) -> None:
    text = (ROOT / file).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno and f.end_lineno - f.lineno >= MOST_LINES_OF_A_FUNCTION}
    assert not long
