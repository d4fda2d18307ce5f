"""results.json as one row of a short table, for pandas, spreadsheets and trackers.

Scores keep their place: test, test_calibrated, predictors. What a reader sorts and filters by is under about. Everything else (all
options, versions, confusions, curves over k) stays in results.json alone.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

SCORES = ("test", "test_calibrated")
OF_PREDICTORS = ("accuracy", "nll", "ece")  # the others can be computed from predictions.safetensors
OPTIONS = ("dataset", "model", "layer", "head", "seed")
MEASURED = ("epoch", "params", "gflops", "images_per_second", "peak_memory_mb", "seconds", "threads")
Value = str | int | float | bool


def flat_results(results: Mapping[str, Any]) -> dict[str, Value]:
    """Columns by name, parts of a name by "/". A run that lacks something lacks its columns."""
    row: dict[str, Value] = {}
    for part in SCORES:
        row |= {f"{part}/{name}": value for name, value in (results.get(part) or {}).items()}
    for name, variants in ((results.get("predictors") or {}).get("scores") or {}).items():
        for variant, scores in variants.items():
            if isinstance(scores, Mapping):  # beside the variants stand accuracies on other rows
                row |= {f"predictors/{name}/{variant}/{score}": scores[score] for score in OF_PREDICTORS if score in scores}
    return row | {f"about/{name}": value for name, value in _about(results).items() if value is not None}


def _about(results: Mapping[str, Any]) -> dict[str, Value | None]:
    about = results["about"]
    config, ignored, data = (about.get(name) or {} for name in ("config", "ignored", "data"))
    found: dict[str, Value | None] = {name: config.get(name) for name in OPTIONS if name not in ignored}
    found |= {name: about.get(name) for name in MEASURED}
    found |= {f"val_{name}": (results.get("val") or {}).get(name) for name in ("accuracy", "nll")}
    found |= {f"{part}_rows": data.get(part) for part in ("train", "val", "test")}
    found["commit"] = (about.get("git") or {}).get("commit")
    found["warnings"] = len(results.get("warnings") or ())
    return found


def as_csv(row: Mapping[str, Value]) -> str:
    """A heading and a line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([row.keys(), row.values()])
    return text.getvalue()


def scores_of(row: Mapping[str, Value]) -> dict[str, float]:
    """The scores alone, which are all numbers."""
    return {name: float(value) for name, value in row.items() if not name.startswith("about/")}
