"""`python main.py predict`: a trained model asked about files, a line for each row, written as they come."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from run.directory import check_writable
from run.model import Model, Predictions, load
from run.reading import Row, files_in, read_csv, read_npz
from utils import BadOption, Halt, parse_whole_number, say

ABSTAIN = "abstain"
TABLES, ARRAYS = (".csv", ".tsv", ".txt"), ".npz"
SUFFIXES = (".csv", ".jsonl")


def predict(
    checkpoint: str | None,
    inputs: Sequence[str],
    output: str | None,
    confidence: str,
    K: str,
    batch_size: str | None,
    device: str,
    plugin: str | None,
) -> None:
    """All of `inputs`, one after the other, to `output` or to standard output."""
    if not checkpoint:
        raise BadOption("checkpoint", "must name the run that predicts")
    if not inputs:
        raise BadOption("input", "must name what to predict: a folder, image files, FILE.npz or FILE.csv")
    least, shown = probability_of("confidence", confidence), parse_whole_number("K", K, 0)
    size = None if batch_size is None else parse_whole_number("batch_size", batch_size, 1)
    if output and (Path(output).suffix not in SUFFIXES or Path(output).is_dir()):
        raise BadOption("output", f"must be a file that ends in {' or '.join(SUFFIXES)}", output)
    if output:
        check_writable(Path(output).parent, "output")
    model = load(checkpoint, device=device, plugin=plugin)
    rows = itertools.chain.from_iterable([opened(text, model) for text in inputs])
    count, unsure, odd = 0, 0, 0
    with written(output) as file:
        write = JsonLines(file) if output and output.endswith(".jsonl") else Table(file, model, shown)
        for found in model.stream(rows, batch_size=size, k=shown):
            lines = list(lines_of(found, least))
            write(lines)
            count, odd = count + len(lines), odd + sum("error" in line for line in lines)
            unsure += sum(line.get("prediction") == ABSTAIN for line in lines)
    parts = [f"{count:,} row{'s' * (count != 1)}"]
    parts += [f"{unsure:,} below --confidence {least:g}"] if least else []
    parts += [f"{odd:,} with an error"] if odd else []
    say(f"predict: {', '.join(parts)}" + (f"; written to {output}" if output else ""))
    if odd and odd == count:
        raise Halt("error: no row could be predicted", 1)


def opened(text: str, model: Model) -> Iterator[Row]:
    """The rows of one input. What can't be any is refused now; a row that is missing or odd is so in its place."""
    path, key = Path(text), ""
    if not path.exists() and ARRAYS + ":" in text:
        name, _, key = text.rpartition(":")
        path = Path(name)
    table = model.kind == "table"
    if path.suffix.lower() == ARRAYS:
        rows = read_npz(path, key)
    elif table and path.suffix.lower() in TABLES:
        rows = read_csv(path, model.reader)
    elif table:
        raise BadOption("input", "must be FILE.csv or FILE.npz: the model reads the rows of a table", text)
    elif path.suffix.lower() in TABLES:
        raise BadOption("input", "must be image files, a folder of them, or FILE.npz: the model reads images", text)
    else:
        rows = files_in(path)
    first = next(rows, None)  # raises here, before anything is written
    return itertools.chain([] if first is None else [first], rows)


def lines_of(found: Predictions, least: float) -> Iterator[dict[str, Any]]:
    """A record for each row."""
    near = found.neighborhood
    for n, (name, error, best) in enumerate(zip(found.inputs, found.errors, found.classes, strict=True)):
        if error is not None:
            yield {"input": name, "error": error}
            continue
        top = float(found.confidence[n])
        line: dict[str, Any] = {"input": name, "prediction": ABSTAIN if top < least else best, "class": best, "probability": short(top)}
        line["probabilities"] = [short(p) for p in found.probabilities[n].tolist()]
        if found.distances is not None:
            line["distance"] = short(float(found.distances[n]))
        if near is not None:
            line["neighbors"] = [
                {"row": row, "class": label, "weight": short(weight), "distance": short(distance)}
                | ({"file": near.files[row]} if near.files and row < len(near.files) else {})
                for row, label, weight, distance in zip(
                    near.rows[n].tolist(), near.classes[n], near.weights[n].tolist(), near.distances[n].tolist(), strict=True
                )
                if row >= 0
            ]
        yield line


def short(value: float) -> float:
    """The digits that a float32 has."""
    return float(f"{value:.7g}") if math.isfinite(value) else value


def probability_of(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise BadOption(option, "must be a number from 0 to 1", text)
    return value


# ---------------------------------------------------------------- writing


class Table:
    """CSV: a column for the probability of each class; neighbors are JSON in their cell."""

    def __init__(self, file: TextIO, model: Model, shown: int) -> None:
        self.writer, self.near = csv.writer(file), model.retriever is not None
        self.columns = ["distance"] * self.near + ["neighbors"] * (self.near and shown > 0)
        self.classes = len(model.classes)
        self.writer.writerow(["input", "prediction", "class", "probability", *self.columns, *(f"p:{c}" for c in model.classes), "error"])

    def __call__(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            start = [line.get(name, "") for name in ("input", "prediction", "class", "probability", *self.columns)]
            cells = [json.dumps(cell) if isinstance(cell, list) else cell for cell in start]
            self.writer.writerow([*cells, *line.get("probabilities", [""] * self.classes), line.get("error", "")])


class JsonLines:
    """A JSON object a line."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def __call__(self, lines: list[dict[str, Any]]) -> None:
        self.file.writelines(json.dumps(line) + "\n" for line in lines)


@contextlib.contextmanager
def written(path: str | None) -> Iterator[TextIO]:
    """A file under its real name once it is whole; standard output without a name."""
    if path is None:
        yield sys.stdout
        return
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
