"""`python main.py bench`: speed and memory, each part beside named rivals in one run. Who reads a number sees what it is compared with."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import machine
from benchmarks.plot import draw
from benchmarks.tables import as_json, table
from benchmarks.timing import CLOCKS, Ask, Group, Line, measured
from evaluation.cost import load
from inputs.memory import keep_memory
from run.directory import check_writable
from run.parts import choose_device
from run.saved import own_checkpoint
from utils import BadOption, one_of, parse_whole_number, say

PARTS = ("layers", "models", "loop", "bank", "heads", "data", "startup")
USED_BY = dict(tokens=("layers",), modes=("layers",), dtypes=("layers", "models"), batch_size=("layers", "models"), checkpoint=("bank",))
TOKENS, DTYPES, MODES = (65, 197, 785, 1025, 3137), ("float32", "bfloat16"), ("eager", "compiled")


@dataclass(frozen=True)
class Typed:
    """What was typed behind `bench`."""

    what: str
    threads: str | None
    clock: str
    device: str
    rounds: str | None
    tokens: str | None
    dtypes: str | None
    modes: str | None
    batch_size: str | None
    checkpoint: str | None
    json: str | None
    output_dir: str | None
    quick: bool


def bench(typed: Typed) -> None:
    one_of("WHAT", typed.what, (*PARTS, "all"))
    ask = ask_of(typed)
    files = [Path(typed.json)] if typed.json else []
    folder = Path(typed.output_dir) if typed.output_dir else None
    check_places(files, folder)
    if ask.checkpoint:
        own_checkpoint(ask.checkpoint)
    tell_unused(typed)
    prepare(ask)
    facts = machine.about(ask)
    print(machine.sentence(facts), flush=True)
    lines, tables = [], []
    for group, found in measure_all(typed.what, ask):
        lines += found
        tables.append(table(group, found))
        print(f"\n{tables[-1]}", flush=True)
    facts["load_after"] = load()
    entries = ",\n".join(json.dumps(as_json(line), allow_nan=False) for line in lines)
    text = f'{{"about": {json.dumps(facts)},\n"lines": [\n{entries}\n]}}'  # a line a figure
    if folder:
        files += write(folder, typed.what, facts, tables, lines)
    for path in files:
        if path.suffix not in (".md", ".png"):
            path.write_text(text + "\n")
    if files:
        say(f"written to {', '.join(map(str, files))}")


def ask_of(typed: Typed) -> Ask:
    def number(name: str, text: str | None) -> int | None:
        return None if text is None else parse_whole_number(name, text, 1)

    def listed(name: str, text: str | None, known: Sequence[str]) -> tuple[str, ...] | None:
        return None if text is None else tuple(one_of(name, word.strip(), tuple(known)) for word in text.split(","))

    tokens = listed("tokens", typed.tokens, [str(n) for n in TOKENS])
    device, clock = choose_device(typed.device), one_of("clock", typed.clock, tuple(CLOCKS))
    if device.type == "mps":
        raise BadOption("device", "must be cpu or cuda: there is no clock of that GPU", typed.device)
    return Ask(
        threads=number("threads", typed.threads) or torch.get_num_threads(),
        clock=clock,
        device=device,
        quick=typed.quick,
        rounds=number("rounds", typed.rounds),
        tokens=tuple(map(int, tokens)) if tokens else None,
        dtypes=listed("dtypes", typed.dtypes, DTYPES),
        modes=listed("modes", typed.modes, MODES),
        batch_size=number("batch_size", typed.batch_size),
        checkpoint=typed.checkpoint,
    )


def tell_unused(typed: Typed) -> None:
    """What was typed and no part that is measured looks at."""
    idle = [name for name, parts in USED_BY.items() if getattr(typed, name) is not None and typed.what not in (*parts, "all")]
    if idle:
        say(f"ignored because of {typed.what}: {', '.join(f'--{name}' for name in idle)}")


def check_places(files: Sequence[Path], folder: Path | None) -> None:
    """What could not be written after half an hour of measuring is refused before it."""
    for file in files:
        if file.is_dir():
            raise BadOption("json", "must be a file, and names a directory", str(file))
        check_writable(file.parent, "json")
        file.parent.mkdir(parents=True, exist_ok=True)
    if folder:
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)


def prepare(ask: Ask) -> None:
    from classifiers.faiss_library import load_faiss

    torch.set_num_threads(ask.threads)
    load_faiss().omp_set_num_threads(ask.threads)
    keep_memory()  # as every run does


def measure_all(what: str, ask: Ask) -> Iterator[tuple[Group, list[Line]]]:
    for name in PARTS if what == "all" else (what,):
        part: ModuleType = importlib.import_module(f"benchmarks.{name}")
        groups: Callable[[Ask], Iterator[Group]] = part.groups
        for group in groups(ask):
            yield group, measured(group, ask.clock)


def write(folder: Path, what: str, facts: dict[str, Any], tables: Sequence[str], lines: Sequence[Line]) -> list[Path]:
    """WHAT.md with the tables, WHAT.png if layers were measured at two lengths or more; and the name of WHAT.json."""
    stem = f"{what}-quick" if facts["quick"] else what
    page, picture = folder / f"{stem}.md", folder / f"{stem}.png"
    page.write_text("\n\n".join([machine.sentence(facts).replace("\n", "  \n"), *tables]) + "\n")
    clock = "CPU time" if facts["clock"] == "cpu" else "wall clock"
    title = f"{facts['gpu'] or facts['processor']}, {machine.threads_of(facts)}, {clock}, torch {facts['versions']['torch']}"
    return [folder / f"{stem}.json", page, *([picture] if draw(lines, picture, title) else [])]
