"""What a report is about: runs as they stand on disk, and what a comparison says of them. Reads, and writes nothing."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import config as flags
from experiments import plan as plans
from experiments.arms import Cell, Comparison
from experiments.cells import place_of, read_note
from experiments.cells import state_of as state_of_place
from experiments.comparison import compared, from_plan, names_of
from experiments.metrics import METRICS, Answers, Metric
from experiments.read import answers, kept
from experiments.read import results as read_results
from experiments.statistics import Estimate, crossed
from experiments.tables import COMPARED
from experiments.verdict import Verdicts
from inputs.indexed import digest_of, read_index
from inputs.yaml_file import read_mapping
from run.directory import ERROR, RESULTS, state_of
from training.epochs import METRICS as EPOCHS
from training.epochs import read_lines
from utils import BadOption, check_file

UNREADABLE = "unreadable"
DEEP = 4  # folders below one that is asked for


@dataclass(frozen=True, eq=False)
class Run:
    """One run as it stands. `results` is empty where there are none, `error` says why."""

    name: str
    arm: str
    seed: int
    state: str
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)
    epochs: tuple[dict[str, Any], ...] = ()
    classes: tuple[str, ...] = ()
    command: str = ""  # as it was typed
    error: str = ""
    checkpoint: str = ""  # the digest of the best one

    @property
    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = self.results.get("about", {})
        return found

    @property
    def config(self) -> dict[str, Any]:
        """Options that have an effect."""
        config, ignored = self.about.get("config", {}), self.about.get("ignored", {})
        return {name: value for name, value in config.items() if name not in ignored} if config else configuration(self.folder)

    @property
    def again(self) -> str:
        """The command that repeats it."""
        plugin = self.config.get("plugin")
        typed = f" --plugin {shlex.quote(str(plugin))}" if plugin else ""
        folder = str(self.folder)
        return f"python main.py --config {shlex.quote(f'{folder}/config.yaml')}{typed} --output_dir {shlex.quote(f'{folder}-again')}"


@dataclass(frozen=True, eq=False)
class Shown:
    """A cell of the comparison: a run, and whose probabilities of it count (the head's own where `source` is empty)."""

    arm: str
    run: Run
    source: str = ""

    @cached_property
    def said(self) -> dict[str, Answers]:
        """Answers to the test rows, as trained and calibrated, as far as they were kept."""
        if not self.run.results:
            return {}
        known = kept(self.run.folder)
        if self.source in known.sources:  # one variant of a predictor
            return {self.source.rpartition(".")[2].removesuffix("_tta"): answers(self.run.folder, self.source)}
        found: dict[str, Answers] = {}
        for title, calibrated in (("raw", False), ("calibrated", True)):
            with contextlib.suppress(BadOption):
                found[title] = answers(self.run.folder, known.source(self.source, calibrated=calibrated))
        return found


@dataclass(frozen=True)
class Material:
    """`verdicts` is None where nothing can be compared, and `why_not` says why."""

    title: str
    runs: tuple[Run, ...]
    cells: tuple[Shown, ...]
    arms: tuple[str, ...]
    baseline: str
    verdicts: Verdicts | None = None
    why_not: str = ""
    plan_hash: str = ""

    @property
    def metric(self) -> Metric:
        return self.verdicts.metric if self.verdicts else METRICS["accuracy"]

    @property
    def calibrated(self) -> bool:
        return self.verdicts is not None and self.verdicts.comparison.calibrated

    @property
    def open(self) -> bool:
        """Whether runs still go on, or wait."""
        return any(run.state in ("running", "pending") for run in self.runs)

    def joined_later(self, run: Run) -> bool:
        """Whether its arm or its seed joined the plan after it was written."""
        if self.verdicts is None:
            return False
        comparison = self.verdicts.comparison
        arm = any(name == run.arm or name.startswith(f"{run.arm}: ") for name in comparison.exploratory)  # or predictors inside it
        return arm or run.seed in comparison.exploratory_seeds

    def of(self, arm: str) -> list[Shown]:
        """The finished cells of an arm, those of the arm that it is another name of."""
        name = self.verdicts.comparison.same_as.get(arm, arm) if self.verdicts else arm
        return [cell for cell in self.cells if cell.arm == name and cell.run.results]

    def estimate(self, arm: str) -> Estimate | None:
        """The metric of an arm, with what seeds and rows do to it."""
        return self._estimates[arm]

    @cached_property
    def _estimates(self) -> dict[str, Estimate | None]:
        return {arm: self._estimate(arm) for arm in self.arms}

    def _estimate(self, arm: str) -> Estimate | None:
        if self.verdicts is not None and self.verdicts.scored.seeds(name := self.verdicts.comparison.same_as.get(arm, arm)):
            return self.verdicts.scored.mean(name)
        found = [cell.said["raw"] for cell in self.of(arm) if "raw" in cell.said]
        if not found or len({len(a.label) for a in found}) > 1 or self.metric.rows is None:
            return None
        return crossed(np.stack([self.metric.rows(a) for a in found]))

    def run_of_arm(self, arm: str) -> Run | None:
        cells = self.of(arm)
        return cells[0].run if cells else None


# ---------------------------------------------------------------- which runs


def gather(paths: Sequence[str]) -> Material:
    """A comparison, a run, a folder of runs, or several of these."""
    folders = [Path(path) for path in paths]
    for folder in folders:
        if not folder.is_dir():
            raise BadOption("report", "must name directories of runs", str(folder))
    if len(folders) == 1 and (folders[0] / plans.FILE).is_file():
        return of_plan(folders[0])
    if len(folders) == 1 and (folders[0] / COMPARED).is_file():
        return of_comparison(folders[0])
    found = list(dict.fromkeys(run for folder in folders for run in runs_in(folder)))
    if not found:
        raise BadOption("report", "must name directories with runs", ", ".join(paths))
    return of_runs(found, folders[0].name if len(folders) == 1 else f"{len(found)} runs")


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RESULTS, EPOCHS, "config.yaml"))


def runs_in(folder: Path) -> list[Path]:
    """The directory itself, or the runs below it, by name."""
    if is_run(folder):
        return [folder]
    found: list[Path] = []
    below = [folder]
    for _ in range(DEEP):
        below = [child for parent in below for child in sorted(parent.iterdir()) if child.is_dir() and not child.name.startswith(".")]
        found += [child for child in below if is_run(child)]
        below = [child for child in below if not is_run(child)]
    return sorted(found)


def of_plan(folder: Path) -> Material:
    plan = plans.read(folder)
    assert plan is not None
    body = read_json(folder / COMPARED)
    same_as = {str(a): str(b) for a, b in (body.get("same_as") or {}).items()}
    runs: dict[tuple[str, int], Run] = {}
    found = []
    for seed in plan.seeds:
        for arm in plan.arms:
            if arm.name in same_as:
                continue
            place = place_of(folder, arm.name, seed)
            state = state_of_place(place, read_note(place).get("made_with", {}))
            failed = read_note(place).get("failed")
            line = str(failed.get("line", "")) if state == "failed" and isinstance(failed, dict) else ""
            run = read_run(place.run, place.title, arm.name, seed, state, line)
            runs[arm.name, seed] = run
            found.append((place, run.state))
    comparison = from_plan(plan, found, same_as)
    by_folder = {str(run.folder): run for run in runs.values()}
    several = len(plan.arms) > 1
    cells = []
    for cell in comparison.cells:
        name = cell.arm if not plan.within else cell.arm.removesuffix(f": {cell.source}") if several else plan.arms[0].name
        run = by_folder.get(str(cell.run)) or runs[name, cell.seed]
        cells.append(Shown(cell.arm, run, cell.source))
    return material(folder.resolve().name, list(runs.values()), cells, comparison, str(plan.body()["sha256"]))


def of_comparison(folder: Path) -> Material:
    """Of finished runs that were compared by path."""
    body = read_json(folder / COMPARED)
    try:
        places = [(c["arm"], int(c["seed"]), c["state"], Path(c["run"]), str(c.get("source") or "")) for c in body["cells"] if c["run"]]
        declared: dict[str, Any] = {name: body[name] for name in ("baseline", "metric", "calibrated")}
        declared |= {"arms": tuple(body["arms"]), "margin": body.get("margin")}
    except (KeyError, TypeError, ValueError):
        raise BadOption("report", f"must hold a {COMPARED} that can be read", str(folder)) from None
    runs = {path: read_run(path, f"{arm}, seed {seed}", arm, seed, state) for arm, seed, state, path, _ in places}
    comparison = Comparison(cells=tuple(Cell(a, s, runs[p].state, p, source) for a, s, _, p, source in places), **declared)
    cells = [Shown(arm, runs[path], source) for arm, _, _, path, source in places]
    return material(folder.resolve().name, list(runs.values()), cells, comparison)


def of_runs(folders: Sequence[Path], title: str) -> Material:
    """Runs by path: those that differ in their seed alone are one arm."""
    values = [configuration(folder) for folder in folders]
    seeds = [int(value.pop("seed", 0) or 0) for value in values]
    keys: list[str] = []
    groups: dict[str, dict[str, Any]] = {}
    for folder, value, seed in zip(folders, values, seeds, strict=True):
        value = {name: of for name, of in value.items() if name not in flags.PLACE}
        key = json.dumps(value, sort_keys=True, default=str)
        if (key, seed) in zip(keys, seeds, strict=False):  # twice the same: each is told by itself
            key += str(folder)
        keys.append(key)
        groups.setdefault(key, value)
    named = dict(zip(groups, names_of(list(groups.values())), strict=True))
    if len(groups) == 1:
        named = dict.fromkeys(groups, str(values[0].get("layer") or title))
    names = [named[key] for key in keys]
    runs = [read_run(f, f"{n}, seed {s}", n, s, state_of(f)) for f, n, s in zip(folders, names, seeds, strict=True)]
    cells = [Shown(run.arm, run) for run in runs]
    arms = tuple(dict.fromkeys(names))
    if len(arms) == 1:
        title = f"{runs[0].name}{on_data(values[0])}" if len(runs) == 1 else title
        why_not = "One configuration: there is nothing to compare it with." if len(runs) > 1 else ""
        return Material(title, tuple(runs), tuple(cells), arms, arms[0], why_not=why_not)
    of_cells = tuple(Cell(run.arm, run.seed, run.state, run.folder if run.results else None) for run in runs)
    return material(title, runs, cells, Comparison(arms=arms, baseline=arms[0], cells=of_cells))


def on_data(config: dict[str, Any]) -> str:
    """ ", on digits"; of files, the name of the last."""
    name = str(config.get("dataset") or "").rpartition("/")[2]
    return f", on {name}" if name else ""


def material(title: str, runs: Sequence[Run], cells: Sequence[Shown], comparison: Comparison, plan_hash: str = "") -> Material:
    verdicts, why_not = None, ""
    try:
        verdicts = compared(comparison)
        if not verdicts.scored.results:
            verdicts, why_not = None, "No run has finished yet: there is nothing to compare."
    except BadOption as error:
        why_not = f"These runs cannot be compared: {error}"
    return Material(title, tuple(runs), tuple(cells), comparison.arms, comparison.baseline, verdicts, why_not, plan_hash)


# ---------------------------------------------------------------- one run


def read_run(folder: Path, name: str, arm: str, seed: int, state: str, error: str = "") -> Run:
    """NOTE: a run that is damaged is told as such, and ends no report."""
    results: dict[str, Any] = {}
    if (folder / RESULTS).exists():
        try:
            results = read_results(folder)
            if kept(folder).sources:
                answers(folder, kept(folder).sources[0])
            state = "done" if state in ("none", "running", "unfinished") else state
        except BadOption as problem:
            results, state, error = {}, UNREADABLE, str(problem)
    if not results and not error:
        error = last_line(folder / ERROR)
    if not folder.is_dir() and state == "done":
        state, error = UNREADABLE, "the directory of this run is gone"
    classes, digest = best_of(folder)
    return Run(name, arm, seed, state, folder, results, tuple(read_lines(folder / EPOCHS)), classes, command_of(folder), error, digest)


def best_of(folder: Path) -> tuple[tuple[str, ...], str]:
    """Names of the classes, and the digest of the index, of the best checkpoint."""
    with contextlib.suppress(BadOption, OSError, KeyError, TypeError):
        index = read_index(folder / "checkpoints" / "best")
        return tuple(map(str, index["facts"]["classes"])), digest_of(index)
    return (), ""


def configuration(folder: Path) -> dict[str, Any]:
    """Options that have an effect: config.yaml, or what results.json says."""
    try:
        found = read_mapping(str(folder / "config.yaml"), "config")
    except BadOption:
        about: dict[str, Any] = {}
        with contextlib.suppress(BadOption):
            about = read_results(folder)["about"]
        found = {name: value for name, value in (about.get("config") or {}).items() if name not in (about.get("ignored") or {})}
    return {str(name): value for name, value in found.items()}


def command_of(folder: Path) -> str:
    return text_in(folder / "args.txt").strip()


def last_line(path: Path) -> str:
    return ["", *text_in(path).strip().splitlines()][-1]


def read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(text_in(path))
        return found if isinstance(found, dict) else {}
    return {}


def text_in(path: Path) -> str:
    """Of a plain file; "" where there is none. NOTE: a run may be a stranger's, and who opens a pipe waits for ever."""
    with contextlib.suppress(OSError, BadOption):
        check_file("report", path)
        return path.read_text(errors="replace")
    return ""


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff\ud800-\udfff]")


def plain(text: Any) -> str:
    """Text from outside without characters that steer: no escape codes, no turned reading direction."""
    return CONTROL.sub("\ufffd", str(text))
