"""`compare --dry_run`: the plan with its time. Nothing is written."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
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
from train_eval import step
from training.state import TrainingState

ENOUGH = 1.0  # seconds of measured steps
START = 2.0  # seconds for what a run does besides passes over its rows


def preview(plan: Plan, states: Mapping[Place, str], seconds: Mapping[str, float], same_as: Mapping[str, str], jobs: int) -> str:
    """`seconds`: of a run of each arm, measured on a few steps where none is done."""
    lines = []
    width = max(len(arm.name) for arm in plan.arms)
    left = 0.0
    for arm in plan.arms:
        if arm.name in same_as:
            lines.append(f"  {arm.name:<{width}}  is {same_as[arm.name]} by another name")
            continue
        own = {place: state for place, state in states.items() if place.arm == arm.name}
        done = [seconds_taken(place) for place in own if (place.run / RESULTS).exists()]
        each = statistics.median(done) if done else seconds[arm.name]
        left += each * (len(own) - len(done))
        count = ", ".join(f"{n} {state}" for state, n in Counter(own.values()).items())
        how = "measured" if done else "about"
        typed = " ".join(f"--{name} {value}" for name, value in arm.flags.items())
        lines.append(f"  {arm.name:<{width}}  {count}; {how} {duration(each)} a run  {typed}{'  (exploratory)' if arm.exploratory else ''}")
    margin = "the default margin" if plan.margin is None else f"margin {plan.margin:g}"
    head = f"plan: {len(plan.arms)} arms x {len(plan.seeds)} seeds, {len(states)} runs of {plan.threads} threads, {jobs} at once"
    lines = [f"{head}: about {duration(left / jobs)} left", *lines]
    lines += [f"seeds: {', '.join(map(str, plan.seeds))}" + (f"; looks after {', '.join(map(str, plan.looks))}" if plan.looks else "")]
    lines += [f"compared: {plan.metric} ({margin}), with {plan.baseline}; declared: {', '.join(plan.family) or 'nothing'}"]
    return "\n".join([*lines, planned_power(len(plan.seeds), max(1, len(plan.family)))])


def seconds_of_run(config: Config, data: Data, model: Classifier, device: torch.device) -> float:
    """Measured on a few steps: passes over training and validation rows, and the evaluation at the end."""
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
    passes = sum(per_batch.values()) * look
    if model.head.wants_bank:
        with torch.no_grad():
            dim = model.head.embed(model.backbone(batch.x[:2])).shape[1]
        model.head.refresh(random_bank(dim, max(len(data.train), 2 * config.head.k_train), data.num_classes))
    state = TrainingState(config, model, rows, device)
    update = median_seconds(lambda: step(state, [batch]))
    if config.model.freeze_backbone:
        return START + passes + config.training.num_epochs * rows * max(update - look, update / 20)
    bank = rows * look if model.head.wants_bank else 0.0
    epoch = rows * update + per_batch.get("val", 0) * look + bank
    return START + config.training.num_epochs * epoch + passes


def median_seconds(work: Callable[[], Any]) -> float:
    work()  # the first one is slower
    times: list[float] = []
    while len(times) < 3 or (sum(times) < ENOUGH and len(times) < 50):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
