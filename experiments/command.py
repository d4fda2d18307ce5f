"""`compare`: plans, runs what is left, and gives the verdict."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import plan as plans
from experiments.arms import Comparison
from experiments.cells import Place, changed, place_of, state_of
from experiments.comparison import compared, finished_runs, from_plan
from experiments.executors.base import Executor
from experiments.executors.wanted import Wanted, wanted
from experiments.grid import Arm
from experiments.launch import FailedFast, Launch, failure, tell_jobs
from experiments.live import Progress, duration
from experiments.plan import BACKBONE, Plan
from experiments.power import measured_power, planned_power
from experiments.published import beside_published
from inputs.files import write_json
from run.directory import RESULTS, check_writable
from utils import BadOption, Halt, did_you_mean, interruptible, parse_whole_number, say, whole_numbers

RETRIED = ("failed", "stale")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was typed, but for the flags of training. None: not typed."""

    seeds: str | None = None
    baseline: str | None = None
    metric: str | None = None
    margin: str | None = None
    plan: str | None = None
    config: str | None = None
    jobs: str | None = None
    threads: str | None = None
    executor: str | None = None
    retry: str | None = None
    looks: str | None = None
    within: str | None = None
    output_dir: str | None = None
    fail_fast: bool = False
    calibrated: bool = False
    dry_run: bool = False

    @property
    def makes_runs(self) -> bool:
        """Whether anything was typed that finished runs have no use for."""
        values = (self.seeds, self.plan, self.config, self.jobs, self.threads, self.executor, self.retry, self.looks)
        return any((*values, self.fail_fast, self.dry_run))

    def declared(self) -> dict[str, Any]:
        """What belongs to the plan, as values."""
        found: dict[str, Any] = {name: value for name in ("baseline", "metric") if (value := getattr(self, name))}
        if self.seeds:
            found["seeds"] = plans.seeds_of(self.seeds)
        if self.margin:
            found["margin"] = number("margin", self.margin)
        if self.looks:
            found["looks"] = whole_numbers("looks", self.looks)
        if self.within:
            found["within"] = plans.sources_of(self.within)
        return {**found, "calibrated": True} if self.calibrated else found


def number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadOption(option, "must be a number", text) from None


def compare(runs: Sequence[str], typed: Mapping[str, str], asked: Asked) -> int:
    """The exit code: 1 if any run of the comparison has no result."""
    declared = asked.declared()
    if not (runs or typed or asked.plan or asked.config or asked.output_dir):
        ways = '--layer "A | B" or another flag with alternatives, a --plan, finished runs, or the --output_dir of a comparison'
        raise BadOption("compare", f"needs something to compare: {ways}")
    folder = Path(asked.output_dir or default_folder())
    if runs:
        if typed or asked.makes_runs:
            raise BadOption("compare", "takes finished runs, or flags that make runs, not both", runs[0])
        check_writable(folder)
        conclude(finished_runs(runs, declared), folder)
        return 0
    check_writable(folder)
    where = wanted(asked.executor, None if asked.jobs is None else parse_whole_number("jobs", asked.jobs, 1))
    plan = planned(folder, typed, asked, declared, where.threads)
    from_plan(plan, (), {})  # what can't be compared is refused before anything is loaded
    if plan.trackers:
        from training.progress import check_tracker  # late: torch takes its time

        for name in plan.trackers:
            check_tracker(name)
    if asked.dry_run:
        show_plan(plan, folder, where)
        return 0
    return run_plan(plan, folder, where, retried(asked.retry), fail_fast=asked.fail_fast)


def show_plan(plan: Plan, folder: Path, where: Wanted) -> None:
    """`--dry_run`."""
    from experiments.preview import preview

    if where.is_local:
        tell_jobs(where.jobs or 1, plan.threads)
    backbone = ""
    if plan.backbone:
        first = Making.of(of_backbone(plan), folder, measure=True)
        backbone, plan = first.digest, dataclasses.replace(plan, backbone={})
        left = [place for place in first.places(plan.seeds) if not (place.run / RESULTS).exists()]
        each = first.seconds[BACKBONE]
        print(f"first, a backbone for each seed, from which all arms start: {len(left)} runs of about {duration(each)}")
    made = Making.of(plan, folder, measure=True, backbone=backbone)
    print(preview(plan, made.states(made.places(plan.seeds)), made.seconds, made.same_as, where.forecast))


def run_plan(plan: Plan, folder: Path, where: Wanted, retry: frozenset[str], *, fail_fast: bool) -> int:
    backbone = ""
    with where.make(folder, plan.threads, modules_of(plan)) as executor:
        if not all((place_of(folder, arm.name, seed).run / RESULTS).exists() for arm in plan.arms for seed in plan.seeds):
            executor.warm_up()  # while the plan is checked
        if where.is_local:
            tell_jobs(executor.at_once, plan.threads)
        if plan.backbone:
            write_json(folder / plans.FILE, plan.body())
            first = Making.of(of_backbone(plan), folder)
            missing = [p for p in first.run(executor, where, retry, fail_fast=fail_fast) if not (p.run / RESULTS).exists()]
            if len(missing) == len(plan.seeds):
                raise Halt(f"error: {failure(missing[0])}; no arm can start without it", 1)
            backbone = first.digest
        made = Making.of(plan, folder, backbone=backbone)
        write_json(folder / plans.FILE, plan.body())
        todo = made.run(executor, where, retry, fail_fast=fail_fast)
    return made.report(todo, where)


def modules_of(plan: Plan) -> list[str]:
    """What the runs will load, worth loading once for all: of a run of a second, loading takes most. torch asks for its compiler in
    every run, whether it compiles or not."""
    timm = any(str(arm.flags.get("model", "")).startswith("timm/") for arm in plan.arms)
    return ["torch._inductor", "matplotlib.pyplot", *["timm"] * timm]


def default_folder() -> str:
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-compare"


def retried(text: str | None) -> frozenset[str]:
    states = [word.strip() for word in (text or "").split(",") if word.strip()]
    for state in states:
        if state not in RETRIED:
            raise BadOption("retry", f"must be of {', '.join(RETRIED)}, with commas between", text)
    return frozenset(states)


# ---------------------------------------------------------------- the plan


def planned(folder: Path, typed: Mapping[str, str], asked: Asked, declared: dict[str, Any], usual: int) -> Plan:
    """The plan that the directory has, with what joins it, or a new one. `usual`: its threads, where nothing says them."""
    old = plans.read(folder)
    if old is not None:
        plans.permit(old, typed)
    rest: dict[str, Any] = {}
    if asked.plan:
        arms, rest = plans.read_plan(asked.plan, typed)
    elif old is not None and not asked.config and set(typed) <= {"plugin"}:
        arms = []  # it goes on; a plugin is permission to load it, and no arm
    elif typed or asked.config:
        arms = plans.arms_typed(typed, asked.config)
    else:
        raise BadOption("output_dir", f"must hold a {plans.FILE} to go on with, where nothing else is typed", str(folder))
    declared = {**plans.declared_in(rest), **declared}
    named = asked.threads if asked.threads is not None else rest.get("threads")
    threads = None if named is None else parse_whole_number("threads", str(named), 1)
    if old is not None and (folder / "cells").exists():
        if threads not in (None, old.threads):
            raise BadOption("threads", f"contradicts the plan, which has {old.threads}: threads change weights", threads)
        plan = plans.extended(old, plans.absolute(arms), declared)
    elif old is not None and not arms:
        plan = dataclasses.replace(old, **{**declared, "threads": threads or old.threads})
    else:
        declared.setdefault("seeds", plans.seeds_of("3"))
        arms = plans.absolute(arms)
        declared.setdefault("baseline", plans.shown_arms(arms, declared.get("within", ()))[0])
        plan = Plan(arms=tuple(arms), threads=threads or usual, **declared)
    return plans.checked(plan)


# ---------------------------------------------------------------- running it


def shared(plan: Plan, folder: Path, arm: Arm, seed: int) -> dict[str, Any]:
    """Flags that the comparison gives to a run: equal starts, and what is computed once for all."""
    given: dict[str, Any] = {"paired_init": True}
    if plan.backbone:
        given["pretrained"] = str(place_of(folder, BACKBONE, seed).run)
    if arm.flags.get("freeze_backbone"):
        given["feature_cache"] = str((folder / "features").resolve())
    return given


def can_start(plan: Plan, folder: Path, seed: int) -> bool:
    """Whether there is what the arms of a seed start from."""
    return not plan.backbone or (place_of(folder, BACKBONE, seed).run / RESULTS).exists()


def check_predictors(plan: Plan, arm: str, predictors: Sequence[str]) -> None:
    """That an arm's runs will have the predictions which are compared. `predictors`: NAME.raw, ...; none where the arm was not built."""
    if not predictors:
        return
    known = {*predictors, *(source.rpartition(".")[0] for source in predictors)}
    for source in plan.within:
        if source not in known:
            rule = f"must name predictors that every run will have; those of {arm} will have {', '.join(predictors)}"
            raise BadOption("within", rule + did_you_mean(source, predictors), source)
    if plan.calibrated and not any(".calibrated" in source for source in predictors):
        raise BadOption("calibrated", f"needs runs that calibrate, and those of {arm} do not (--calibrate none)")


def of_backbone(plan: Plan) -> Plan:
    """The runs whose weights all arms start from, as a plan."""
    arm = Arm(BACKBONE, plan.backbone)
    return dataclasses.replace(plan, arms=(arm,), baseline=BACKBONE, backbone={}, looks=(), within=(), calibrated=False)


@dataclass(frozen=True)
class Making:
    """A plan, its directory, and what its runs are made with. `same_as`: arms that are an earlier one by another name."""

    plan: Plan
    folder: Path
    made_with: Mapping[str, Mapping[str, str]]
    same_as: Mapping[str, str]
    seconds: Mapping[str, float]  # of a run of each arm, where it was measured

    @staticmethod
    def of(plan: Plan, folder: Path, *, measure: bool = False, backbone: str = "") -> Making:
        """`backbone`: digest of the runs whose weights all arms start from."""
        from experiments.preview import seconds_of_run  # late: torch takes its time
        from experiments.resolve import resolve

        if measure:
            import torch

            torch.set_num_threads(plan.threads)
        tried = frozenset(arm.name for arm in plan.arms if any((place_of(folder, arm.name, s).note).exists() for s in plan.seeds))
        seed = next(seed for seed in plan.seeds if can_start(plan, folder, seed))
        given = [dataclasses.replace(a, flags={**shared(plan, folder, a, seed), **a.flags}) for a in plan.arms]
        found = resolve(given, seed, tried=tried, measure=seconds_of_run if measure else None, backbone=backbone)
        rows = {identity.test_rows: name for name, identity in found.items()}
        if len(rows) > 1:
            one, other = list(rows.values())[:2]
            raise BadOption("dataset", f"must give all arms the same test rows: those of {one!r} and {other!r} differ")
        for name, identity in found.items():
            check_predictors(plan, name, identity.predictors)
        first: dict[tuple[str, str, str], str] = {}
        same = {name: first.setdefault((i.config, i.data, i.plugin), name) for name, i in found.items()}
        same_as = {name: other for name, other in same.items() if name != other}
        for name, other in same_as.items():
            say(f"same: {name} is {other} by another name, and runs once")
        made_with, seconds = {n: i.made_with() for n, i in found.items()}, {n: i.seconds for n, i in found.items()}
        return Making(plan, folder, made_with, same_as, seconds)

    @property
    def digest(self) -> str:
        """Of a plan with one arm: by what its runs are known, whatever their seed."""
        return plans.digest_of(self.made_with[self.plan.arms[0].name])

    def places(self, seeds: Sequence[int], arms: Sequence[str] = ()) -> list[Place]:
        """Seed by seed, so that pairs are complete early."""
        names = [arm.name for arm in self.plan.arms if arm.name not in self.same_as]
        return [place_of(self.folder, name, seed) for seed in seeds for name in names if not arms or name in arms]

    def states(self, places: Sequence[Place]) -> dict[Place, str]:
        return {place: state_of(place, self.made_with[place.arm]) for place in places}

    def comparison(self, plan: Plan | None = None) -> Comparison:
        plan = plan or self.plan
        states = self.states(self.places(plan.seeds))
        return from_plan(plan, list(states.items()), self.same_as)

    def run(self, executor: Executor, where: Wanted, retry: frozenset[str], *, fail_fast: bool) -> list[Place]:
        """Runs what is left. Gives the runs that the plan wanted."""
        plan, told = self.plan, list[bool]()
        places = self.places(plan.seeds)
        later: list[str | int] = [*plan.later_seeds, *(arm.name for arm in plan.arms if arm.exploratory)]
        progress = Progress(places, self.made_with, plan.metric, executor.room, later, after=lambda: self.tell_power(told, progress))
        arms = {arm.name: arm for arm in plan.arms}
        given = functools.partial(shared, plan, self.folder)
        launch = Launch(arms, self.made_with, plan.threads, progress, retry, fail_fast, given)
        try:
            with interruptible() as signals, progress:
                if plan.family and not all((place.run / RESULTS).exists() for place in places):
                    progress.line(planned_power(len(plan.seeds), len(plan.family)))
                return self.look_by_look(launch, executor)
        except KeyboardInterrupt:
            how = signals[-1]
            raise Halt(f"stopped by {how.name}; what was done is saved. Go on with: {self.again(where)}", how.exit_code) from None
        except FailedFast as stop:
            raise Halt(f"{stop}. Go on with: {self.again(where)} --retry failed", 1) from None

    def look_by_look(self, launch: Launch, executor: Executor) -> list[Place]:
        """All of them, or those up to the look at which every arm was decided; seeds that joined later come last."""
        plan, seeds, before, open_arms = self.plan, self.plan.declared_seeds, 0, list[str]()
        wanted: list[Place] = []
        for look in plan.verdicts_after or (len(seeds),):
            more = self.places(seeds[before:look], open_arms)
            launch.run(self.ready(more), executor)
            wanted, before = wanted + more, look
            if look < len(seeds):
                still = compared(self.comparison(dataclasses.replace(plan, seeds=seeds, later_seeds=()))).open_arms
                if not still:
                    launch.view.line(f"looks: decided after {look} seeds, as the plan allows")
                    break
                # With predictors as arms, their run is what goes on.
                names = [arm.name for arm in plan.arms for n in (plan.baseline, *still) if n == arm.name or plan.within]
                open_arms = [self.same_as.get(name, name) for name in names]
        later = self.places(plan.later_seeds)
        launch.run(self.ready(later), executor)
        return wanted + later

    def ready(self, places: Sequence[Place]) -> list[Place]:
        return [place for place in places if can_start(self.plan, self.folder, place.seed)]

    def again(self, where: Wanted) -> str:
        """The command that goes on."""
        plugins = self.plan.plugins
        typed = f" --plugin {shlex.quote(' | '.join(plugins))}" if plugins else ""
        return f"python main.py compare --output_dir {shlex.quote(str(self.folder))}{where.words}{typed}"

    def tell_power(self, told: list[bool], progress: Progress) -> None:
        """Once, when the first two seeds of each arm are there: what the planned seeds will find."""
        plan = self.plan
        first_two = self.places(plan.seeds[:2])
        if told or not plan.family or len(plan.seeds) < 2 or not all((place.run / RESULTS).exists() for place in first_two):
            return
        if line := measured_power(self.comparison(), len(plan.seeds)):  # none while one of them, whose results are there, still ends
            told.append(True)
            progress.line(line)

    def report(self, todo: Sequence[Place], where: Wanted) -> int:
        """The verdict, and what is missing for it."""
        states = self.states(todo)
        missing = [place for place in todo if not (place.run / RESULTS).exists()]
        if len(missing) < len(todo):
            conclude(self.comparison(), self.folder, self.plan.trackers)
            if any(arm.published for arm in self.plan.arms):
                print("\n" + beside_published(self.plan, self.places(self.plan.seeds), self.same_as, self.folder))
        for seed in self.plan.seeds:
            if not can_start(self.plan, self.folder, seed):
                say(f"{failure(place_of(self.folder, BACKBONE, seed))}; no arm can start without it")
        for place, state in states.items():
            if state == "failed":
                say(failure(place))
        if old := [place for place, state in states.items() if state == "stale"]:
            what = ", ".join(dict.fromkeys(word for place in old for word in changed(place, self.made_with[place.arm])))
            say(f"stale: {len(old)} results were made with another {what}; --retry stale makes them anew")
        if missing:
            tries = " --retry failed" if "failed" in states.values() else ""
            say(f"{len(missing)} of {len(todo)} runs have no result. Go on with: {self.again(where)}{tries}")
        return 1 if missing else 0


def conclude(comparison: Comparison, folder: Path, trackers: Sequence[str] = ()) -> None:
    """`trackers` are told a verdict once."""
    from experiments.tables import COMPARED, write

    verdicts, before = compared(comparison), content_of(folder / COMPARED)
    text = write(verdicts, folder)
    print(text)
    if trackers and content_of(folder / COMPARED) != before:
        from experiments.tracking import tell

        tell(trackers, verdicts, text, folder)


def content_of(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""
