"""The parts of a run: its configuration completed and checked, its data, its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import config as flags
import dataset
import models
from classifiers import HEADS, Bank, Head
from classifiers.index import check_kind, kept
from config import Config
from experiments.folder import check_writable
from experiments.unused import frozen, projects, vote_name, votes_only, without_unused
from inputs import store
from inputs.batches import Batches
from models import cost
from train_eval import Classifier, order_in_bank
from training import checkpoint
from utils import BadOption, options_of, say, seed_everything, versions, whole_numbers

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
    if "k_train" in options_of(HEADS[config.head]) and config.k_train is None:
        config = dataclasses.replace(config, k_train=DINO_K if vote_name(config) == "softmax-cosine" else DEFAULT_K)
    check_neighbors(config, data)
    if votes_only(config) and frozen(config) and not projects(config) and "num_epochs" not in given:
        config = dataclasses.replace(config, num_epochs=1, warmup_epochs=0.0)
        say("num_epochs: 1 (a plain vote over a frozen backbone has only its prior to learn)")
    if data.val is None:
        without_validation(config, data)
    return config


def without_validation(config: Config, data: dataset.Data) -> None:
    """What needs validation rows is refused; what follows from having none is said."""
    for name, asked in {"patience": config.patience, "scheduler": config.scheduler == "plateau"}.items():
        if asked:
            raise BadOption(name, needs_validation(config, data), getattr(config, name))
    why = rounding(config, data) or f"--val_fraction {config.val_fraction}"
    say(f"validation: no rows ({why}), so the last epoch counts as the best")
    if HEADS[config.head].wants_bank and config.calibrate is None:
        fitted = "mix_lambda" in options_of(HEADS[config.head]) and config.mix_lambda is None
        say(f"calibrate: none (no validation rows{'; lambda stays at one half' if fitted else ''})")


def needs_validation(config: Config, data: dataset.Data) -> str:
    return f"needs validation rows ({rounding(config, data) or '--val_fraction above 0'})"


def rounding(config: Config, data: dataset.Data) -> str:
    """Why there are no validation rows where some were asked for."""
    return f"--val_fraction {config.val_fraction} rounds to 0 of {len(data.train)} rows, class by class" if config.val_fraction else ""


# ---------------------------------------------------------------- checks across options


DEFAULT_K, DINO_K = 16, 20  # neighbors in training, and of the votes that are compared with a head without a bank
MOST_ROWS = 100_000  # of a training split whose features are compared unasked


def compares_votes(config: Config, data: dataset.Data) -> bool:
    """Whether a head without a bank is compared with votes over its backbone's features."""
    if absent := absent_classes(data):
        say(f"votes: not compared; there is no training row of {', '.join(absent[:10])}")
        return False
    return len(data.train) <= MOST_ROWS if config.compare_votes is None else config.compare_votes


def absent_classes(data: dataset.Data) -> list[str]:
    return [data.classes[c] for c, count in enumerate(data.summary["class_counts"]) if not count]


def check_evaluation(config: Config, data: dataset.Data, device: torch.device) -> None:
    """What would fail after training is found before it."""
    if config.tta > 1 and data.kind == "table":
        raise BadOption("tta", "needs images: the rows of a table have no views", config.tta)
    if config.calibrate not in (None, "none") and data.val is None:
        raise BadOption("calibrate", needs_validation(config, data), config.calibrate)
    if config.feature_cache and config.freeze_backbone:
        check_writable(Path(config.feature_cache), "feature_cache")
    if not (HEADS[config.head].wants_bank or compares_votes(config, data)):
        for name in ("ood", "continual", "k_eval", "k_ensemble", "adaptive_k"):
            if getattr(config, name):
                raise BadOption(name, "needs a bank: a head over neighbors, or --compare_votes", getattr(config, name))
    rows = rows_in_bank(config, data)
    for name in ("k_train", "k_eval", "k_ensemble"):
        if max(whole_numbers(name, getattr(config, name)), default=1) > rows:
            raise BadOption(name, f"must be at most the number of rows in the bank ({rows})", getattr(config, name))
    if config.ood:
        if config.ood == config.dataset:
            say("ood: these are the run's own rows")
        foreign_rows(config, data, config.ood, device)


def check_neighbors(config: Config, data: dataset.Data) -> None:
    """What can only fail once there is a bank is found before anything is trained."""
    if not HEADS[config.head].wants_bank:
        return
    if absent := absent_classes(data):
        raise BadOption("head", f"{config.head} votes for classes of training rows; there is none of {', '.join(absent[:10])}")
    if config.bank_cap and config.bank_cap < data.num_classes:
        raise BadOption("bank_cap", f"must be at least the number of classes ({data.num_classes})", config.bank_cap)
    if lost := lost_classes(config, data):
        raise BadOption("bank_cap", f"keeps no row of {', '.join(lost[:10])}; --bank_evict class-balanced does", config.bank_cap)
    if votes_only(config) and vote_name(config) == "uniform" and not (config.contrastive_weight or frozen(config)):
        rule = "uniform teaches the backbone nothing: use --freeze_backbone or a --contrastive_weight above 0"
        raise BadOption("vote", rule, config.vote)
    rows, rate = rows_in_bank(config, data), config.neighbor_sample or 1.0
    if rate < 1 and config.k_train and round(rate * rows) < config.k_train + 2:  # a mixed row leaves out two
        raise BadOption("neighbor_sample", f"must leave at least k_train + 2 ({config.k_train + 2}) of the bank's {rows} rows", rate)


def rows_in_bank(config: Config, data: dataset.Data) -> int:
    return min(len(data.train), config.bank_cap or len(data.train))


def lost_classes(config: Config, data: dataset.Data) -> list[str]:
    """Classes of which a bank with a cap keeps no row."""
    if not config.bank_cap:
        return []
    labels = torch.from_numpy(data.train.y)[order_in_bank(len(data.train), config.seed)]
    stays = kept(labels, torch.arange(len(labels)), config.bank_cap, config.bank_evict or "fifo")
    counts = labels[stays].bincount(minlength=data.num_classes).tolist()
    return [name for name, count in zip(data.classes, counts, strict=True) if not count]


# ---------------------------------------------------------------- the model and its rows


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
    head = build_head(config, backbone.num_features, data.num_classes)
    if config.freeze_backbone:
        backbone.requires_grad_(False)
        if not (config.pretrained or trained or config.model == "identity"):
            say("freeze_backbone: its weights are random (no --pretrained)")
    if start := getattr(backbone, "classifier_weights", None):
        start_from(head, start)
    facts = {
        "config": dataclasses.asdict(config),
        "classes": list(data.classes),
        "shape": list(data.shape),
        "fitted": data.fitted,
        "data": data.summary,
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    return Classifier(backbone, head, data.num_classes, facts).to(device)


def build_head(config: Config, num_features: int, num_classes: int) -> Head:
    head_class = HEADS[config.head]
    known = options_of(head_class)
    options = {k: v for k, v in dataclasses.asdict(config).items() if k in known and v is not None}
    try:
        return head_class(num_features, num_classes, **options)
    except BadOption as error:
        if error.option != "embed_dim" or not config.attention_heads:
            raise
        rule = f"must be a multiple of --attention_heads ({config.attention_heads})"
        if config.embed_dim == 0:
            raise BadOption("embed_dim", f"0 leaves {num_features} features, whose number {rule}") from None
        raise BadOption("embed_dim", rule, error.value) from None


def start_from(head: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """A pretrained classifier of the same classes is the start of a linear head."""
    layer = getattr(getattr(head, "linear", head), "fc", None)
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


def foreign_rows(config: Config, data: dataset.Data, name: str, device: torch.device) -> Batches:
    """The test rows of another data set as this model reads images: normalized alike, at its size, gray as color."""
    values = {**dataclasses.asdict(config), "dataset": name, "label_noise": None, "imbalance": 1.0}
    try:
        other = load_data(values, data.fitted if data.kind == "table" else None)  # columns in the units of the run
    except BadOption as error:
        raise BadOption("ood", error.rule, error.value) from None
    if other.kind != data.kind or (data.kind == "table" and other.shape != data.shape):
        rule = f"must have rows like those of {data.name} ({data.kind} {data.shape}), not {other.kind} {other.shape}"
        raise BadOption("ood", rule, name)
    split, channels = other.test, data.shape[0]
    if data.kind == "image" and other.shape[0] != channels:
        if other.shape[0] != 1:
            rule = "must have one channel" if channels == 1 else f"must have one channel, or {channels}"
            raise BadOption("ood", f"{rule}: {data.name} has {channels}", f"{name} with {other.shape[0]}")
        split = dataset.Split(split.x.repeat(channels, 1), split.y)
    shape = input_shape(config, data)
    size = (shape[1], shape[2]) if len(shape) == 3 else None
    alike = dataclasses.replace(other, fitted=data.fitted, flip=data.flip)
    reading: dict[str, Any] = dict(batch_size=config.batch_size, noise=config.noise, seed=config.seed, workers=config.workers)
    return Batches(split, alike, device=device, size=size, **reading)


def input_shape(config: Config, data: dataset.Data) -> tuple[int, ...]:
    return (data.shape[0], config.resize, config.resize) if len(data.shape) == 3 and config.resize else data.shape


def one_row(model: Classifier, data: dataset.Data, config: Config, device: torch.device) -> float:
    """GFLOPs of one row, the search in a bank not counted. The first forward pass, before anything is written: what can't work
    fails here."""
    model.eval()
    x = torch.zeros(1, *input_shape(config, data), device=device)
    if not model.head.wants_bank or model.head.bank is not None:
        return cost.gflops(model, x)
    with torch.no_grad():
        dim = model.head.embed(model.backbone(x)).shape[1]
    check_kind("auto" if config.index is None else config.index, dim, rows_in_bank(config, data))
    rows = max(data.num_classes, 1 + max(config.k_train or 1, *ks_of(config), 1))
    model.head.refresh(stand_in(dim, rows, data.num_classes))
    gflops = cost.gflops(model, x)
    model.head.bank = None
    return gflops


def stand_in(dim: int, rows: int, num_classes: int) -> Bank:
    """A bank for measuring, not for voting."""
    bank = Bank(dim, kind="flat")
    random = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))  # its own: weights must not depend on this
    bank.add(torch.nn.functional.normalize(random), torch.arange(rows) % num_classes)
    return bank


def ks_of(config: Config) -> tuple[int, ...]:
    """Every number of neighbors that an evaluation asks for."""
    return (*whole_numbers("k_eval", config.k_eval), *whole_numbers("k_ensemble", config.k_ensemble))


def load_data(values: Mapping[str, Any], fitted: dict[str, Any] | None = None) -> dataset.Data:
    options = {k: values[k] for k in ("val_fraction", "seed", "label_noise", "imbalance") if k in values}
    ready = values.get("model") == "identity"
    return dataset.load(values.get("dataset", "digits"), values.get("data_path", "./data"), fitted=fitted, ready=ready, **options)


def with_published_normalization(config: Config, data: dataset.Data) -> dataset.Data:
    """Pretrained weights want the mean and standard deviation they were trained with: a run's own, or those that timm names."""
    if not config.pretrained or len(data.shape) != 3:
        return data
    folder = Path(config.pretrained).parent
    fitted: dict[str, Any] = {}
    if config.pretrained != "hub" and (folder / store.INDEX).exists():
        facts = store.load(folder, "none")[1]
        warn_of_seen_rows(config, facts["config"])
        fitted = facts["fitted"] if len(facts["shape"]) == 3 and facts["shape"][0] == data.shape[0] else {}
    elif config.model.startswith("timm/") and data.shape[0] == 3:
        from models.backbones import normalization

        fitted = normalization(config.model)
    return dataclasses.replace(data, fitted={**data.fitted, **fitted})


def warn_of_seen_rows(config: Config, before: Mapping[str, Any]) -> None:
    """NOTE: with another split, rows that the backbone was trained on would pick the epoch and set the confidence."""
    differ = [name for name in ("seed", "val_fraction") if getattr(config, name) != before[name]]
    if before["dataset"] == config.dataset and differ:
        as_there = " ".join(f"--{name} {before[name]}" for name in differ)
        say(f"pretrained: that run split the rows otherwise, so it has seen validation rows of this one; {as_there} gives its split")


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
    paths = {name: str(Path(given[name]).resolve()) for name in ("data_path", "plugin", "feature_cache") if given.get(name)}
    if (weights := given.get("pretrained")) and weights != "hub":
        of_run = Path(weights).is_dir()
        file = store.file_of(checkpoint.find(weights, flag="pretrained"), "model") if of_run else Path(weights)
        paths["pretrained"] = str(file.resolve())
    for name in ("dataset", "ood", "label_noise"):
        text = str(given.get(name) or "")
        prefix, colon, path = text.partition(":") if name != "label_noise" else ("", "", text)
        if (colon and prefix in dataset.PREFIXES and path) or ".npz" in path:
            paths[name] = f"{prefix}{colon}{Path(path).resolve()}"
    return {**given, **paths}


def check_same(data: dataset.Data, facts: Mapping[str, Any]) -> None:
    """The data set must fit a model that exists."""
    if len(data.shape) == 3 and len(facts["shape"]) == 1:  # the other way round, the encoder of tables says it
        raise BadOption("dataset", "has images, and the model reads the rows of a table")
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
