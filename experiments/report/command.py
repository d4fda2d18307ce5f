"""`report`: gathers runs, draws the figures, writes one page and the figures as files."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.report import comparing, confidence, gallery, sweeps, training
from experiments.report.ink import Picture, drawn
from experiments.report.material import EPOCHS, RESULTS, Material, gather
from experiments.report.page import Section, page
from inputs.files import write_atomically
from inputs.memory import in_bytes
from run.directory import check_writable, list_files
from utils import BadOption, say

PAGE, FIGURES = "report.html", "figures"
MOST_ARMS = 12  # that have reliability and confusion figures of their own
SECONDS = 5.0  # between looks at runs that go on


@dataclass(frozen=True)
class Asked:
    """What was typed. `data_path`, `device` and `plugin` are for pictures that ask the model."""

    runs: Sequence[str]
    output_dir: str | None = None
    plugin: str | None = None
    data_path: str | None = None
    device: str | None = None
    watch: bool = False
    without_pictures: bool = False

    @property
    def folder(self) -> Path:
        """Beside what it is about; several have no place in common."""
        if self.output_dir:
            return Path(self.output_dir)
        return Path(self.runs[0]) if len(self.runs) == 1 else Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}-report")

    @property
    def given(self) -> dict[str, str]:
        return {name: value for name in ("plugin", "data_path", "device") if (value := getattr(self, name))}


def report(asked: Asked) -> int:
    if not asked.runs:
        raise BadOption("report", "must name a run, several, a folder of runs, or a comparison")
    folder = asked.folder
    material = gather(asked.runs)
    check_writable(folder)
    if asked.watch:
        material = watch(asked, folder, time.sleep)
    build(material, asked, folder)
    return 0


def watch(asked: Asked, folder: Path, wait: Callable[[float], None]) -> Material:
    """Builds the page whenever something has changed, until no run goes on or waits."""
    before: object = None
    while (material := gather(asked.runs)).open:
        now = fingerprint(material)
        if now != before:
            before = now
            put(folder, {PAGE: page(material, sections(material), going=True).encode()})
            say(f"report: {folder / PAGE}, {sum(run.state == 'done' for run in material.runs)} of {len(material.runs)} runs done")
        wait(SECONDS)
    return material


def fingerprint(material: Material) -> tuple[object, ...]:
    """What the page depends on."""
    return tuple((run.name, run.state, *(_stamp(run.folder / name) for name in (EPOCHS, RESULTS))) for run in material.runs)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def build(material: Material, asked: Asked, folder: Path) -> None:
    found = sections(material, as_files=True, ask=None if asked.without_pictures else asked.given)
    content = page(material, found).encode()
    figures = {
        f"{FIGURES}/{picture.name}.{kind}": made
        for section in found
        for picture, done in section.drawn
        for kind, made in (("svg", done.svg), ("png", done.png))
    }
    put(folder, {**figures, PAGE: content})
    count = len(figures) // 2
    print(f"written to {folder / PAGE} ({in_bytes(len(content))}), and its {count} figures as SVG and PNG to {folder / FIGURES}")


def put(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Files that become a run's own if the folder is one."""
    list_files(folder, contents)
    for name, content in contents.items():
        write_atomically(folder / name, content)


# ---------------------------------------------------------------- the figures


def sections(material: Material, *, as_files: bool = False, ask: dict[str, str] | None = None) -> list[Section]:
    """`as_files`: figures are drawn as files, too. `ask`: options for pictures that need the model and its data; None: without them."""

    def section(name: str, title: str, pictures: Iterable[Picture], lines: Sequence[str] = ()) -> Section:
        return Section(name, title, [(picture, drawn(picture, files=as_files)) for picture in pictures], lines)

    left = f"Figures of the first {MOST_ARMS} of {len(material.arms)} arms." if len(material.arms) > MOST_ARMS else ""
    epochs = "" if any(run.epochs for run in material.runs) else "No run has finished an epoch yet, or these are tests without training."
    later = "Made when all runs have finished." if material.open else "Left out (--without_pictures)."
    seen = gallery.pictures(material, ask) if ask is not None else gallery.Gallery((), (later,))
    with collecting_little():
        return [
            section("scores-and-cost", "Scores and cost", comparing.pictures(material)),
            section("training", "Training and embedding health", training.pictures(material), [epochs] if epochs else []),
            section("sweeps", "What an option does", sweeps.pictures(material)),
            section("confidence", "Confidence and confusion", confidence.pictures(material, MOST_ARMS), [left] if left else []),
            section("looking", "Neighbors and tokens", seen.pictures, seen.lines),
        ]


@contextlib.contextmanager
def collecting_little() -> Iterator[None]:
    """Figures are full of cycles, and without this each collection of their garbage looks through all that is loaded."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
