"""How far the runs of a comparison are: a table on a terminal, a line a run in a log."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.cells import Place, read_note, state_of
from experiments.metrics import METRICS
from experiments.read import results as read_results
from run.directory import RESULTS
from utils import BadOption, say

COLORS = {"done": "green", "running": "cyan", "failed": "red", "stopped": "yellow", "stale": "magenta", "pending": "dim"}
MOST_ROWS = 40  # of the table, or as many as the terminal has room for; arms at work come first
WIDEST = 30  # that an arm's name is surely told to
AROUND = 8  # lines of the table besides its rows


@dataclass
class Progress:
    """What can be told from the directories alone. `jobs`: how many runs are likely to run at once. `later`: arms and seeds that joined
    the plan after it was written."""

    places: Sequence[Place]
    made_with: Mapping[str, Mapping[str, str]]
    metric: str
    jobs: int
    later: Collection[str | int] = ()
    after: Callable[[], None] = lambda: None  # called when a run has finished
    done: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    live: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(self.table(), console=Console(stderr=True), refresh_per_second=2)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.update(self.table())
            self.live.stop()

    # ------------------------------------------------------------ what Launch calls

    def line(self, text: str) -> None:
        if self.live:
            self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

    def show(self) -> None:
        if self.live:
            self.live.update(self.table())

    def finished(self, place: Place) -> None:
        results = self.results(place)
        if not results:
            return
        count = sum((p.run / RESULTS).exists() for p in self.places)
        left = f", {duration(left)} left" if (left := self.time_left()) else ""
        what = f"{shown(self.metric, results['test'])}, {duration(seconds_taken(place))}"
        self.line(f"done: {place.title}: {what} ({count} of {len(self.places)}{left})")
        self.after()

    # ------------------------------------------------------------ measured

    def results(self, place: Place) -> Mapping[str, Any]:
        if place.run not in self.done:
            try:
                self.done[place.run] = read_results(place.run)
            except BadOption:
                return {}
        return self.done[place.run]

    def seconds_of(self, arm: str) -> float | None:
        """What a run of this arm takes from beginning to end, by those that are done; of all arms, where none is."""
        done = [p for p in self.places if self.results(p)]
        times = [seconds_taken(p) for p in done if p.arm == arm] or [seconds_taken(p) for p in done]
        return statistics.median(times) if times else None

    def time_left(self) -> float | None:
        """Of all runs; None before the first is done."""
        left = 0.0
        for place in self.places:
            if not (place.run / RESULTS).exists():
                whole = self.seconds_of(place.arm)
                if whole is None:
                    return None
                left += whole * (1 - share_done(place))
        return left / min(self.jobs, len(self.places))

    # ------------------------------------------------------------ shown

    def cell(self, place: Place) -> tuple[str, str]:
        """State and what is to be said of it."""
        state = state_of(place, self.made_with[place.arm])
        if state in ("done", "stale") and (results := self.results(place)):
            return state, shown(self.metric, results["test"]).removeprefix(f"{self.metric.replace('_', ' ')} ")
        if state != "running":
            return state, state
        line, epochs = last_epoch(place), epochs_of(place)
        score = f" val {line['val']['accuracy']:.1%}" if line.get("val") else ""
        whole = self.seconds_of(place.arm) or (line["seconds"] / line["epoch"] * epochs if line and epochs else None)
        left = f" {duration(whole * (1 - share_done(place)))}" if whole else ""
        return state, f"{line.get('epoch', 0)}/{epochs or '?'}{score}{left}"

    def marked(self, text: str, name: str | int) -> str:
        return f"{text} (exploratory)" if name in self.later else text

    def table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        seeds, arms = list(dict.fromkeys(p.seed for p in self.places)), list(dict.fromkeys(p.arm for p in self.places))
        cells = {(p.arm, p.seed): self.cell(p) for p in self.places}
        most = min(MOST_ROWS, self.live.console.height - AROUND) if self.live else MOST_ROWS
        at_work = [arm for arm in arms if {cells[arm, s][0] for s in seeds if (arm, s) in cells} - {"done", "pending"}]
        told = sorted([*at_work, *(arm for arm in arms if arm not in at_work)][:most], key=arms.index)
        left = self.time_left()
        count = sum(state == "done" for state, _ in cells.values())
        metric = self.metric.replace("_", " ")
        title = f"{count} of {len(cells)} runs done{f', {duration(left)} left' if left else ''}; {metric} of the test rows"
        table = Table(title=title, title_justify="left")
        table.add_column("arm", min_width=min(WIDEST, max(map(len, arms))), no_wrap=True)
        for seed in seeds:
            table.add_column(self.marked(f"seed {seed}", seed))
        for arm in told:
            states = [cells.get((arm, seed), ("pending", "")) for seed in seeds]
            table.add_row(Text(self.marked(arm, arm)), *(Text(text, style=COLORS[state]) for state, text in states))
        return table


def seconds_taken(place: Place) -> float:
    return float(read_note(place).get("seconds", 0.0))


def shown(metric: str, scores: Mapping[str, float]) -> str:
    value = scores.get(metric)
    if value is None:
        return "done"
    scale = METRICS[metric].scale
    return f"{metric.replace('_', ' ')} {value * scale:.2f}" if scale != 1 else f"{metric.replace('_', ' ')} {value:.4f}"


def last_epoch(place: Place) -> Mapping[str, Any]:
    """The last line of metrics.jsonl."""
    try:
        with (place.run / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            return dict(json.loads(file.read().splitlines()[-1]))
    except (OSError, ValueError, IndexError):
        return {}


def epochs_of(place: Place) -> int:
    try:
        found = re.search(r"^num_epochs: (\d+)$", (place.run / "config.yaml").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def share_done(place: Place) -> float:
    """Of a run's epochs."""
    line, epochs = last_epoch(place), epochs_of(place)
    return min(1.0, line["epoch"] / epochs) if line and epochs else 0.0


def duration(seconds: float) -> str:
    """ "1 h 05 min", "4 min 10 s", "12 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
