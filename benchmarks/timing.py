"""The one way in which `bench` measures: rivals in turn in one process, so that what else the machine does slows all of them.

A *side* is what is measured against others: it is handed a watch, and calls `lap()` where it starts and after each of its phases. A ratio
is that of a side to the base in the same round; of ratios and seconds, the median with the quartiles over the rounds is shown.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inputs.memory import give_back_memory
from layers.compiled import native
from utils import shortened

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
FEWEST = 3  # rounds, however long they take
MEGABYTE = 2**20
CPU = torch.device("cpu")


class Watch:
    """Where a side says that a phase has ended. On a GPU these are events of its stream: work there goes on after the call."""

    def __init__(self, clock: str, device: torch.device) -> None:
        self.clock, self.device = clock, device
        self.marks: list[Any] = []
        self.told: list[float] = []

    def lap(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(CLOCKS[self.clock]())

    def took(self, seconds: float) -> None:
        """What was measured elsewhere, in another process."""
        self.told.append(seconds)

    def seconds(self) -> tuple[float, ...]:
        """From the first lap to each later one."""
        if self.told:
            return tuple(self.told)
        first, *later = self.marks
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return tuple(first.elapsed_time(mark) / 1e3 for mark in later)
        return tuple(mark - first for mark in later)


Side = Callable[[Watch], None]


class Spread(NamedTuple):
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Effort:
    """Rounds end when there were so many, or when so many seconds have passed, but not before there were a few."""

    rounds: int
    seconds: float
    warm_up: int = 1
    fewest: int = FEWEST


@dataclass(frozen=True)
class Ask:
    """How a part is measured."""

    threads: int
    clock: str
    device: torch.device
    quick: bool = False
    rounds: int | None = None
    tokens: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    batch_size: int | None = None
    checkpoint: str | None = None

    def effort(self, rounds: int, seconds: float) -> Effort:
        """`rounds` and `seconds` of a full measurement; a quick one takes a fifth of both."""
        share = 5 if self.quick else 1
        return Effort(self.rounds or max(FEWEST, rounds // share), 3600.0 if self.rounds else seconds / share)


@dataclass
class Group:
    """Sides that are measured against each other."""

    part: str
    setting: str
    phases: tuple[str, ...]
    base: tuple[str, ...]  # the side that others are compared with: the fastest of these
    sides: dict[str, Side]
    effort: Effort
    device: torch.device = CPU
    facts: dict[str, Any] = field(default_factory=dict)  # what a plot needs: tokens, rows, ...
    absent: dict[str, str] = field(default_factory=dict)  # rivals that can't be measured here, and why
    notes: dict[str, str] = field(default_factory=dict)  # of a side
    apart: list[float] = field(default_factory=list)  # seconds from one core to another, after each round
    memory: bool = True
    short: bool = False  # calls of milliseconds, to which it matters what ran before


@dataclass(frozen=True)
class Line:
    """What was found of one phase of one side."""

    part: str
    setting: str
    name: str
    phase: str
    base: str
    ratio: Spread
    seconds: Spread
    rounds: int
    peak_mb: float | None
    facts: dict[str, Any]
    note: str = ""


def measured(group: Group, clock: str) -> list[Line]:
    """Sides that can't run here move to `absent`."""
    seconds = in_turn(group, clock)
    medians = {name: statistics.median(times[-1] for times in seconds[name]) for name in group.base if name in seconds}
    base = min(medians, key=lambda name: medians[name])
    lines, facts = [], dict(group.facts)
    if group.apart:
        facts["ns_between_cores"] = [round(1e9 * value) for value in Spread.of(group.apart)]
    for name, times in seconds.items():
        peak = peak_memory_mb(group, clock, group.sides[name]) if group.memory else None
        for n, phase in enumerate(group.phases[: len(times[0])]):
            own, other = [t[n] for t in times], [t[n] for t in seconds[base]]
            ratio = Spread.of([a / b for a, b in zip(own, other, strict=True)])
            note = group.notes.get(name, "")
            lines.append(
                Line(group.part, group.setting, name, phase, base, ratio, Spread.of(own), len(own), peak, facts, note),
            )
    return lines


def in_turn(group: Group, clock: str) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of each phase of each side in each round. Each round has an order of its own, so that nobody always comes after the same
    one, whose leavings in the caches would be part of every figure; where calls are short, each side runs once more just before.
    """
    names, order = warmed_up(group, clock), random.Random(0)
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in group.sides if name in names}
    started = time.perf_counter()
    for number in range(group.effort.rounds):
        if number >= group.effort.fewest and time.perf_counter() - started > group.effort.seconds:
            break
        for name in order.sample(names, len(names)):
            if group.short:
                lap_times(group, clock, group.sides[name])
            taken[name].append(lap_times(group, clock, group.sides[name]))
        if clock == "wall" and group.device == CPU and (seconds := native.distance()):
            group.apart.append(seconds)
    return taken


def warmed_up(group: Group, clock: str) -> list[str]:
    """Names of the sides that run. One that raises is named with the reason; the base has to run."""
    runs = []
    for name, side in group.sides.items():
        try:
            for _ in range(group.effort.warm_up * (3 if group.device.type == "cuda" else 1)):
                lap_times(group, clock, side)
            runs.append(name)
        except RuntimeError as error:  # out of memory, or a rival without this operation here
            if group.base == (name,):
                raise
            group.absent[name] = shortened(f"{type(error).__name__}: {error}", 100)
    return runs


def lap_times(group: Group, clock: str, side: Side) -> tuple[float, ...]:
    watch = Watch(clock, group.device)
    side(watch)
    return watch.seconds()


# ---------------------------------------------------------------- memory


def peak_memory_mb(group: Group, clock: str, side: Side) -> float | None:
    """Memory at the worst moment of one call, above what was there before; None where the system does not tell."""
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(group.device)
        held = torch.cuda.memory_allocated(group.device)
        side(Watch(clock, group.device))
        torch.cuda.synchronize(group.device)
        return (torch.cuda.max_memory_allocated(group.device) - held) / MEGABYTE
    give_back_memory()  # what is free but kept would hide what the call takes
    with suppress(OSError, IndexError, ValueError):
        before = resident_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the most so far becomes what there is now
        side(Watch(clock, group.device))
        return max(0.0, resident_mb("VmHWM") - before)
    return None


def resident_mb(field: str) -> float:
    """VmRSS is what the process has in memory now, VmHWM the most that it had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 1024
