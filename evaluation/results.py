"""results.json: scores on top, all else under `about`. The one reader, of runs of older versions too. Loads without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCORES = ("test", "test_calibrated", "predictors", "val", "val_calibrated")
WARNINGS = "warnings"  # beside the scores: whoever reads them must not miss it
ABOUT = "about"
MOST_CONFUSED = 1000  # classes up to which confusions are counted: they grow with the square, and of 21,841 classes the text has 1.4 GB
VARIANTS = ("raw", "calibrated")
# What older versions called parts of `predictors`, and its own names among the scores.
OLDER = {"calibrate": "calibration", "voters": "scores", "lambda": "vote_share"}
OLDER_NAMES = {"mixture": "interpolation"}


def grouped(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results by their place: as they were measured or as an older run wrote them, with all names side by side, or grouped already."""
    if ABOUT in found:
        return dict(found)
    flat = {**found, **_by_one_rule(found)}
    if "votes" in flat:
        flat["predictors"] = _predictors(flat.pop("votes"))
    top = {name: flat.pop(name) for name in (*SCORES, WARNINGS) if name in flat}
    return {**top, ABOUT: flat}


def _by_one_rule(found: Mapping[str, Any]) -> dict[str, Any]:
    """`test` is as trained and `test_calibrated` is calibrated, of every head. NOTE: before there was `test_calibrated`, `test` of a head
    over neighbors was the calibrated one."""
    variants = found.get("test_variants")
    if "test_calibrated" in found or not isinstance(variants, Mapping):
        return {}
    last = {of: variants.get(f"{of}_tta", variants.get(of)) for of in VARIANTS}
    return {name: last[of] for name, of in zip(("test", "test_calibrated"), VARIANTS, strict=True) if last[of] is not None}


def _predictors(votes: Mapping[str, Any]) -> dict[str, Any]:
    named = {OLDER.get(name, name): value for name, value in votes.items()}
    return {**named, "scores": {OLDER_NAMES.get(name, name): of for name, of in named.get("scores", {}).items()}}


def parsed(content: bytes) -> dict[str, Any]:
    """Of the bytes of a file; ValueError where they are no results."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict) or not isinstance(found.get("test"), dict) or not isinstance(found.get(ABOUT, {}), dict):
        raise ValueError("it holds no scores")
    return grouped(found)


def read(path: Path) -> dict[str, Any]:
    """The results in a file; OSError or ValueError where there are none."""
    return parsed(path.read_bytes())
