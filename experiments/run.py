"""One run: from flags to a directory with trustworthy numbers; begun, resumed, or evaluated again."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import checkpoint
import config as flags
import dataset
import models
from batches import Batches
from classifiers import HEADS
from config import Config
from experiments import reporting
from experiments.folder import RESULTS, check_output, check_writable, locked, new_folder
from experiments.plugin import load_plugin
from models import cost
from progress import TRACKERS, Log, check_tracker
from train_eval import Classifier, Diverged, Stopped, evaluate, train
from utils import BadOption, Halt, git_state, keep_memory, options_of, say, seed_everything, versions, write_atomically


def run(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """What `python main.py` does: test, resume, or begin. `given` holds what was asked for; the rest follows from the data set."""
    if action.config:
        given = {**flags.read_yaml(action.config), **given}
    flags.check(given, Config)
    flags.check({k: v for k, v in vars(action).items() if v is not None}, flags.Action)
    load_plugin(given.get("plugin"))
    keep_memory()
    if action.test_only:
        return test(given, action)
    if action.checkpoint:
        rule = "goes with --test_only (--resume RUN continues a run, --pretrained FILE starts from weights)"
        raise BadOption("checkpoint", rule, action.checkpoint)
    return resume(given, action) if action.resume else begin(given, action)


# ---------------------------------------------------------------- begin, resume, test


def begin(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    given = with_absolute_paths(given)
    device = choose_device(given.get("device", "auto"))
    check_tracker(given.get("tracker", "none"))
    if given.get("output_dir"):
        check_output(Path(given["output_dir"]), action.overwrite)
    data = load_data(given)
    config = complete(given, data)
    data = with_published_normalization(config, data)
    model = build(config, data, device)
    size = one_row(model, data, config, device)
    with new_folder(config, action.overwrite) as folder:
        (folder / "config.yaml").write_text(flags.to_yaml(config))
        (folder / "args.txt").write_text(shlex.join(["python", *sys.argv]) + "\n")
        (folder / "model.txt").write_text(f"{model}\n")
        say(reporting.describe(config, data, model))
        return finish(config, data, model, folder, device, size, action)


def resume(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    folder = Path(str(action.resume))
    last = folder / "checkpoints" / "last"
    if not (last / checkpoint.INDEX).exists():
        raise BadOption("resume", f"must be a run that holds {last.relative_to(folder)}/{checkpoint.INDEX}", str(folder))
    try:
        _, facts = checkpoint.load(last)  # all of it: what is damaged is found before anything is done
    except BadOption as error:
        raise BadOption("resume", error.rule, error.value) from None
    config = merge(facts["config"], given, flags.FREE_IN_RESUME, "resume")
    load_plugin(config.plugin)
    check_tracker(config.tracker)
    done = facts["epoch"]
    more = config.num_epochs > facts["config"]["num_epochs"] or config.patience > facts["config"]["patience"]
    if (folder / RESULTS).exists() and not more:
        raise BadOption("resume", f"names a finished run; to train on, raise --num_epochs above {config.num_epochs}", str(folder))
    if config.num_epochs < done:
        raise BadOption("num_epochs", f"must be at least the {done} epochs that the run has", config.num_epochs)
    device = choose_device(config.device)
    if facts["threads"] != torch.get_num_threads():
        say(f"threads: {torch.get_num_threads()}, the run had {facts['threads']}; the numbers will differ in their last digits")
    data = load_data(dataclasses.asdict(config), facts["fitted"])
    if data.facts != facts["data"]:
        raise BadOption("resume", "needs the rows that the run was trained on, and the data set has changed since", str(folder))
    model = build(config, data, device, trained=True)
    size = one_row(model, data, config, device)
    with locked(folder):
        if (folder / RESULTS).exists():  # a run without results did not finish: it goes on, so the old ones get another name
            os.replace(folder / RESULTS, folder / f"results-epoch{done}.json")
        write_atomically(folder / "config.yaml", flags.to_yaml(config).encode())
        with (folder / "args.txt").open("a") as file:
            file.write(shlex.join(["python", *sys.argv]) + "\n")
        say(f"resume: {folder}, {done} of {config.num_epochs} epochs done")
        return finish(config, data, model, folder, device, size, action, start=done)


def test(given: Mapping[str, Any], action: flags.Action) -> dict[str, Any]:
    """Rebuilds a model from its checkpoint's own configuration, evaluates it, writes results.json beside it."""
    if not action.checkpoint:
        raise BadOption("test_only", "needs --checkpoint RUN")
    source = checkpoint.find(action.checkpoint)
    where = Path(given.get("output_dir") or source)  # never a run's own results: those are of what it was trained for
    check_writable(where)
    config, data, model, device, facts = rebuild(action.checkpoint, given)
    size = one_row(model, data, config, device)
    say(f"checkpoint: {source}, epoch {facts['epoch']}")
    results = measure(config, data, model, device, size, epoch=facts["epoch"], seconds=facts.get("seconds", 0.0), val=None)
    where.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(where / RESULTS, results)
    print(reporting.table(results, where / RESULTS))
    return results


class Rebuilt(NamedTuple):
    """A finished or stopped run, ready to be looked at."""

    config: Config
    data: dataset.Data
    model: Classifier
    device: torch.device
    facts: dict[str, Any]


def rebuild(path: str, given: Mapping[str, Any]) -> Rebuilt:
    """The evaluated model of a run, a checkpoint folder or a file in it; `given` changes only what may change in a test."""
    tensors, facts = checkpoint.load(checkpoint.find(path), "model", "ema")
    config = merge(facts["config"], given, flags.FREE_IN_TEST, "checkpoint")
    load_plugin(config.plugin)
    device = choose_device(config.device)
    data = load_data(dataclasses.asdict(config), facts["fitted"])
    check_same(data, facts)
    model = build(config, data, device, trained=True)
    try:
        model.load_state_dict(tensors.get("ema", tensors["model"]))
    except RuntimeError as error:  # a plugin that was edited since
        reason = " ".join(str(error).split())[:120]
        raise BadOption("checkpoint", f"does not fit the model that its configuration builds ({reason})", path) from None
    return Rebuilt(config, data, model, device, facts)


def finish(
    config: Config,
    data: dataset.Data,
    model: Classifier,
    folder: Path,
    device: torch.device,
    size: float,
    action: flags.Action,
    start: int = 0,
) -> dict[str, Any]:
    """Trains, tests the best epoch once, writes results.json last."""
    train_set, val_set = batches(config, data, "train", device), batches(config, data, "val", device)
    assert train_set is not None
    tracker = TRACKERS[config.tracker](folder, dataclasses.asdict(config))
    log = Log(folder, tracker, epochs=config.num_epochs, batches=len(train_set), start=start)
    until = min(config.num_epochs, action.stop_after or config.num_epochs)
    again = f"resume with: python main.py --resume {shlex.quote(str(folder))}"
    try:
        place = train(config, model, train_set, val_set, log=log, run=folder, until=until, resume=action.resume is not None)
    except Stopped as stop:
        raise Stopped(f"{stop}; saved. {again}", stop.exit_code) from None
    except Diverged as error:
        last = folder / "checkpoints" / "last"
        kept = f"the last good checkpoint is {last}" if last.exists() else "no epoch was finished, so there is no checkpoint"
        raise Diverged(f"error: {error}; {kept}", 1) from None
    except OSError as error:  # a full disk, a drive that went away: what was saved before is whole
        raise Halt(f"error: {folder} can't be written ({error.strerror or error}). {again}", 1) from None
    if place.epoch < config.num_epochs:
        say(f"patience: no better validation accuracy in {place.stale} epochs, stopped after epoch {place.epoch}")
    tensors, _ = checkpoint.load(folder / "checkpoints" / "best", "model")
    model.load_state_dict(tensors["model"])
    results = measure(config, data, model, device, size, epoch=place.best_epoch, seconds=place.seconds, val=place.best)
    table = reporting.table(results, folder)
    reporting.write_epochs(folder, table)
    checkpoint.write_json(folder / RESULTS, results)
    print(table)
    return results


# ---------------------------------------------------------------- parts of a run


def complete(given: Mapping[str, Any], data: dataset.Data) -> Config:
    """The configuration with nothing left open, and checked across options."""
    config = flags.resolve(given, shape=data.shape)
    if config.resize is None:
        from models.backbones import default_size

        config = dataclasses.replace(config, resize=default_size(config.model))
        if config.resize:
            say(f"resize: {config.resize} (the input size of {config.model})")
    config = without_unused(config, given, data)
    if data.val is None:
        if config.patience:
            raise BadOption("patience", "needs validation rows (--val_fraction above 0)", config.patience)
        if config.scheduler == "plateau":
            raise BadOption("scheduler", "needs validation rows (--val_fraction above 0)", config.scheduler)
        say(f"validation: no rows (--val_fraction {config.val_fraction}), so the last epoch counts as the best")
    return config


SIZES = ("patch_size", "num_layers", "num_heads", "d_hidden", "d_mlp")  # a timm model has its own


def without_unused(config: Config, given: Mapping[str, Any], data: dataset.Data) -> Config:
    """Options that this model or these rows do not use are unset, so that no record claims them, and named if they were asked for."""
    off: dict[str, Any] = dict.fromkeys(SIZES) if config.model.startswith("timm/") else {}
    if data.kind == "table":
        off |= {"noise": 0.0, "augment": False, "resize": 0, "cutmix_alpha": 0.0}
    if config.model == "mlp":
        off |= dict.fromkeys(("layer", "patch_size", "num_heads", "attention_dropout", *flags.LAYER_OPTIONS))
    if named := [f"--{name}" for name in off if name in given and given[name] != off[name]]:
        say(f"unused by {config.model} on {data.kind} rows: {', '.join(named)}")
    return dataclasses.replace(config, **off)


def build(config: Config, data: dataset.Data, device: torch.device, *, trained: bool = False) -> Classifier:
    """Seeds, then builds backbone and head. `trained`: its weights will come from a checkpoint, not from --pretrained."""
    seed_everything(config.seed, config.deterministic)
    chosen: dict[str, Any] = dict(
        layer=config.layer,
        patch_size=config.patch_size,
        depth=config.num_layers,
        dim=config.d_hidden,
        num_heads=config.num_heads,
        d_mlp=config.d_mlp,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        pretrained=None if trained else config.pretrained,
    )
    spec = models.ModelSpec(
        name=config.model,
        shape=input_shape(config, data),
        num_classes=data.num_classes,
        layer_options={k: v for k in flags.LAYER_OPTIONS if (v := getattr(config, k)) is not None},
        **{k: v for k, v in chosen.items() if v is not None},
    )
    backbone: Any = models.build(spec)
    head_class = HEADS[config.head]
    known = options_of(head_class)
    options = {k: v for k, v in dataclasses.asdict(config).items() if k in known}
    head = head_class(backbone.num_features, data.num_classes, **options)
    if start := getattr(backbone, "classifier_weights", None):
        start_from(head, start)
    facts = {
        "config": dataclasses.asdict(config),
        "classes": list(data.classes),
        "shape": list(data.shape),
        "fitted": data.fitted,
        "data": data.facts,
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    return Classifier(backbone, head, data.num_classes, facts).to(device)


def start_from(head: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """A pretrained classifier of the same classes is the start of a linear head."""
    layer = getattr(head, "fc", None)
    if isinstance(layer, torch.nn.Linear) and layer.weight.shape == weights["weight"].shape:
        layer.load_state_dict(dict(weights))
        say("head: starts from the pretrained classifier")


def batches(config: Config, data: dataset.Data, part: str, device: torch.device) -> Batches | None:
    split = getattr(data, part)
    if split is None:
        return None
    shape = input_shape(config, data)
    train = part == "train"
    return Batches(
        split,
        data,
        batch_size=config.batch_size,
        device=device,
        size=(shape[1], shape[2]) if len(shape) == 3 else None,
        train=train,
        augment=config.augment and train,
        noise=config.noise,
        seed=config.seed,
        workers=config.workers,
    )


def input_shape(config: Config, data: dataset.Data) -> tuple[int, ...]:
    return (data.shape[0], config.resize, config.resize) if len(data.shape) == 3 and config.resize else data.shape


def one_row(model: Classifier, data: dataset.Data, config: Config, device: torch.device) -> float:
    """GFLOPs of one row. The first forward pass, before anything is written: what can't work fails here."""
    model.eval()
    return cost.gflops(model, torch.zeros(1, *input_shape(config, data), device=device))


def measure(
    config: Config,
    data: dataset.Data,
    model: Classifier,
    device: torch.device,
    size: float,
    *,
    epoch: int,
    seconds: float,
    val: dict[str, float] | None,
) -> dict[str, Any]:
    """What results.json holds. The test split is looked at here, once."""
    if val is None and (val_set := batches(config, data, "val", device)):
        val = evaluate(model, val_set, config.use_amp)
    test_set = batches(config, data, "test", device)
    assert test_set is not None
    scores = evaluate(model, test_set, config.use_amp)
    return {
        "test": scores,
        "val": val,
        "epoch": epoch,
        "params": cost.parameters(model),
        "gflops": size,
        "images_per_second": cost.rows_per_second(model, next(test_set.epoch()).x),
        "peak_memory_mb": cost.peak_memory_mb(device),
        "seconds": seconds,
        "data": data.facts,
        "config": dataclasses.asdict(config),
        "versions": versions(),
        "git": git_state(),
        "threads": torch.get_num_threads(),
    }


def load_data(values: Mapping[str, Any], fitted: dict[str, Any] | None = None) -> dataset.Data:
    options = {k: values[k] for k in ("val_fraction", "seed", "label_noise", "imbalance") if k in values}
    return dataset.load(values.get("dataset", "digits"), values.get("data_path", "./data"), fitted=fitted, **options)


def with_published_normalization(config: Config, data: dataset.Data) -> dataset.Data:
    """Pretrained timm weights want the mean and standard deviation they were trained with."""
    if not (config.pretrained and config.model.startswith("timm/") and len(data.shape) == 3 and data.shape[0] == 3):
        return data
    from models.backbones import normalization

    return dataclasses.replace(data, fitted={**data.fitted, **normalization(config.model)})


def merge(saved: dict[str, Any], given: Mapping[str, Any], free: frozenset[str], flag: str) -> Config:
    """A saved configuration with those of its options changed that may change."""
    if strange := [name for name in saved if name not in flags.FIELDS]:
        raise BadOption(flag, f"was written by a version with other options ({', '.join(strange)})")
    config = Config(**saved)  # an option newer than the checkpoint has its default
    for name, value in given.items():
        if name not in free and value != getattr(config, name):
            raise BadOption(name, f"contradicts --{flag}, which has {getattr(config, name)}", value)
    return dataclasses.replace(config, **{k: v for k, v in given.items() if k in free})


def with_absolute_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Files as the run will find them again, wherever it is resumed from."""
    paths = {name: str(Path(given[name]).resolve()) for name in ("data_path", "plugin") if given.get(name)}
    for name in ("dataset", "label_noise"):
        prefix, colon, path = str(given.get(name) or "").partition(":") if name == "dataset" else ("", "", str(given.get(name) or ""))
        if (colon and prefix in dataset.PREFIXES and path) or ".npz" in path:
            paths[name] = f"{prefix}{colon}{Path(path).resolve()}"
    return {**given, **paths}


def check_same(data: dataset.Data, facts: Mapping[str, Any]) -> None:
    """The data set must fit a model that exists."""
    if data.num_classes != len(facts["classes"]):
        raise BadOption("checkpoint", f"is for {len(facts['classes'])} classes, and {data.name} has {data.num_classes}")
    if list(data.classes) != facts["classes"]:
        say(f"classes: matched by number; the checkpoint has {facts['classes'][:3]} ..., {data.name} has {list(data.classes[:3])} ...")
    if list(data.shape) != facts["shape"] and (len(data.shape) != 3 or data.shape[0] != facts["shape"][0] or not facts["config"]["resize"]):
        raise BadOption("checkpoint", f"is for rows of shape {tuple(facts['shape'])}, and {data.name} has {data.shape}")


def choose_device(name: str) -> torch.device:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
        reason = {"cuda": "a CUDA device was found", "mps": "an Apple GPU was found", "cpu": "no CUDA device found"}
        say(f"device: {name} ({reason[name]})")
    if not there[name]:
        raise BadOption("device", f"must be one that is here (no {name.upper()} device found)", name)
    return torch.device(name)
