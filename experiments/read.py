"""Finished runs, read without torch: what their predictors say of the test rows, and results.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from evaluation.results import read
from experiments.metrics import Answers
from utils import BadOption, did_you_mean

PREDICTIONS, RESULTS = "predictions.safetensors", "results.json"


@dataclass(frozen=True)
class Kept:
    """Which predictions a run keeps. `sources`: NAME.raw, NAME.calibrated, ..."""

    run: Path
    own: str
    test_rows: str
    sources: tuple[str, ...]

    def source(self, asked: str, *, calibrated: bool) -> str:
        """The one that was asked for (NAME, or NAME.raw), or the head's own; averaged over views where the run did that, as in
        results.json."""
        if asked in self.sources:
            return asked
        variant, name = "calibrated" if calibrated else "raw", asked or self.own
        found = next((s for s in (f"{name}.{variant}_tta", f"{name}.{variant}") if s in self.sources), None)
        if found is None and name in {s.rpartition(".")[0] for s in self.sources}:
            how = " (--calibrate)" if calibrated else ""
            raise BadOption("compare", f"needs {variant} predictions of {name} in every run{how}, and one has none", str(self.run))
        if found is None:
            known = f"must name predictors that every run has; {self.run} has {', '.join(self.sources)}"
            raise BadOption("within", known + did_you_mean(asked, self.sources), asked)
        return found


def kept(run: Path) -> Kept:
    with _opened(run) as file:
        facts = dict(file.metadata() or {})
        names = {name.removesuffix(".largest") for name in file.keys() if name.rpartition(".")[2] not in ("classes", "label", "entropy")}  # noqa: SIM118
    try:
        order = [f"{p}.{v}" for p in json.loads(facts["predictors"]) for v in ("raw", "calibrated", "raw_tta", "calibrated_tta")]
        return Kept(run, facts["own"], facts["test_rows"], tuple(source for source in order if source in names))
    except (KeyError, TypeError, ValueError):
        raise _unreadable(run, PREDICTIONS, "no word of its predictors and test rows") from None


def answers(run: Path, source: str) -> Answers:
    """What one predictor says of the test rows; of a run that keeps the ten largest probabilities of a row, from these."""
    with _opened(run) as file:
        names = set(file.keys())
        label = np.asarray(file.get_tensor("label"), dtype=np.int64)
        if source in names:
            return _of_all(np.asarray(file.get_tensor(source), dtype=np.float64), label)
        largest = np.asarray(file.get_tensor(f"{source}.largest"), dtype=np.float64)
        classes = np.asarray(file.get_tensor(f"{source}.classes"), dtype=np.int64)
        own = np.asarray(file.get_tensor(f"{source}.label"), dtype=np.float64)
    order = np.argsort(-largest, axis=1, kind="stable")
    largest, classes = np.take_along_axis(largest, order, 1), np.take_along_axis(classes, order, 1)
    return _answers(label, classes[:, 0], largest, own, int(max(classes.max(), label.max())) + 1)


def _of_all(log_probs: np.ndarray, label: np.ndarray) -> Answers:
    own = np.take_along_axis(log_probs, label[:, None], 1)[:, 0]
    return _answers(label, log_probs.argmax(1), log_probs, own, log_probs.shape[1])


def _answers(label: np.ndarray, predicted: np.ndarray, log_probs: np.ndarray, own: np.ndarray, classes: int) -> Answers:
    probs = np.exp(log_probs)
    above, tied = (log_probs > own[:, None]).sum(1), (log_probs == own[:, None]).sum(1)
    top5 = ((min(5, classes) - above) / tied.clip(1)).clip(0, 1)
    return Answers(label, predicted, probs.max(1), own, np.square(probs).sum(1), top5, classes)


def results(run: Path) -> dict[str, Any]:
    _require_plain(run, RESULTS)
    try:
        return read(run / RESULTS)
    except OSError as error:
        raise _unreadable(run, RESULTS, error.strerror or type(error).__name__) from None
    except ValueError as error:
        raise _unreadable(run, RESULTS, "no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)) from None


def _opened(run: Path) -> Any:
    _require_plain(run, PREDICTIONS)
    try:
        return safe_open(run / PREDICTIONS, framework="numpy")
    except Exception as error:  # absent, or damaged in one of the ways that safetensors knows
        raise _unreadable(run, PREDICTIONS, type(error).__name__) from None


def _require_plain(run: Path, file: str) -> None:
    """NOTE: a run may be a stranger's, and who opens a pipe waits for ever."""
    if (run / file).exists() and not (run / file).is_file():
        raise _unreadable(run, file, "it is a pipe, a device or a directory")


def _unreadable(run: Path, file: str, why: str) -> BadOption:
    return BadOption("compare", f"needs a {file} that can be read in every run ({why})", str(run))
