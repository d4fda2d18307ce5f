"""What an arm comes to once presets and defaults are filled in: by this a run is known, whatever it is called."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import config as flags
import layers
from classifiers.classifier import Classifier
from config import Config
from experiments.grid import Arm
from inputs.rows import Data
from inputs.store import INDEX
from run.complete import complete
from run.parts import choose_device, load_data, with_published_normalization
from run.plugin import digest_of as digest_of_plugin
from run.plugin import load_plugin
from run.prepare import predictor_names
from run.run import Parts
from run.saved import with_absolute_paths
from utils import WARNINGS, BadOption, options_of, parse_parts, say

ROOT = Path(__file__).parent.parent
# What a run is made by: an edit elsewhere (pictures, comparisons, the command line) changes no number of it.
FILES = ("config.py", "dataset.py", "train_eval.py", "utils.py")
ROOMS = ("layers", "models", "classifiers", "inputs", "training", "evaluation", "run", "native")


@dataclass(frozen=True)
class Identity:
    """Digests of an arm, seed left out, and of what it is made with."""

    config: str
    data: str
    code: str
    plugin: str
    test_rows: str
    seconds: float = 0.0  # that a run takes, where it was measured
    predictors: tuple[str, ...] = ()  # that it will keep predictions of, "linear.raw", where it was built

    def made_with(self) -> dict[str, str]:
        return {"config": self.config, "data": self.data, "code": self.code, "plugin": self.plugin}


def code_digest() -> str:
    """Of all source files that a run is made by."""
    digest = hashlib.sha256()
    for name in FILES + ROOMS:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in (".py", ".c", ".h", ".cpp"))
        for file in files:
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


Measure = Callable[[Config, Data, Classifier, torch.device], float]


def resolve(
    arms: Sequence[Arm], seed: int, *, tried: frozenset[str] = frozenset(), measure: Measure | None = None, backbone: str = ""
) -> dict[str, Identity]:
    """Each arm completed, and those not `tried` before built and tried with one row: what can't work ends here, before anything runs.

    `measure` is asked how long a run of each arm that is built takes. `backbone`: digest of what gives each seed its --pretrained.
    """
    code, rows, found = code_digest(), Rows(), {}
    told: dict[str, None] = {}
    for arm in arms:
        try:
            with listened(told):
                found[arm.name] = identity_of(arm, seed, code, rows, build=arm.name not in tried, measure=measure, backbone=backbone)
        except BadOption as error:
            where = f", in arm {arm.name}" if len(arms) > 1 else ""
            raise BadOption(error.option, f"{error.rule}{where}", error.value) from None
    for line in told:
        say(line)
    return found


@contextlib.contextmanager
def listened(told: dict[str, None]) -> Iterator[None]:
    """What is said about many arms alike is said once."""
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        try:
            yield
        finally:
            told |= dict.fromkeys(heard.getvalue().splitlines())
            WARNINGS.clear()  # they are of the runs


class Rows:
    """Data sets that several arms share, loaded once."""

    def __init__(self) -> None:
        self.loaded: dict[str, Data] = {}

    def of(self, given: Mapping[str, Any]) -> Data:
        # Only the last one is kept: arms that share their rows mostly stand side by side, and several large sets would fill the memory.
        options = [name for name, topic in flags.TOPIC_OF.items() if topic == "data"]
        key = json.dumps([(n, given.get(n)) for n in (*options, "plugin")] + [given.get("model") == "identity"])
        if key not in self.loaded:
            self.loaded = {key: load_data(given)}
        return self.loaded[key]


def identity_of(arm: Arm, seed: int, code: str, rows: Rows, *, build: bool, measure: Measure | None, backbone: str) -> Identity:
    given = with_absolute_paths({**arm.flags, "seed": seed})
    load_plugin(given.get("plugin"))
    device = choose_device(given.get("device", "auto"))
    data = rows.of(given)
    config = complete(given, data)
    seconds, predictors = 0.0, tuple[str, ...]()
    if build:
        parts = Parts.of(config, with_published_normalization(config, data), device, frozenset(given))
        seconds = measure(config, parts.data, parts.model, device) if measure else 0.0
        predictors = sources(config, parts.model)
    plugin = digest_of_plugin(given["plugin"]) if given.get("plugin") else ""
    text = json.dumps(canonical(config, device.type, backbone), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Identity(digest, data.summary["sha256"], code, plugin, data.summary["test_sha256"], seconds, predictors)


def sources(config: Config, model: Classifier) -> tuple[str, ...]:
    """The predictions that a run will keep."""
    options = config.evaluation
    variants = ["raw", *["calibrated"] * (options.calibrate != "none")]
    variants += [f"{variant}_tta" for variant in variants if options.tta > 1]
    return tuple(f"{name}.{variant}" for name in predictor_names(config, model) for variant in variants)


# ---------------------------------------------------------------- one text for all that mean the same


def canonical(config: Config, device: str, backbone: str) -> dict[str, Any]:
    """The configuration without place and manner of running; files by what is in them, layers with all their options."""
    values = {name: value for name, value in config.flat().items() if name not in flags.PLACE and name != "seed"}
    values["device"] = device
    prefix, colon, _ = values["dataset"].partition(":")
    values["dataset"] = prefix if colon else values["dataset"]  # the rows have a digest of their own
    if backbone:  # the file is another one for each seed
        values["pretrained"] = backbone
    elif weights := values["pretrained"]:
        values["pretrained"] = content_of(weights)
    if "layer" not in config.ignored:
        own = {name: values.pop(name) for name in flags.LAYER_OPTIONS}
        values["layer"] = canonical_layers(values["layer"], {n: v for n, v in own.items() if v is not None})
    return values


def canonical_layers(pattern: str, shared: dict[str, Any]) -> list[tuple[str, dict[str, Any], int]]:
    """ "KvtAttention" with K = 9 and "KvtAttention(K=9)" are one layer."""
    found = []
    for call, count in parse_parts(pattern, "layer"):
        known = layers.LAYERS[call.name]
        defaults = options_of(known)
        found.append((call.name, {**defaults, **layers.pick_options(call.name, shared), **call.options}, count))
    return [(name, options, count if len(found) > 1 else 1) for name, options, count in found]


def content_of(weights: str) -> str:
    path = Path(weights)
    if not path.exists():
        return weights  # "hub"
    files = [path] if path.is_file() else [path / "checkpoints" / "best" / INDEX]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
