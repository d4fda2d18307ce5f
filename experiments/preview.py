"""`compare --dry_run`: the plan with its time. Nothing is written."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from classifiers.classifier import Classifier
from config import Config
from experiments.cells import Place
from experiments.live import duration, seconds_taken
from experiments.plan import Plan
from experiments.power import planned_power
from inputs.rows import Data
from run.directory import RESULTS
from run.parts import loader, random_bank
from run.prepare import predictor_names
from train_eval import step
from training.state import TrainingState

ENOUGH = 1.0  # seconds of measured steps
START = 2.0  # seconds for what a run does besides passes over its rows
FIT = 0.003  # seconds for calibrating one vote to one validation row: measured on one core, digits and 8,000 random rows


def preview(plan: Plan, states: Mapping[Place, str], seconds: Mapping[str, float], same_as: Mapping[str, str], jobs: int | None) -> str:
    """`seconds`: of a run of each arm, measured on a few steps where none is done. `jobs`: None for as many as there is room for."""
    lines = []
    width = max(len(arm.name) for arm in plan.arms)
    each: dict[str, float] = {}
    for arm in plan.arms:
        if arm.name in same_as:
            lines.append(f"  {arm.name:<{width}}  is {same_as[arm.name]} by another name")
            continue
        own = {place: state for place, state in states.items() if place.arm == arm.name}
        done = [seconds_taken(place) for place in own if (place.run / RESULTS).exists()]
        each[arm.name] = statistics.median(done) if done else seconds[arm.name]
        count = ", ".join(f"{n} {state}" for state, n in Counter(own.values()).items())
        how = "measured" if done else "about"
        typed = " ".join(f"--{name} {value}" for name, value in arm.flags.items())
        lines.append(
            f"  {arm.name:<{width}}  {count}; {how} {duration(each[arm.name])} a run  {typed}{'  (exploratory)' if arm.exploratory else ''}"
        )
    head = f"plan: {len(plan.arms)} arms x {len(plan.seeds)} seeds, {len(states)} runs of {plan.threads} threads, {jobs or 'all'} at once"
    times = [each[place.arm] for place in states if not (place.run / RESULTS).exists()]
    left = side_by_side(times, jobs or max(1, len(times)))
    lines = [f"{head}: about {duration(left)} left", *lines]
    seeds = ", ".join(f"{seed} (exploratory)" if seed in plan.later_seeds else str(seed) for seed in plan.seeds)
    lines += [f"seeds: {seeds}" + (f"; verdicts after {', '.join(map(str, plan.verdicts_after))}" if plan.looks else "")]
    lines += [
        f"compared: {plan.metric} (margin: {plan.margin_means}), with {plan.baseline}; declared: {', '.join(plan.family) or 'nothing'}"
    ]
    return "\n".join([*lines, planned_power(len(plan.seeds), max(1, len(plan.family)))])


def side_by_side(times: Sequence[float], jobs: int) -> float:
    """How long runs of these times take, so many at once, each begun in its turn as soon as there is room."""
    ends = [0.0] * jobs
    for time_of_one in times:
        ends[ends.index(min(ends))] += time_of_one
    return max(ends)


def seconds_of_run(config: Config, data: Data, model: Classifier, device: torch.device) -> float:
    """Measured on a few steps: passes over training and validation rows, epochs of the head alone, and the evaluation at the end.

    All epochs count: with --patience a run may end earlier.
    """
    train = loader(config, data, "train", device)
    assert train is not None
    batch = next(iter(train.epoch()))
    rows = len(train)
    model.eval()

    def forward() -> None:
        with torch.no_grad():
            model.features(batch)

    look = median_seconds(forward)
    per_batch = {part: -(-len(split) // len(batch)) for part in ("train", "val", "test") if (split := getattr(data, part))}
    passes = (sum(per_batch.values()) + per_batch.get("test", 0) * max(0, config.evaluation.tta - 1)) * look
    end = START + passes + (FIT * len(data.val) * votes(config, model) if data.val and config.evaluation.calibrate != "none" else 0.0)
    if model.head.wants_bank:
        with torch.no_grad():
            dim = model.head.embed(model.backbone(batch.x[:2])).shape[1]
        model.head.refresh(random_bank(dim, max(len(data.train), 2 * config.head.k_train), data.num_classes))
    state = TrainingState(config, model, rows, device)
    update = median_seconds(lambda: step(state, [batch]))
    if config.model.freeze_backbone:
        return end + config.training.num_epochs * rows * max(update - look, update / 20)
    bank, validation = rows * look if model.head.wants_bank else 0.0, per_batch.get("val", 0) * look
    epochs = config.training.num_epochs * (rows * update + validation + bank)
    if config.training.head_epochs:  # without the backbone's part of a step: forward, and backward in about twice the time
        epochs += rows * look + validation + config.training.head_epochs * rows * max(update - 3 * look, update / 20)
    return end + epochs


def votes(config: Config, model: Classifier) -> int:
    """How many predictors look at neighbors."""
    return len([name for name in predictor_names(config, model) if name != "linear"])


def median_seconds(work: Callable[[], Any]) -> float:
    work()  # the first one is slower
    times: list[float] = []
    while len(times) < 3 or (sum(times) < ENOUGH and len(times) < 50):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
