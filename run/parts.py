"""The parts of a run, built from its configuration: device, data, model, loaders."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import dataset
import models
from classifiers import HEADS, Bank, Head
from classifiers.approximate import check_kind
from classifiers.classifier import Classifier, without_nan
from config import FIELDS, LAYER_OPTIONS, Config
from evaluation import cost
from inputs import store
from inputs.batches import AnyBatches, Batches, Sets
from inputs.downloads import no_downloads
from inputs.features import Features, Reading, digest_of
from inputs.memory import give_back_memory
from inputs.rows import Batch, Data, Split
from run.checks import rows_in_bank
from run.pairing import paired
from run.plugin import digest_of as digest_of_plugin
from run.provenance import versions
from run.reading import reading_of
from run.saved import facts_beside
from run.shared import part_of_bank
from run.sizes import check_sizes
from utils import WARNINGS, BadOption, options_of, say, seed_everything, understood, warn, whole_numbers

ALL = frozenset(FIELDS)


def choose_device(name: str) -> torch.device:
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if present[kind])
        reason = {"cuda": "a CUDA device was found", "mps": "an Apple GPU was found", "cpu": "no CUDA device found"}
        say(f"device: {name} ({reason[name]})")
    if not present[name]:
        raise BadOption("device", f"must be one that is here (no {name.upper()} device found)", name)
    return torch.device(name)


# ---------------------------------------------------------------- data


def load_data(values: Mapping[str, Any], fitted: dict[str, Any] | None = None, typed: frozenset[str] = ALL) -> Data:
    """From flags and their values. `fitted`: the statistics of an earlier run's training split. Where --data_path was not `typed` in
    this command but is a checkpoint's, it is read from, and nothing is downloaded into it."""
    options = {name: values[name] for name in options_of(dataset.load) if name in values}
    ready = values.get("model") == "identity"
    with contextlib.nullcontext() if "data_path" in typed else no_downloads():
        data = dataset.load(values.get("dataset", "digits"), values.get("data_path", "./data"), fitted=fitted, ready=ready, **options)
    give_back_memory()
    return data


def with_published_normalization(config: Config, data: Data) -> Data:
    """Pretrained weights want the mean and standard deviation they were trained with: a run's own, or those that timm names."""
    pretrained = config.model.pretrained
    if not pretrained:
        return data
    fitted: dict[str, Any] = {}
    if facts := facts_beside(pretrained) if pretrained != "hub" else None:
        with understood("pretrained", pretrained):
            warn_of_seen_rows(config, facts["config"])
            images = len(facts["shape"]) == len(data.shape) == 3
            fitted = facts["fitted"] if images and facts["shape"][0] == data.shape[0] else {}
    elif config.model.model.startswith("timm/") and data.shape[0] == 3 and len(data.shape) == 3:
        from models.backbones import normalization

        fitted = normalization(config.model.model)
    return dataclasses.replace(data, fitted={**data.fitted, **fitted})


def warn_of_seen_rows(config: Config, before: Mapping[str, Any]) -> None:
    """NOTE: with another split, rows that the backbone was trained on would pick the epoch and set the confidence, or be the test."""
    then = {"split_seed": before["seed"], "test_seed": 0, **before}
    differ = [name for name in ("test_seed", "split_seed", "val_fraction") if getattr(config.data, name) != then[name]]
    if before["dataset"] == config.data.dataset and differ:
        as_then = " ".join(f"--{name} {then[name]}" for name in differ)
        seen = "test" if "test_seed" in differ else "validation"
        warn(f"pretrained: that run split the rows otherwise, so it has seen {seen} rows of this one; {as_then} gives its split")


# ---------------------------------------------------------------- model


def build_model(config: Config, data: Data, device: torch.device, *, trained: bool = False) -> Classifier:
    """Seeds, then builds backbone and head. `trained`: its weights will come from a checkpoint, not from --pretrained."""
    check_sizes(config, data, input_shape(config, data))
    seed_everything(config.system.seed, config.system.deterministic)
    options, layers = config.model, config.layers
    spec = models.ModelSpec(
        name=options.model,
        shape=input_shape(config, data),
        num_classes=data.num_classes,
        layer=layers.layer,
        layer_options={k: v for k in LAYER_OPTIONS if (v := getattr(layers, k)) is not None},
        patch_size=options.patch_size,
        depth=options.num_layers,
        dim=options.d_hidden,
        num_heads=options.num_heads,
        d_mlp=options.d_mlp,
        dropout=options.dropout,
        attention_dropout=options.attention_dropout,
        token_dropout=options.token_dropout,
        pretrained=None if trained else options.pretrained,
    )

    def build() -> tuple[Any, Head]:
        backbone: Any = models.build(spec)
        return backbone, build_head(config, backbone.num_features, data.num_classes)

    # NOTE: a checkpoint's model draws its weights too, to be replaced; what it draws matters to nothing.
    backbone, head = paired(config.system.seed, build) if config.system.paired_init and not trained else build()
    if options.freeze_backbone:
        backbone.requires_grad_(False)
        if not (options.pretrained or trained or options.model == "identity"):
            warn("freeze_backbone: its weights are random (no --pretrained)")
    if start := getattr(backbone, "classifier_weights", None):
        start_from(head, start)
    facts = {
        "config": config.flat(),
        "ignored": dict(config.ignored),
        "classes": list(data.classes),
        "shape": list(data.shape),
        "fitted": data.fitted,
        "reading": reading_of(data),
        "data": data.summary,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        **({"plugin_sha256": digest_of_plugin(config.system.plugin)} if config.system.plugin else {}),
        "warnings": list(WARNINGS),
    }
    return Classifier(backbone, head, data.num_classes, facts, use_amp=config.system.use_amp).to(device)


def build_head(config: Config, num_features: int, num_classes: int) -> Head:
    head_class = HEADS[config.head.head]
    known = options_of(head_class)
    options = {k: v for k, v in config.flat().items() if k in known and v is not None}
    try:
        return head_class(num_features, num_classes, **options)
    except BadOption as error:
        if error.option != "embed_dim" or "attention_heads" not in known:
            raise
        rule = f"must be a multiple of --attention_heads ({config.head.attention_heads})"
        if config.head.embed_dim == 0:
            raise BadOption("embed_dim", f"0 leaves {num_features} features, whose number {rule}") from None
        raise BadOption("embed_dim", rule, error.value) from None


def start_from(head: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """A pretrained classifier of the same classes is the start of a linear head."""
    layer = getattr(getattr(head, "linear", head), "fc", None)
    if isinstance(layer, torch.nn.Linear) and layer.weight.shape == weights["weight"].shape:
        layer.load_state_dict(dict(weights))
        say("head: starts from the pretrained classifier")


def dry_run(model: Classifier, data: Data, config: Config, device: torch.device) -> float:
    """GFLOPs of one row, the search in a bank not counted. The first forward pass, before anything is written: what can't work
    fails here."""
    model.eval()
    x = torch.zeros(1, *input_shape(config, data), device=device)
    if not model.head.wants_bank or model.head.bank is not None:
        gflops = cost.gflops(model, x)
        check_probabilities(model, x)
        with torch.no_grad(), torch.random.fork_rng():  # a loss may draw, and weights and order must not depend on this
            number = torch.zeros(1, dtype=torch.long, device=device)
            model.loss(Batch(x, number, number))
        return gflops
    with torch.no_grad():
        dim = model.head.embed(model.backbone(x)).shape[1]
    check_kind(config.head.index, dim, part_of_bank(config, rows_in_bank(config, data)))
    asked = [k for name in ("k_eval", "k_ensemble") for k in whole_numbers(name, getattr(config.evaluation, name))]
    rows = max(data.num_classes, 1 + max(config.head.k_train, *asked, 1))
    model.head.refresh(random_bank(dim, rows, data.num_classes))
    gflops = cost.gflops(model, x)
    check_probabilities(model, x)
    model.head.bank = None
    return gflops


def check_probabilities(model: Classifier, x: torch.Tensor) -> None:
    """NOTE: of logits, NLL and ECE would look like numbers."""
    with torch.no_grad():
        total = model(x).double().exp().sum().item()
    if total != total and (where := first_not_finite(model.backbone, x)):
        raise BadOption("model", f"must give finite features: NaN or infinity comes first out of {where}", model.facts["config"]["model"])
    if not abs(total - 1) < 1e-3:
        head = type(model.head).__name__
        name = model.facts["config"]["head"]
        raise BadOption("head", f"must give log-probabilities: those of {head}.forward sum to {total:.4g} after exp, not to 1", name)


@torch.no_grad()
def first_not_finite(model: torch.nn.Module, x: torch.Tensor) -> str:
    """Which module makes what is no finite number out of finite ones; empty where none does."""
    found: list[str] = []

    def look(name: str, module: torch.nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if all(finite(part) for part in inputs) and not finite(output):
            found.append(f"{type(module).__name__} ({name})" if name else type(module).__name__)

    def finite(part: object) -> bool:
        return not isinstance(part, torch.Tensor) or bool(part.isfinite().all())

    hooks = [module.register_forward_hook(functools.partial(look, name)) for name, module in model.named_modules()]
    model(x)
    for hook in hooks:
        hook.remove()
    return found[0] if found else ""


def random_bank(dim: int, rows: int, num_classes: int) -> Bank:
    """A bank for measuring, not for voting."""
    bank = Bank(dim, kind="flat")
    random = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))  # its own: weights must not depend on this
    bank.add(torch.nn.functional.normalize(random), torch.arange(rows) % num_classes)
    return bank


# ---------------------------------------------------------------- loaders


def input_shape(config: Config, data: Data) -> tuple[int, ...]:
    side = config.data.resize
    return (data.shape[0], side, side) if len(data.shape) == 3 and side else data.shape


def loader(config: Config, data: Data, part: str, device: torch.device) -> Batches | None:
    """The rows of a split as this run's model reads them."""
    split = getattr(data, part)
    return None if split is None else _batches(config, data, split, device, train=part == "train")


def _batches(config: Config, data: Data, split: Split, device: torch.device, *, train: bool = False) -> Batches:
    shape = input_shape(config, data)
    return Batches(
        split,
        data,
        batch_size=config.training.batch_size,
        device=device,
        size=(shape[1], shape[2]) if len(shape) == 3 else None,
        train=train,
        augment=config.data.augment and train,
        noise=config.data.noise,
        # What happens to other rows than those trained on is the same whatever the seed: runs are compared on them.
        seed=config.system.seed if train else config.data.split_seed,
        workers=config.system.workers,
    )


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where the features of a frozen backbone are kept, and where they are looked for besides."""

    folder: Path | None = None
    also: tuple[Path, ...] = ()
    owner: store.Owner | None = None

    @staticmethod
    def of(config: Config, run: Path | None, typed: frozenset[str], owner: store.Owner | None = None) -> Kept:
        """`run` keeps what it computes once while it is written (by `owner`), else it is only read; None: these rows are not its own.

        NOTE: a folder that only a checkpoint names is read, and never written to."""
        named = config.system.feature_cache
        if named and "feature_cache" in typed:
            return Kept(Path(named))
        also = (Path(named),) if named else ()
        own = run / "features" if run is not None else None
        if owner is not None:
            return Kept(own, also, owner)
        return Kept(None, (own, *also) if own is not None else also)


def loaders(config: Config, data: Data, model: Classifier, device: torch.device, kept: Kept, as_trained: Config | None = None) -> Sets:
    """Training, validation and test rows: images or table rows or, under a frozen backbone, features computed once.

    `as_trained`: how training and validation rows are read, where a test reads its rows in another way (with noise).
    """
    features = features_of(config, model, kept) if config.model.freeze_backbone else None

    def rows(part: str) -> AnyBatches | None:
        images = loader(config if part == "test" else as_trained or config, data, part, device)
        if images is None or features is None:
            return images
        views = config.evaluation.tta if part == "test" else 1
        return features.batches(part, images, views=views, epochs=config.head.views if images.augment else 0)

    train, val, test = (rows(part) for part in ("train", "val", "test"))
    assert train is not None
    assert test is not None
    return Sets(train, val, test)


def features_at_rest(config: Config, data: Data, model: Classifier, device: torch.device) -> tuple[AnyBatches, AnyBatches | None]:
    """Training and validation rows as features of a backbone that has learned, computed once and kept in memory."""
    plain, features = config.but(augment=False), features_of(config, model, Kept())
    train, val = (loader(plain, data, part, device) for part in ("train", "val"))
    assert train is not None
    return features.batches("train", train), features.batches("val", val) if val is not None else None


def features_of(config: Config, model: Classifier, kept: Kept) -> Features:
    """The features of a frozen backbone."""

    def embed(batch: Batch) -> torch.Tensor:
        model.eval()
        return without_nan(model.features(batch))

    values = config.flat()
    # Weights don't tell these. None stands for what the model has no use for: caches that were made before must be found again.
    layer = tuple(None if n in config.ignored else values[n] for n in ("layer", "num_heads", "patch_size", *LAYER_OPTIONS))
    weights = digest_of(*(tensor for _, tensor in sorted(model.backbone.state_dict().items())))
    return Features(embed, weights, Reading(config.model.model, layer, config.system.use_amp), kept.folder, kept.also, kept.owner)


def foreign_rows(config: Config, data: Data, name: str, device: torch.device) -> Batches:
    """The test rows of another data set as this model reads images: normalized alike, at its size, gray as color."""
    values = {**config.flat(), "dataset": name, "label_noise": None, "imbalance": 1.0}
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
        split = Split(split.x.repeat(channels, 1), split.y)
    alike = dataclasses.replace(other, name=name, shape=data.shape, fitted=data.fitted, flip=data.flip)
    return _batches(config, alike, split, device)
