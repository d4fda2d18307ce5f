"""The runs of a comparison on disk: where each is, what state it is in, and who works on it. The directory is the only state.

OUT/cells/ARM/seed0/        the run
OUT/cells/ARM/seed0.json    what it was made with; how it failed, if it did
OUT/cells/ARM/seed0.log     what it said
OUT/cells/ARM/seed0.lock    held by the process that works on it, as long as it lives
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inputs.files import write_json
from inputs.indexed import INDEX
from run.directory import RESULTS
from run.lock import BEAT, SILENT, Held, Lock, holder_of, is_held
from utils import BadOption

# Longer than for the run itself, whose lock must be free, too, when the claim of a dead machine is.
CLAIM_SILENT = SILENT + 2 * BEAT


@dataclass(frozen=True)
class Place:
    """Where one run of a comparison is kept."""

    arm: str
    seed: int
    run: Path

    @property
    def note(self) -> Path:
        return self.run.with_name(f"{self.run.name}.json")

    @property
    def log(self) -> Path:
        return self.run.with_name(f"{self.run.name}.log")

    @property
    def lock(self) -> Path:
        return self.run.with_name(f"{self.run.name}.lock")

    @property
    def title(self) -> str:
        return f"{self.arm}, seed {self.seed}"


def place_of(folder: Path, arm: str, seed: int) -> Place:
    return Place(arm, seed, folder / "cells" / folder_name(arm) / f"seed{seed}")


def folder_name(arm: str) -> str:
    """An arm's name as a directory's; of one that is long, what is cut off is told by its hash."""
    plain = re.sub(r"[^0-9A-Za-z.=,+-]+", "_", arm).strip("_.")
    return plain if len(plain) <= 80 else f"{plain[:70]}-{hashlib.sha256(arm.encode()).hexdigest()[:8]}"


# ---------------------------------------------------------------- states


def read_note(place: Place) -> dict[str, Any]:
    try:
        note = json.loads(place.note.read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def state_of(place: Place, made_with: Mapping[str, str], *, ours: bool = False) -> str:
    """`made_with`: what the run would be made with now; what was made with something else is stale. `ours`: this process works on it."""
    if not ours and holder(place):
        return "running"
    note = read_note(place)
    other = bool(note) and note.get("made_with") != dict(made_with)
    if (place.run / RESULTS).exists():
        return "stale" if other else "done"
    if "failed" in note:
        return "failed"
    if (place.run / "checkpoints" / "last" / INDEX).exists():
        return "stale" if other else "stopped"
    return "pending"


def changed(place: Place, made_with: Mapping[str, str]) -> list[str]:
    """What is not as it was when a stale run was made: code, data, plugin, config."""
    then = read_note(place).get("made_with", {})
    return [name for name, digest in made_with.items() if then.get(name) != digest]


# ---------------------------------------------------------------- claims


@contextlib.contextmanager
def claimed(place: Place) -> Iterator[bool]:
    """Whether this process may work on the run; nobody else may while it lives."""
    place.lock.parent.mkdir(parents=True, exist_ok=True)
    if link := next((path for path in (place.lock, place.log) if path.is_symlink()), None):  # what lies elsewhere would be written
        raise BadOption("output_dir", "must not hold a symlink in the place of a file", str(link))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Lock(place.lock.parent, name=place.lock.name, silent=CLAIM_SILENT))
            ours = True
        except Held:
            ours = False
        yield ours


def holder(place: Place) -> dict[str, Any]:
    """Who works on the run: process, host, since when; {} where nobody does."""
    folder, name = place.lock.parent, place.lock.name
    return (holder_of(folder, name) or {}) if is_held(folder, name, CLAIM_SILENT) else {}


# ---------------------------------------------------------------- notes


def note_start(place: Place, made_with: Mapping[str, str], *, seconds: float) -> None:
    """`seconds`: what a run that goes on has taken so far."""
    write_json(place.note, {"made_with": dict(made_with), "begun": time.strftime("%Y-%m-%d %H:%M:%S"), "seconds": seconds})


def note_time(place: Place, more: float) -> None:
    note = read_note(place)
    write_json(place.note, {**note, "seconds": round(note.get("seconds", 0.0) + more, 3)})


def note_failure(place: Place, line: str, code: int) -> None:
    write_json(place.note, {**read_note(place), "failed": {"line": line, "code": code, "log": str(place.log)}})


def note_retry(place: Place) -> None:
    """Forgets how a run failed, so that it is tried again."""
    write_json(place.note, {name: value for name, value in read_note(place).items() if name != "failed"})
