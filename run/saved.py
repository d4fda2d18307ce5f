"""What a run has saved, in today's words: its configuration, its checkpoint, with what may be changed when it goes on or is tested."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import config as flags
import dataset
from classifiers import HEADS
from config import Config
from inputs import store
from inputs.indexed import INDEX, core_of, read_index, verify, verify_file
from inputs.rows import Data
from run.complete import with_defaults
from run.directory import read_marker
from training import checkpoint
from utils import BadOption, say, understood, warn

FACTS: dict[str, Any] = {"config": dict, "classes": list, "shape": list, "fitted": dict, "data": dict, "epoch": int, "threads": int}
MORE: dict[str, Any] = dict(ignored=dict, warnings=list, seconds=(int, float), training=dict, run=str, lines=list, plugin_sha256=str)


def require_facts(facts: Mapping[str, Any]) -> None:
    """NOTE: a digest finds damage, not malice. What a checkpoint says is checked like what is typed."""
    for name, kind in (FACTS | {n: k for n, k in MORE.items() if n in facts}).items():
        if not isinstance(facts.get(name), kind) or isinstance(facts[name], bool):
            raise BadOption("checkpoint", f"must say its {name} in the form that runs write")
    texts = [*facts["classes"], *facts.get("warnings", []), *facts.get("ignored", {}).values()]
    sizes = facts["shape"]
    whole = len(sizes) in (1, 3) and all(type(size) is int and 0 < size < 1 << 31 for size in sizes)
    if not whole or not all(isinstance(text, str) for text in texts) or facts["epoch"] < 0 or not math.isfinite(facts.get("seconds", 0)):
        raise BadOption("checkpoint", "must say its shape, classes and epoch in the form that runs write")
    if not (_is_fitted(facts["fitted"], sizes) and _is_reading(facts.get("reading"), len(sizes) == 1)):
        raise BadOption("checkpoint", "must say how its rows are read in the form that runs write")


def _is_fitted(fitted: Mapping[str, Any], shape: list[int]) -> bool:
    """Mean and standard deviation of each channel, or of each column of numbers; of a table also the levels of its other columns."""
    mean, std, levels = (fitted.get(name, []) for name in ("mean", "std", "levels"))
    if not all(isinstance(of, list) for of in (mean, std, levels)) or not all(map(_is_texts, levels)):
        return False
    whole = all(map(_is_number, [*mean, *std])) and all(value > 0 for value in std) and (len(shape) == 3 or "levels" in fitted)
    return whole and len(mean) == len(std) == shape[0] - sum(map(len, levels))


def _is_reading(reading: Any, table: bool) -> bool:
    """`None` of a run that is older than this entry."""
    if reading is None:
        return True
    if not isinstance(reading, dict) or not (_is_texts(reading.get("columns")) and _is_texts(reading.get("files", []))):
        return False
    return reading.get("kind") in (("table",) if table else ("image", "files")) and isinstance(reading.get("flip"), bool | None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def tell_paths(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Files that are read only because a checkpoint names them."""
    for name in ("dataset", "data_path", "label_noise", "ood", "feature_cache"):
        value = saved.get(name)
        if isinstance(value, str) and name not in given and os.sep in value and value != flags.FIELDS[name].default:
            say(f"{name}: {value} is read, as the run names it (nothing is written there)")


def saved_config(facts: Mapping[str, Any], given: Mapping[str, Any], free: frozenset[str], flag: str) -> Config:
    """The configuration in a checkpoint, with those of its options changed that may change."""
    saved = flags.of_saved_run(facts["config"])
    if strange := [name for name in saved if name not in flags.FIELDS]:
        raise BadOption(flag, f"was written by a version with other options ({', '.join(strange)})")
    flags.check(saved)
    set_then = {name: value for name, value in saved.items() if value is not None}
    if HEADS[saved["head"]].learned:  # what was left out then was --lr
        set_then.setdefault("lr_attention", saved["lr"])
    config = Config.of(with_defaults(set_then, tuple(facts["shape"]), facts["data"]), facts.get("ignored"))
    before = config.flat()
    for name, value in given.items():
        if name not in free and value != before[name]:
            raise BadOption(name, f"contradicts --{flag}, which has {before[name]}", value)
    return config.but(**{name: value for name, value in given.items() if name in free})


def check_same(data: Data, facts: Mapping[str, Any]) -> None:
    """The data set must fit a model that exists."""
    if len(data.shape) == 3 and len(facts["shape"]) == 1:  # the other way round, the encoder of tables says it
        raise BadOption("dataset", "has images, and the model reads the rows of a table")
    if data.num_classes != len(facts["classes"]):
        raise BadOption("checkpoint", f"is for {len(facts['classes'])} classes, and {data.name} has {data.num_classes}")
    if list(data.classes) != facts["classes"]:
        warn(f"classes: matched by number; the checkpoint has {facts['classes'][:3]} ..., {data.name} has {list(data.classes[:3])} ...")
    if list(data.shape) != facts["shape"] and (len(data.shape) != 3 or data.shape[0] != facts["shape"][0] or not facts["config"]["resize"]):
        raise BadOption("checkpoint", f"is for rows of shape {tuple(facts['shape'])}, and {data.name} has {data.shape}")


def run_of(checkpoint_folder: Path) -> Path:
    """The run that holds a checkpoint folder; the folder itself where it was copied out of its run."""
    return checkpoint_folder.parent.parent if checkpoint_folder.parent.name == "checkpoints" else checkpoint_folder


def own_checkpoint(path: str | Path, flag: str = "checkpoint") -> Path:
    """The checkpoint folder that a user means (`checkpoint.find`), unless it is a best that its run has not made.

    NOTE: with another run's best copied in, that one's scores would go by the name of this run."""
    source = checkpoint.find(path, flag=flag)
    if source.name == "best" and run_of(source) != source:
        last = source.with_name("last")
        with understood(flag, str(path)):
            if why := _why_another(source, last):
                way_on = "; checkpoints/last can be named" if (last / INDEX).exists() else ""
                raise BadOption(flag, f"must be the run's own, and its checkpoints/best {why}{way_on}", str(path))
    return source


def _why_another(best: Path, last: Path) -> str:
    """By what both, and the marker of the run, say of each other. What is damaged is found when it is loaded."""
    index, marker = read_index(best), read_marker(run_of(best))
    beside = read_index(last)["facts"] if (last / INDEX).exists() else {}
    run = index["facts"].get("run")
    if run is not None and run != (marker["id"] if marker else beside.get("run", run)):
        return "is that of another run"
    named = beside.get("best")
    if not named or core_of(named) == core_of(index):
        return ""
    with contextlib.suppress(BadOption):  # a kill came between the two: the files of a new best are there
        verify(best, named)
        return ""
    return "is not the one that checkpoints/last belongs to"


def weights_of_run(path: str) -> Path:
    """The file of a run's weights, by its own name: a link in its place is found when it is checked."""
    folder = own_checkpoint(path, flag="pretrained")
    return folder.resolve() / store.file_of(folder, "model").name


def facts_beside(weights: str) -> dict[str, Any] | None:
    """What the checkpoint says that a file of weights is part of, once the file is checked; None where it is part of none.

    NOTE: damaged weights, if they are finite, would train on without a word."""
    file = Path(weights)
    if not (file.parent / INDEX).exists():
        return None
    try:
        entry = next((e for e in read_index(file.parent)["files"].values() if e["file"] == file.name), None)
        if entry is None:
            return None
        verify_file(file.parent, entry)
        facts = checkpoint.load(file.parent, "none")[1]
        require_facts(facts)
    except BadOption as error:
        raise BadOption("pretrained", error.rule, weights) from None
    return facts


def with_absolute_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Files as the run will find them again, wherever it is resumed from."""
    paths = {name: str(Path(given[name]).resolve()) for name in ("data_path", "plugin", "feature_cache") if given.get(name)}
    if (weights := given.get("pretrained")) and weights != "hub":
        paths["pretrained"] = str(weights_of_run(weights) if Path(weights).is_dir() else Path(weights).resolve())
    for name in ("dataset", "ood", "label_noise"):
        text = str(given.get(name) or "")
        prefix, colon, path = text.partition(":") if name != "label_noise" else ("", "", text)
        if (colon and prefix in dataset.PREFIXES and path) or ".npz" in path:
            paths[name] = f"{prefix}{colon}{Path(path).resolve()}"
    return {**given, **paths}
