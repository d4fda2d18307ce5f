"""`compare`: plans, runs what is left, and gives the verdict."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import plan as plans
from experiments.arms import Comparison
from experiments.cells import Place, changed, place_of, state_of
from experiments.comparison import compared, finished_runs, from_plan
from experiments.grid import Arm
from experiments.launch import FailedFast, Launch, Workers, check_can_fork, failure, tell_jobs
from experiments.live import Progress, duration
from experiments.plan import BACKBONE, Plan
from experiments.published import beside_published
from inputs.store import write_json
from run.directory import RESULTS, check_writable
from utils import BadOption, Halt, parse_whole_number, say, whole_numbers

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
    retry: str | None = None
    looks: str | None = None
    within: str | None = None
    output_dir: str | None = None
    fail_fast: bool = False
    calibrated: bool = False
    dry_run: bool = False

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
    if runs:
        if typed or asked.plan or asked.seeds or asked.looks:
            raise BadOption("compare", "takes finished runs, or flags that make runs, not both", runs[0])
        kept = {name: value for name, value in declared.items() if name not in ("seeds", "looks")}
        folder = Path(asked.output_dir or default_folder())
        check_writable(folder)
        conclude(finished_runs(runs, kept), folder)
        return 0
    folder = Path(asked.output_dir or default_folder())
    check_writable(folder)
    jobs = parse_whole_number("jobs", asked.jobs or "1", 1)
    plan = planned(folder, typed, asked, declared, jobs)
    from_plan(plan, (), {})  # what can't be compared is refused before anything is loaded
    if asked.dry_run:
        from experiments.preview import preview

        if plan.backbone:
            seconds = Making.of(of_backbone(plan), folder, measure=True).seconds[BACKBONE]
            print(f"first, a backbone for each seed, from which all arms start: about {duration(seconds)} a run")
            plan = dataclasses.replace(plan, backbone={})
        made = Making.of(plan, folder, measure=True)
        print(preview(plan, made.states(made.places(plan.seeds)), made.seconds, made.same_as, jobs))
        return 0
    retry = retried(asked.retry)
    check_can_fork()
    with Workers(plan.threads, modules_of(plan)) as workers:
        if not all((place_of(folder, arm.name, seed).run / RESULTS).exists() for arm in plan.arms for seed in plan.seeds):
            workers.warm_up()  # while the plan is checked
        tell_jobs(jobs, plan.threads)
        if plan.backbone:
            write_json(folder / plans.FILE, plan.body())
            first = Making.of(of_backbone(plan), folder)
            for place in first.run(workers, jobs, retry, fail_fast=asked.fail_fast):
                if not (place.run / RESULTS).exists():
                    raise Halt(f"error: {failure(place)}; no arm can start without it", 1)
        made = Making.of(plan, folder)
        write_json(folder / plans.FILE, plan.body())
        wanted = made.run(workers, jobs, retry, fail_fast=asked.fail_fast)
    return made.report(wanted, jobs)


def modules_of(plan: Plan) -> list[str]:
    """What the runs will load, worth loading once for all: of a run of a second, loading takes most. torch asks for its compiler in
    every run, whether it compiles or not."""
    of_all = [arm.flags for arm in plan.arms]
    timm = any(str(f.get("model", "")).startswith("timm/") for f in of_all)
    digits = any(f.get("dataset", "digits") == "digits" for f in of_all)
    return ["torch._inductor", "matplotlib.pyplot", *["timm"] * timm, *["sklearn.datasets"] * digits]


def default_folder() -> str:
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-compare"


def retried(text: str | None) -> frozenset[str]:
    states = [word.strip() for word in (text or "").split(",") if word.strip()]
    for state in states:
        if state not in RETRIED:
            raise BadOption("retry", f"must be of {', '.join(RETRIED)}, with commas between", text)
    return frozenset(states)


# ---------------------------------------------------------------- the plan


def planned(folder: Path, typed: Mapping[str, str], asked: Asked, declared: dict[str, Any], jobs: int) -> Plan:
    """The plan that the directory has, with what joins it, or a new one."""
    old = plans.read(folder)
    rest: dict[str, Any] = {}
    if asked.plan:
        arms, rest = plans.read_plan(asked.plan, typed)
    elif typed or asked.config or old is None:
        arms = plans.arms_typed(typed, asked.config)
    else:
        arms = []
    declared = {**plans.declared_in(rest), **declared}
    if old is not None and (folder / "cells").exists():
        if asked.threads and parse_whole_number("threads", asked.threads, 1) != old.threads:
            raise BadOption("threads", f"contradicts the plan, which has {old.threads}: threads change weights", asked.threads)
        return plans.checked(plans.extended(old, plans.absolute(arms), declared))
    if old is not None and not arms:
        return plans.checked(dataclasses.replace(old, **declared))
    threads = parse_whole_number("threads", asked.threads or str(rest.get("threads") or plans.threads_for(jobs)), 1)
    declared.setdefault("seeds", plans.seeds_of("3"))
    arms = plans.absolute(arms)
    declared.setdefault("baseline", plans.shown_arms(arms, declared.get("within", ()))[0])
    return plans.checked(Plan(arms=tuple(arms), threads=threads, **declared))


# ---------------------------------------------------------------- running it


def shared(plan: Plan, folder: Path, arm: Arm, seed: int) -> dict[str, Any]:
    """Flags that the comparison gives to a run: equal starts, and what is computed once for all."""
    given: dict[str, Any] = {"paired_init": True}
    if plan.backbone:
        given["pretrained"] = str(place_of(folder, BACKBONE, seed).run)
    if arm.flags.get("freeze_backbone"):
        given["feature_cache"] = str((folder / "features").resolve())
    return given


def of_backbone(plan: Plan) -> Plan:
    """The runs whose weights all arms start from, as a plan."""
    arm = Arm(BACKBONE, plan.backbone)
    return dataclasses.replace(plan, arms=(arm,), baseline=BACKBONE, backbone={}, looks=(), within=())


@dataclass(frozen=True)
class Making:
    """A plan, its directory, and what its runs are made with. `same_as`: arms that are an earlier one by another name."""

    plan: Plan
    folder: Path
    made_with: Mapping[str, Mapping[str, str]]
    same_as: Mapping[str, str]
    seconds: Mapping[str, float]  # of a run of each arm, where it was measured

    @staticmethod
    def of(plan: Plan, folder: Path, *, measure: bool = False) -> Making:
        from experiments.preview import seconds_of_run  # late: torch takes its time
        from experiments.resolve import resolve

        if measure:
            import torch

            torch.set_num_threads(plan.threads)
        tried = frozenset(arm.name for arm in plan.arms if any((place_of(folder, arm.name, s).note).exists() for s in plan.seeds))
        given = [dataclasses.replace(a, flags={**shared(plan, folder, a, plan.seeds[0]), **a.flags}) for a in plan.arms]
        found = resolve(given, plan.seeds[0], tried=tried, measure=seconds_of_run if measure else None)
        rows = {identity.test_rows: name for name, identity in found.items()}
        if len(rows) > 1:
            one, other = list(rows.values())[:2]
            raise BadOption("dataset", f"must give all arms the same test rows: those of {one!r} and {other!r} differ")
        first: dict[tuple[str, str, str], str] = {}
        same = {name: first.setdefault((i.config, i.data, i.plugin), name) for name, i in found.items()}
        same_as = {name: other for name, other in same.items() if name != other}
        for name, other in same_as.items():
            say(f"same: {name} is {other} by another name, and runs once")
        made_with, seconds = {n: i.made_with() for n, i in found.items()}, {n: i.seconds for n, i in found.items()}
        return Making(plan, folder, made_with, same_as, seconds)

    def places(self, seeds: Sequence[int], arms: Sequence[str] = ()) -> list[Place]:
        """Seed by seed, so that pairs are complete early."""
        names = [arm.name for arm in self.plan.arms if arm.name not in self.same_as]
        return [place_of(self.folder, name, seed) for seed in seeds for name in names if not arms or name in arms]

    def states(self, places: Sequence[Place]) -> dict[Place, str]:
        return {place: state_of(place, self.made_with[place.arm]) for place in places}

    def comparison(self) -> Comparison:
        states = self.states(self.places(self.plan.seeds))
        return from_plan(self.plan, list(states.items()), self.same_as)

    def run(self, workers: Workers, jobs: int, retry: frozenset[str], *, fail_fast: bool) -> list[Place]:
        """Runs what is left. Gives the runs that the plan wanted."""
        plan, told = self.plan, list[bool]()
        places = self.places(plan.seeds)
        progress = Progress(places, self.made_with, plan.metric, jobs, after=lambda: self.tell_power(told, progress))
        arms = {arm.name: arm for arm in plan.arms}
        given = functools.partial(shared, plan, self.folder)
        launch = Launch(arms, self.made_with, plan.threads, jobs, progress, retry, fail_fast, given)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the runs are saved
        try:
            with progress:
                return self.look_by_look(launch, workers)
        except KeyboardInterrupt:
            raise Halt(f"stopped; what was done is saved. Go on with: {self.again(jobs)}", 130) from None
        except FailedFast as stop:
            raise Halt(f"{stop}. Go on with: {self.again(jobs)} --retry failed", 1) from None

    def look_by_look(self, launch: Launch, workers: Workers) -> list[Place]:
        """All of them, or those up to the look at which every arm was decided."""
        plan, before, open_arms = self.plan, 0, list[str]()
        wanted: list[Place] = []
        for look in sorted({*plan.looks, len(plan.seeds)}):
            more = self.places(plan.seeds[before:look], open_arms)
            launch.run(more, workers)
            wanted, before = wanted + more, look
            if look in plan.looks and look < len(plan.seeds):
                still = compared(self.comparison()).open_arms
                if not still:
                    launch.view.line(f"looks: decided after {look} seeds, as the plan allows")
                    break
                # With predictors as arms, their run is what goes on.
                names = [arm.name for arm in plan.arms for n in (plan.baseline, *still) if n == arm.name or plan.within]
                open_arms = [self.same_as.get(name, name) for name in names]
        return wanted

    def again(self, jobs: int) -> str:
        """The command that goes on."""
        typed = next((f" --plugin {shlex.quote(str(arm.flags['plugin']))}" for arm in self.plan.arms if arm.flags.get("plugin")), "")
        return f"python main.py compare --output_dir {shlex.quote(str(self.folder))} --jobs {jobs}{typed}"

    def tell_power(self, told: list[bool], progress: Progress) -> None:
        """Once, when the first two seeds of each arm are there: what the planned seeds will find."""
        plan = self.plan
        first_two = self.places(plan.seeds[:2])
        if told or len(plan.arms) < 2 or len(plan.seeds) < 2 or not all((place.run / RESULTS).exists() for place in first_two):
            return
        told.append(True)
        from experiments.power import measured_power

        if line := measured_power(self.comparison(), len(plan.seeds)):
            progress.line(line)

    def report(self, wanted: Sequence[Place], jobs: int) -> int:
        """The verdict, and what is missing for it."""
        states = self.states(wanted)
        missing = [place for place in wanted if not (place.run / RESULTS).exists()]
        if len(missing) < len(wanted):
            conclude(self.comparison(), self.folder)
            if any(arm.published for arm in self.plan.arms):
                print("\n" + beside_published(self.plan, self.places(self.plan.seeds), self.same_as, self.folder))
        for place, state in states.items():
            if state == "failed":
                say(failure(place))
        if old := [place for place, state in states.items() if state == "stale"]:
            what = ", ".join(dict.fromkeys(word for place in old for word in changed(place, self.made_with[place.arm])))
            say(f"stale: {len(old)} results were made with another {what}; --retry stale makes them anew")
        if missing:
            tries = " --retry failed" if "failed" in states.values() else ""
            say(f"{len(missing)} of {len(wanted)} runs have no result. Go on with: {self.again(jobs)}{tries}")
        return 1 if missing else 0


def conclude(comparison: Comparison, folder: Path) -> None:
    from experiments.tables import write

    print(write(compared(comparison), folder))
