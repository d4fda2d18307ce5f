"""`python main.py check`: are the files of a run as it wrote them? Loads without torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation import results
from inputs import files, indexed
from inputs.indexed import INDEX
from run.directory import CHECKPOINTS, ERROR, MARKER, METRICS, PREDICTIONS, RESULTS, again, files_of, read_marker, state_of
from utils import BadOption, say


@dataclass
class Found:
    """What a look at all files of a run has found: whole, unfinished or damaged."""

    folder: Path
    standing: str  # of `state_of`
    checked: int = 0  # bytes
    damage: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        return "damaged" if self.damage else "whole" if self.standing == "done" else "unfinished"

    def __str__(self) -> str:
        if self.damage:
            what = "; ".join(self.damage)
        elif self.standing == "done":
            what = f"{self.checked:,} bytes are as they were written"
        elif self.standing == "running":
            what = "it is being written"
        else:
            config = (read_marker(self.folder) or {"config": {}})["config"]
            failed = f"failed ({ERROR} says why), " if self.standing == "failed" else ""
            what = f"{failed}{again(str(self.folder), config)}"
        return f"{self.state:<11} {self.folder}: {what}"


def check(paths: list[str]) -> int:
    """Prints a line a run; 1 if one is damaged."""
    runs = [run for path in paths for run in runs_in(Path(path))]
    found = [verify_run(run) for run in runs]
    for one in found:
        print(one)
    counts = {state: sum(one.state == state for one in found) for state in ("whole", "unfinished", "damaged")}
    say(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    return 1 if counts["damaged"] else 0


def runs_in(path: Path) -> list[Path]:
    """A run, or all runs in a folder, however deep."""
    if is_run(path):
        return [path]
    found = [Path(base) for base, _, _ in os.walk(path) if is_run(Path(base))]
    if not found:
        raise BadOption("RUN", "must be a run, or a folder that holds some", str(path))
    return sorted(found)


def is_run(path: Path) -> bool:
    return (path / MARKER).is_file() or files_of(path) is not None


def verify_run(folder: Path) -> Found:
    """Every byte that a digest is known of. What a run that is being written has not written yet is no damage."""
    found = Found(folder, state_of(folder))
    if found.standing == "running":
        return found
    marker = read_marker(folder)
    if marker is None and (folder / MARKER).exists():
        found.damage.append(f"{MARKER} is not whole")
    for name, digest in (marker["files"] if marker else {}).items():
        if digest is not None and not (name == RESULTS and found.standing != "done"):
            _verify_file(folder / name, digest, found)
    names = [*CHECKPOINTS, *(name.removesuffix(f"/{INDEX}") for name in files_of(folder) or () if name.endswith(f"/{INDEX}"))]
    indexes = {name: _verify_folder(folder, name, found) for name in dict.fromkeys(names) if (folder / name / INDEX).exists()}
    _verify_pair(indexes, marker, found)
    if found.standing == "done":
        _verify_results(folder, found)
    return found


def _verify_file(path: Path, digest: str, found: Found) -> None:
    name = path.relative_to(found.folder).as_posix()
    try:
        same = files.sha256_of(path) == digest
        found.checked += path.stat().st_size
    except OSError as error:
        found.damage.append(f"{name}: {error.strerror}")
        return
    if not same:
        found.damage.append(f"{name} is not as the run wrote it")


def _verify_folder(folder: Path, name: str, found: Found) -> dict[str, Any] | None:
    try:
        index = indexed.verify(folder / name)
    except BadOption as error:
        found.damage.append(f"{name} {error.rule}")
        return None
    found.checked += sum((folder / name / entry["file"]).stat().st_size for entry in index["files"].values())
    return index


def _verify_pair(indexes: dict[str, dict[str, Any] | None], marker: dict[str, Any] | None, found: Found) -> None:
    """best must be the one that last names, or its files must be there for --resume to make it so; and both must be this run's."""
    last, best = (indexes.get(name) for name in CHECKPOINTS)
    facts = last["facts"] if last else {}
    if marker is not None and facts.get("run", marker["id"]) != marker["id"]:
        found.damage.append(f"{CHECKPOINTS[0]} is another run's")
    named = facts.get("best")
    if named is None or (best is not None and indexed.core_of(best) == indexed.core_of(named)):
        return
    try:
        indexed.verify(found.folder / CHECKPOINTS[1], named)
    except BadOption:
        if best is not None or CHECKPOINTS[1] not in indexes:
            found.damage.append(f"{CHECKPOINTS[1]} is not the one that {CHECKPOINTS[0]} belongs to")


def _verify_results(folder: Path, found: Found) -> None:
    for name in (RESULTS, PREDICTIONS, METRICS):
        try:
            content = files.read_plain(folder / name, files.memory())
            if name == RESULTS:
                results.parsed(content)
            if name == METRICS:
                [json.loads(line) for line in content.splitlines()]
        except FileNotFoundError:
            continue  # older runs have fewer
        except (OSError, ValueError, RecursionError):
            found.damage.append(f"{name} is not whole")
