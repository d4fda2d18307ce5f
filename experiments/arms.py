"""What is compared: cells, arms, and what was declared about them before they ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.metrics import METRICS
from utils import BadOption, did_you_mean, one_of, whole_number

STATES = ("done", "running", "failed", "stopped", "stale", "pending")


@dataclass(frozen=True)
class Cell:
    """One run of a comparison. `source`: whose predictions count, "linear.calibrated"; the head's own where it is empty."""

    arm: str
    seed: int
    state: str
    run: Path | None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared: from a plan, or from finished runs.

    `arms` in the order in which they are shown; all but the baseline and the exploratory ones are the declared family.
    `margin` in the metric's unit as people say it (points of accuracy); None: the metric's own. `looks`: numbers of seeds at which a
    verdict may be made. `calibrated`: the calibrated probabilities are compared, not those as trained. `same_as`: an arm that is the same
    configuration as an earlier one, by name; it has no cells of its own. `exploratory_seeds` were added after the plan was written.
    """

    arms: tuple[str, ...]
    baseline: str
    metric: str = "accuracy"
    margin: float | None = None
    cells: tuple[Cell, ...] = ()
    exploratory: frozenset[str] = frozenset()
    exploratory_seeds: frozenset[int] = frozenset()
    looks: tuple[int, ...] = ()
    calibrated: bool = False
    same_as: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("metric", self.metric, METRICS)
        if len(self.arms) < 2 or len(set(self.arms)) < len(self.arms):
            raise BadOption("compare", "needs at least two arms, each with a name of its own", ", ".join(self.arms))
        if self.baseline not in self.arms:
            near = did_you_mean(self.baseline, self.arms)
            raise BadOption("baseline", f"must be one of the arms: {', '.join(self.arms)}{near}", self.baseline)
        if self.margin is not None and not 0 < self.margin < float("inf"):
            raise BadOption("margin", "must be above 0", self.margin)
        for look in self.looks:
            whole_number("looks", look, 2)
        if list(self.looks) != sorted(set(self.looks)):
            raise BadOption("looks", "must be numbers of seeds, each larger than the one before", ",".join(map(str, self.looks)))

    def cells_of(self, arm: str) -> tuple[Cell, ...]:
        """Those of an arm, or of the earlier arm that is the same configuration; by seed."""
        name = self.same_as.get(arm, arm)
        return tuple(sorted((c for c in self.cells if c.arm == name), key=lambda c: c.seed))

    @property
    def family(self) -> tuple[str, ...]:
        """The declared comparisons: arms that are neither the baseline nor exploratory nor another name of an arm that is in it."""
        base = self.same_as.get(self.baseline, self.baseline)
        own = [arm for arm in self.arms if arm not in self.same_as and arm != base]
        return tuple(arm for arm in own if arm not in self.exploratory)
