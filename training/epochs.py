"""metrics.jsonl: a line an epoch, read back with care. Loads without torch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from inputs.files import read_plain

METRICS = "metrics.jsonl"
MOST = 1 << 30  # bytes


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Epochs in metrics.jsonl. A line that a kill tore, or that is none, is left out."""
    try:
        text = read_plain(path, MOST).decode(errors="replace")
    except OSError:
        return []
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(line)
            if is_line(values):
                found.append(values)
    return found


def is_line(values: Any) -> bool:
    """Whether this is what an epoch writes, as far as others read it."""
    if not isinstance(values, dict) or type(values.get("epoch")) is not int or not isinstance(values.get("train"), dict):
        return False
    val, spread = values.get("val"), values.get("embeddings", {"cosine_between_classes": 0, "effective_rank": 0})
    scored = val is None or (isinstance(val, dict) and {"accuracy", "nll"} <= set(val))
    if not scored or not isinstance(spread, dict) or not {"cosine_between_classes", "effective_rank"} <= set(spread):
        return False
    numbers = [values.get("lr"), values.get("seconds"), *values["train"].values(), *(val or {}).values(), *spread.values()]
    return all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
