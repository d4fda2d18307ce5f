"""From finished runs to verdicts: which arm is better than the baseline, how sure that is, at what price, and what would settle it."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.arms import Comparison
from experiments.metrics import METRICS, Metric
from experiments.statistics import Estimate, Settling

BETTER, WORSE, EQUIVALENT, UNDECIDED = "better", "worse", "equivalent", "undecided"
SAME, NOTHING = "same", "no result"  # another name of the baseline's configuration; no pair of runs to compare


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One arm beside the baseline. Numbers as in results.json: `difference` is arm minus baseline, whichever is better.

    `low` to `high` is the interval at `level`, which Holm's procedure gives and the verdict is read from. `seeds` are those that both
    have, `missing` those that only one has. `within_margin`: the interval lies inside the margin, also where it excludes 0.
    """

    arm: str
    baseline: str
    verdict: str
    why: str = ""
    estimate: Estimate | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    p: float | None = None
    p_holm: float | None = None
    margin: float | None = None
    within_margin: bool = False
    wins: int = 0
    ties: int = 0
    seeds: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    telling_rows: int = 0
    settling: Settling | None = None
    pairing: tuple[float, float, float] | None = None  # standard error paired over unpaired: of seeds, rows, and both
    exploratory: bool = False
    look: int | None = None
    time: float | None = None  # training time over the baseline's


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    comparison: Comparison
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def metric(self) -> Metric:
        return METRICS[self.comparison.metric]

    @property
    def open_arms(self) -> tuple[str, ...]:
        """Arms that more seeds may still decide: all others may stop at a look."""
        return tuple(v.arm for v in self.verdicts if v.verdict in (UNDECIDED, NOTHING))


def judge(comparison: Comparison) -> Verdicts:
    """Reads predictions and results of the finished cells, and compares each arm with the baseline."""
    raise NotImplementedError
