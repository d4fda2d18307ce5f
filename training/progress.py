"""A run while it runs: stopping it, following it on a terminal and on disk."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from inputs.files import append, write_atomically
from inputs.store import Owner
from ranks import here
from training.epochs import METRICS, is_line, read_lines
from utils import BadOption, Halt, Interrupted, say, shortened, warn

EVENTS = "events.out.tfevents."


class Stop:
    """SIGTERM and Ctrl-C set a flag, so that the step at hand is finished and saved; a second one stops at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.signal:
            raise Interrupted(number)
        self.signal = number
        say(f"{self.name}: finishing this step, then saving (once more stops at once)")

    def agreed(self) -> int:
        """The signal that any process has got: all stop after the same step."""
        self.signal = here().largest(self.signal)
        return self.signal

    @property
    def name(self) -> str:
        return Interrupted(self.signal).name

    @property
    def exit_code(self) -> int:
        return Interrupted(self.signal).exit_code


class Tracker:
    """Where metrics go besides metrics.jsonl. This one goes nowhere; the others have the same methods."""

    package = ""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, float], step: int) -> None:
        pass

    def results(self, results: Results) -> None:
        """Once, after the test, or of a comparison after its verdict."""

    def finish(self) -> None:
        pass

    def files(self) -> list[Path]:
        """What it has made in the run's directory."""
        return []


@dataclass(frozen=True)
class Results:
    """What a tracker is told at the end of a run: test scores by name, options that had an effect, PNG files by name, the final table.
    Of a comparison: differences by arm, what was declared, the figures of the verdict, and the verdict in words."""

    scores: Mapping[str, float]
    options: Mapping[str, Any]
    figures: Mapping[str, bytes]
    text: str


class TensorBoard(Tracker):
    package = "tensorboard"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.writer = folder, SummaryWriter(str(folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def results(self, results: Results) -> None:
        options = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in results.options.items()}
        # In the run's own folder: by default add_hparams makes one named after the time, which no run has listed.
        self.writer.add_hparams(options, dict(results.scores), run_name=".")
        for name, png in results.figures.items():
            self.writer.add_image(name, np.asarray(picture(png)), dataformats="HWC")
        self.writer.add_text("results", f"```\n{results.text}\n```")

    def finish(self) -> None:
        self.writer.close()

    def files(self) -> list[Path]:
        return list(self.folder.glob(f"{EVENTS}*.{os.getpid()}.*"))  # others may be of another program


class WandB(Tracker):
    package = "wandb"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.run = importlib.import_module(self.package).init(project="neighbor-attention", name=name_of(folder), config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        importlib.import_module(self.package).log(dict(values), step=step)

    def results(self, results: Results) -> None:
        package = importlib.import_module(self.package)
        figures = {name: package.Image(picture(png)) for name, png in results.figures.items()}
        package.log({**results.scores, **figures, "results": package.Html(f"<pre>{escape(results.text)}</pre>")})
        if hasattr(self.run, "summary"):
            self.run.summary.update(dict(results.scores))

    def finish(self) -> None:
        importlib.import_module(self.package).finish()


class Trackio(WandB):  # trackio has wandb's interface by design
    package = "trackio"


def name_of(folder: Path) -> str:
    """What a run is called beside others: its directory; of a cell, whose directory is named after its seed, comparison and arm as well."""
    parts = folder.resolve().parts
    return "/".join((parts[-4], *parts[-2:])) if len(parts) > 3 and parts[-3] == "cells" else folder.resolve().name


def picture(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


TRACKERS = {"none": Tracker, "tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


@contextlib.contextmanager
def tracked(name: str, folder: Path, config: Mapping[str, Any], owner: Owner | None = None) -> Iterator[Tracker]:
    """A tracker that is finished however the run ends. Its files are the run's own: listed as soon as it has named them."""
    tracker = TRACKERS[name](folder, config)
    if owner is not None:
        owner.claim(tracker.files())
    try:
        yield tracker
    finally:
        tracker.finish()
        with contextlib.suppress(Halt, BadOption, OSError):  # a directory that is gone; the run has said it
            if owner is not None:
                owner.claim(tracker.files())


def tell_results(tracker: Tracker, results: Results) -> None:
    with without_harm("the run has them all"):
        tracker.results(results)


@contextlib.contextmanager
def without_harm(kept: str) -> Iterator[None]:
    """NOTE: what is told is over and written: a tracker that can't be reached takes nothing from it."""
    try:
        yield
    except Exception as error:
        warn(f"tracker: the results did not reach it ({type(error).__name__}: {shortened(error, 120)}); {kept}")


def check_tracker(name: str) -> None:
    package = TRACKERS[name].package
    if package and importlib.util.find_spec(package) is None:
        raise BadOption("tracker", f"needs an optional package: pip install {package}", name)


class Log:
    """One line an epoch in metrics.jsonl and in a log; on a terminal, a bar with loss, images a second and time left."""

    def __init__(self, folder: Path, tracker: Tracker, *, epochs: int, batches: int, owner: Owner | None = None) -> None:
        self.path, self.tracker, self.epochs, self.batches, self.owner = folder / METRICS, tracker, epochs, batches, owner
        self.bar: Any = None
        self.best = ""

    def start(self, lines: list[dict[str, Any]], done: int) -> None:
        """Metrics as they stood after `done` epochs. `lines` of the checkpoint: it is saved before a line is written, so that a kill
        may have kept the file from getting the last one, or all of it."""
        known = (*read_lines(self.path), *(line for line in lines if is_line(line)))
        kept = {line["epoch"]: line for line in known if line["epoch"] <= done}
        content = "".join(json.dumps(kept[epoch]) + "\n" for epoch in sorted(kept)).encode()
        if self.owner is not None:
            self.owner.claim([self.path])
        write_atomically(self.path, content)
        if self.bar:
            self.bar.update(self.task, completed=done * self.batches)

    def __enter__(self) -> Log:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn()
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("training", total=self.epochs * self.batches)
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def step(self, epoch: int, batch: int, losses: Mapping[str, float], speed: float) -> None:
        if self.bar:
            text = f"epoch {epoch + 1}/{self.epochs}  loss {sum(losses.values()):.4f}  {speed:,.0f} img/s{self.best}"
            self.bar.update(self.task, completed=epoch * self.batches + batch, description=text)

    def epoch(self, line: Mapping[str, Any], better: bool) -> None:
        if self.owner is not None:
            self.owner.claim([self.path])  # whether the run is still there
        append(self.path, f"{json.dumps(line)}\n".encode())
        self.tracker.log(flat(line), line["epoch"])
        val = line["val"]
        accuracy = f"  val accuracy {val['accuracy']:.2%}  nll {val['nll']:.4f}" if val else ""
        if better:
            self.best = f"  best val {val['accuracy']:.2%}" if val else ""
        if not self.bar:
            terms = line["train"]
            parts = f" ({', '.join(f'{name} {value:.3f}' for name, value in terms.items())})" if len(terms) > 1 else ""
            say(
                f"epoch {line['epoch']:3d}/{self.epochs}  loss {sum(terms.values()):.4f}{parts}{accuracy}{' *' if better and val else ''}  "
                f"lr {line['lr']:.2g}  {line['images_per_second']:,.0f} img/s  {line['seconds']:.1f} s"
            )


class Silent(Log):
    """Of a process that trains with the one that writes."""

    def start(self, lines: list[dict[str, Any]], done: int) -> None: ...

    def __enter__(self) -> Silent:
        return self

    def step(self, epoch: int, batch: int, losses: Mapping[str, float], speed: float) -> None: ...

    def epoch(self, line: Mapping[str, Any], better: bool) -> None: ...


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """{"val": {"nll": 1}} as {"val/nll": 1}."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = value
    return found
