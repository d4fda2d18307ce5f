"""Every flag once: its name, default, help, topic and rule. The command line, YAML files and checkpoints all read this page.

Loads without torch, so that --help answers at once. A default of None means: set by the data set's preset, or by the layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils import BadOption, did_you_mean

Rule = tuple[Callable[[Any], bool], str]


def at_least(least: float) -> Rule:
    return lambda value: value >= least, f"must be at least {least}"


def above(low: float) -> Rule:
    return lambda value: value > low, f"must be above {low}"


def share(*, open_top: bool = True) -> Rule:
    """A fraction: [0, 1) by default, [0, 1] otherwise."""
    return (lambda v: 0 <= v < 1, "must be at least 0 and below 1") if open_top else (lambda v: 0 <= v <= 1, "must be between 0 and 1")


PART: Rule = (lambda v: 0 < v <= 1, "must be above 0 and at most 1")
SEED: Rule = (lambda v: 0 <= v < 2**63, "must be from 0 to 2^63 - 1")


def flag(default: Any, topic: str, text: str, *, rule: Rule | None = None, choices: Iterable[str] = (), preset: bool = False) -> Any:
    """A dataclass field that is a flag. `preset` says in the help that the default is the data set's."""
    return dataclasses.field(default=default, metadata=dict(topic=topic, help=text, rule=rule, choices=tuple(choices), preset=preset))


MODEL, LAYER, HEAD, DATA, TRAIN = "Model", "Layer options", "Neighbor heads", "Data", "Training"
EVAL, SYSTEM, OUTPUT = "Evaluation", "System", "Output"


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. What a value must satisfy stands beside it; what it must satisfy together with others is checked where it is used."""

    model: str = flag(None, MODEL, "vit, mlp (tables), identity (ready-made features), or timm/NAME for any timm model", preset=True)
    layer: str = flag("Attention", MODEL, 'NAME, "NAME(option=value)", or a pattern over depth "A*6,B(K=9)*6"')
    head: str = flag("linear", MODEL, "classifier on the features: linear, knn, attn-knn, linear+knn, linear+attn-knn")
    patch_size: int = flag(None, MODEL, "side of a patch in pixels", rule=at_least(1), preset=True)
    num_layers: int = flag(None, MODEL, "blocks", rule=at_least(1), preset=True)
    num_heads: int = flag(None, MODEL, "attention heads", rule=at_least(1), preset=True)
    d_hidden: int = flag(None, MODEL, "width of a token", rule=at_least(1), preset=True)
    d_mlp: int = flag(None, MODEL, "width inside the MLP of a block", rule=at_least(1), preset=True)
    dropout: float = flag(None, MODEL, "dropout after projections and in the MLP", rule=share(), preset=True)
    attention_dropout: float = flag(None, MODEL, "dropout on attention weights", rule=share(), preset=True)
    pretrained: str | None = flag(None, MODEL, "hub (timm/NAME's published weights), FILE.safetensors, or RUN")
    freeze_backbone: bool = flag(False, MODEL, "train the head only, on features that are computed once and kept in the run")

    K: int | None = flag(None, LAYER, "neighbors a token, or window size", rule=at_least(1))
    convolution_type: str | None = flag(
        None, LAYER, "convolution over the ranked neighbors", choices=("depthwise", "standard", "depthwise-separable")
    )
    softmax_topk_val: bool | None = flag(None, LAYER, "softmax over the K scores, or the raw scores")
    sampling_type: str | None = flag(None, LAYER, "candidates for neighbors", choices=("all", "random", "spatial", "grid"))
    num_samples: int | None = flag(None, LAYER, "how many candidates are sampled", rule=at_least(-1))
    sample_padding: int | None = flag(None, LAYER, "tokens left out at both ends by spatial sampling", rule=at_least(0))
    magnitude_type: str | None = flag(None, LAYER, "similarity of tokens", choices=("matmul", "cosine", "euclidean"))
    coordinate_encoding: bool | None = flag(None, LAYER, "append token coordinates before the neighbors are chosen")
    self_score: str | None = flag(None, LAYER, "score of a token with itself when candidates are sampled", choices=("real", "one"))
    branch_ratio: float | None = flag(None, LAYER, "share of the channels that goes through ConvNN", rule=share(open_top=False))
    kernel_size: int | None = flag(None, LAYER, "kernel of the convolution branch", rule=at_least(1))
    sparse_mode: str | None = flag(None, LAYER, "sparse pattern", choices=("all", "local", "strided"))
    sparse_context_window: int | None = flag(None, LAYER, "window or stride of the sparse pattern", rule=at_least(1))

    embed_dim: int | None = flag(None, HEAD, "size of an embedding; 0: the features (default: 256; knn: 0)", rule=at_least(0))
    vote: str = flag("softmax-cosine", HEAD, "how the neighbors of knn vote: uniform, distance, softmax-cosine")
    k_train: int | None = flag(None, HEAD, "neighbors in training (default: 16; 20 for softmax-cosine, as DINO)", rule=at_least(1))
    attention_heads: int = flag(4, HEAD, "heads of the attention over neighbors", rule=at_least(1))
    distance_bias: bool = flag(True, HEAD, "a learned function of the distance in that attention")
    neighbor_self_attention: bool = flag(False, HEAD, "neighbors read one another first")
    prototypes: bool = flag(False, HEAD, "neighbors near their class's prototype say more")
    label_bias: bool = flag(False, HEAD, "a bias by a neighbor's label")
    values: str = flag("labels", HEAD, "what a neighbor says: its label, or TabR's label + difference", choices=("labels", "tabr"))
    prior: str = flag("learned", HEAD, "share of the prior: by distance and entropy, or constant", choices=("learned", "constant"))
    mix_lambda: float | None = flag(None, HEAD, "share of the vote beside linear (default: fitted)", rule=share(open_top=False))
    index: str = flag("auto", HEAD, "FAISS index: auto, flat, ip, hnsw, ivf, ivfpq, or a factory string")
    bank_cap: int | None = flag(None, HEAD, "most rows that the bank holds", rule=at_least(1))
    bank_evict: str = flag("fifo", HEAD, "who leaves a full bank", choices=("fifo", "class-balanced"))
    memory_update_freq: float = flag(1.0, HEAD, "epochs between refreshes of the bank in training", rule=above(0))
    neighbor_sample: float = flag(1.0, HEAD, "random share of the bank that a training step sees", rule=PART)
    contrastive_weight: float = flag(0.5, HEAD, "weight of the supervised contrastive loss", rule=at_least(0))
    contrastive_form: str = flag("temperature", HEAD, "its form", choices=("temperature", "margin"))
    contrastive_temperature: float = flag(0.1, HEAD, "its temperature", rule=above(0))
    contrastive_margin: float = flag(0.5, HEAD, "its margin, a cosine", rule=(lambda v: -1 <= v <= 1, "must be between -1 and 1"))
    hard_negatives: float = flag(0.0, HEAD, "how much near rows of other classes weigh in it", rule=at_least(0))
    entropy_reg: float = flag(0.0, HEAD, "weight of keeping the attention from resting on few neighbors", rule=at_least(0))
    views: int = flag(4, HEAD, "augmented views of each row with --freeze_backbone --augment", rule=at_least(1))

    dataset: str = flag("digits", DATA, "a name, folder:PATH, npz:FILE or csv:FILE:TARGET")
    data_path: str = flag("./data", DATA, "where data sets are read from and downloaded to")
    resize: int | None = flag(None, DATA, "image side that the model sees (0: as it is)", rule=at_least(0), preset=True)
    augment: bool = flag(None, DATA, "random crops, and flips where they keep the class", preset=True)
    noise: float = flag(0.0, DATA, "standard deviation of Gaussian noise on all images (pixels in 0..1)", rule=at_least(0))
    val_fraction: float = flag(0.1, DATA, "share of the training set held out for validation", rule=share())
    label_noise: str | None = flag(None, DATA, "RATE[:symmetric|asymmetric] or FILE.npz:KEY, training split only")
    imbalance: float = flag(1.0, DATA, "long tail: rows of the last class / rows of the first", rule=PART)

    num_epochs: int = flag(None, TRAIN, "passes over the training split", rule=at_least(1), preset=True)
    batch_size: int = flag(None, TRAIN, "rows a step", rule=at_least(1), preset=True)
    optimizer: str = flag("adamw", TRAIN, "optimizer", choices=("adam", "sgd", "adamw"))
    lr: float = flag(None, TRAIN, "peak learning rate", rule=above(0), preset=True)
    lr_backbone: float | None = flag(None, TRAIN, "learning rate of the backbone (default: --lr)", rule=at_least(0))
    lr_projection: float | None = flag(None, TRAIN, "learning rate of the projection to embeddings (default: --lr)", rule=at_least(0))
    lr_attention: float | None = flag(None, TRAIN, "learning rate of the attention over neighbors (default: --lr)", rule=at_least(0))
    weight_decay: float = flag(None, TRAIN, "weight decay, on matrices only", rule=at_least(0), preset=True)
    momentum: float = flag(0.9, TRAIN, "momentum of sgd", rule=share())
    scheduler: str = flag(None, TRAIN, "learning rate over time", choices=("step", "cosine", "plateau", "none"), preset=True)
    lr_step: int = flag(20, TRAIN, "epochs between steps; epochs without progress for plateau", rule=at_least(1))
    lr_gamma: float = flag(0.1, TRAIN, "factor of a step", rule=PART)
    warmup_epochs: float = flag(None, TRAIN, "linear warm-up", rule=at_least(0), preset=True)
    criterion: str = flag("CrossEntropy", TRAIN, "loss of the linear head", choices=("CrossEntropy", "MSE"))
    label_smoothing: float = flag(0.0, TRAIN, "share of the target spread over all classes", rule=share())
    mixup_alpha: float = flag(None, TRAIN, "MixUp, Beta(a, a); 0 is off", rule=at_least(0), preset=True)
    cutmix_alpha: float = flag(0.0, TRAIN, "CutMix, Beta(a, a); 0 is off", rule=at_least(0))
    clip_grad_norm: float = flag(1.0, TRAIN, "largest gradient norm; 0 is off", rule=at_least(0))
    accumulate: int = flag(1, TRAIN, "batches an optimizer step", rule=at_least(1))
    ema_decay: float = flag(
        None, TRAIN, "average the weights over steps and evaluate the average; 0 is off", rule=share(), preset=True
    )
    patience: int = flag(0, TRAIN, "stop after so many epochs without a better validation accuracy; 0 is off", rule=at_least(0))

    k_eval: str | None = flag(None, EVAL, "neighbors in evaluation; of a list the first decides (default: --k_train)")
    k_ensemble: str | None = flag(None, EVAL, "mean of the votes of several k: 5,10,20")
    adaptive_k: bool = flag(False, EVAL, "as many neighbors as each query's attention speaks of")
    calibrate: str | None = flag(
        None, EVAL, "fit on validation rows what sets confidence (default: head; none for linear)", choices=("none", "head", "temperature")
    )
    tta: int = flag(1, EVAL, "views whose probabilities are averaged: identity, flip, random crops", rule=at_least(1))
    continual: bool = flag(False, EVAL, "also: test rows join the bank with their labels, once they were classified")
    ood: str | None = flag(None, EVAL, "a data set whose test rows should look foreign (AUROC)")
    compare_votes: bool | None = flag(None, EVAL, "votes beside a head without a bank (default: up to 100,000 training rows)")

    device: str = flag("auto", SYSTEM, "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    seed: int = flag(0, SYSTEM, "weights, order, split, augmentation and noise follow from it", rule=SEED)
    deterministic: bool = flag(False, SYSTEM, "same numbers on every run with the same thread count; errors where torch can't")
    workers: int | None = flag(None, SYSTEM, "processes that read image files (default: the cores, 8 at most)", rule=at_least(0))
    use_amp: bool = flag(False, SYSTEM, "bf16 autocast (fp16 with loss scaling on GPUs without bf16)")
    use_compiled: bool = flag(False, SYSTEM, "torch.compile the backbone")
    compile_mode: str = flag("default", SYSTEM, "mode of torch.compile", choices=("default", "reduce-overhead", "max-autotune"))
    feature_cache: str | None = flag(None, SYSTEM, "where --freeze_backbone keeps features, for many runs (default: in the run)")
    plugin: str | None = flag(None, SYSTEM, "FILE.py of your own layers, heads, models and data sets, imported first")

    output_dir: str | None = flag(None, OUTPUT, "directory of the run (default: runs/DATE-DATASET-LAYER)")
    tracker: str = flag("none", OUTPUT, "where metrics go besides metrics.jsonl", choices=("none", "tensorboard", "wandb", "trackio"))


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to do this time; not part of what a run is, so not saved with it."""

    config: str | None = flag(None, OUTPUT, "FILE.yaml of defaults (a run's config.yaml repeats it); the command line wins")
    overwrite: bool = flag(False, OUTPUT, "replace the run that --output_dir holds")
    resume: str | None = flag(None, OUTPUT, "RUN to continue as if it had never stopped")
    stop_after: int | None = flag(None, OUTPUT, "end this sitting after so many epochs in all; --resume goes on", rule=at_least(1))
    test_only: bool = flag(False, OUTPUT, "evaluate --checkpoint and stop")
    checkpoint: str | None = flag(None, OUTPUT, "RUN, or a folder in its checkpoints, for --test_only")


FIELDS = {f.name: f for owner in (Config, Action) for f in dataclasses.fields(owner)}
LAYER_OPTIONS, NEIGHBOR_OPTIONS = (
    tuple(f.name for f in dataclasses.fields(Config) if f.metadata["topic"] == topic) for topic in (LAYER, HEAD)
)
NUMBERS = ("k_eval", "k_ensemble")  # several of them; in YAML also as a list
SHARED_OPTIONS = ("dropout", "attention_dropout")  # of the model and of its layers

# What may differ between a checkpoint and its evaluation, or a run and its continuation, without changing what the run is.
PLACE = frozenset({"feature_cache", "data_path", "device", "workers", "use_compiled", "compile_mode", "tracker", "output_dir", "plugin"})
LATE = frozenset({"calibrate", "tta", "continual", "ood", "compare_votes"})  # looked at when training is over
NEIGHBORS = frozenset({"k_eval", "k_ensemble", "adaptive_k"})  # not in a resumed run: validation measures with them, and picks the epoch
FREE_IN_TEST = PLACE | LATE | NEIGHBORS | {"dataset", "batch_size", "noise", "use_amp", "deterministic"}
FREE_IN_RESUME = PLACE - {"output_dir"} | LATE | {"num_epochs", "patience", "dataset", "label_noise"}  # the rows are compared


def free_in_test(saved: Mapping[str, Any], given: Mapping[str, Any]) -> frozenset[str]:
    """With --continual also what bounds the bank that grows."""
    grows = given.get("continual", saved.get("continual"))
    return FREE_IN_TEST | {"bank_cap", "bank_evict"} if grows else FREE_IN_TEST


# ---------------------------------------------------------------- presets

_SMALL = dict(num_layers=6, num_heads=3, d_hidden=96, d_mlp=192, num_epochs=20, batch_size=128, lr=1e-3, weight_decay=0.05)
_DIGITS = dict(patch_size=2, num_layers=4, num_heads=4, d_hidden=64, d_mlp=128)
_TINY = dict(patch_size=16, resize=224, num_layers=12, num_heads=3, d_hidden=192, d_mlp=768, dropout=0.1, attention_dropout=0.1)
_PAPER = dict(num_epochs=150, batch_size=256, lr=1e-4, weight_decay=0.01, scheduler="none", warmup_epochs=0)  # arXiv 2511.14137

_PLAIN = dict(resize=0, augment=False, mixup_alpha=0.0, ema_decay=0.0, dropout=0.0, attention_dropout=0.0)
IMAGES: dict[str, Any] = dict(_PLAIN, model="vit", scheduler="cosine", warmup_epochs=2, **_SMALL)
TABLES: dict[str, Any] = dict(
    IMAGES, model="mlp", patch_size=1, num_layers=2, num_heads=1, d_hidden=128, d_mlp=256, dropout=0.1, num_epochs=40, batch_size=64
)
PRESETS: dict[str, dict[str, Any]] = {
    # 1,295 rows learn by heart: mixing and averaging, chosen on validation rows over three seeds, take a third of the errors away.
    "digits": dict(_DIGITS, num_epochs=60, batch_size=32, lr=2e-3, warmup_epochs=4, dropout=0.1, mixup_alpha=0.3, ema_decay=0.995),
    "mnist": dict(patch_size=4),
    "fashion-mnist": dict(patch_size=4),
    "cifar10": {**_TINY, **_PAPER},
    "cifar100": {**_TINY, **_PAPER},
    "imagenet": {**_TINY, **_PAPER, "num_epochs": 300, "batch_size": 1024, "lr": 1e-3, "augment": True, "warmup_epochs": 5},
    "fake": dict(num_epochs=2),
}


def patch_size_for(height: int, width: int) -> int:
    """The smallest patch that divides both sides and leaves at most 196 patches (224 gives 16), of images up to 64 x 64 at most
    64 (28 and 32 give 4); or the largest there is."""
    largest, most = math.gcd(height, width), 64 if max(height, width) <= 64 else 196
    fitting = (p for p in range(1, largest + 1) if largest % p == 0 and height * width <= most * p * p)
    return next(fitting, largest)


def resolve(given: Mapping[str, Any], *, shape: tuple[int, ...]) -> Config:
    """The whole configuration: what was given, over the data set's preset, over the defaults for its kind of rows."""
    images = len(shape) == 3
    name = given.get("dataset", "digits").partition(":")[0].partition("(")[0]
    preset = {**(IMAGES if images else TABLES), **PRESETS.get(name, {})}
    if str(given.get("model", "")).startswith("timm/"):
        preset["resize"] = None  # the model's own size, or the images' as they are: known once the model is
    values = {**preset, **given}
    if images and "patch_size" not in values:
        side = values["resize"]
        values["patch_size"] = patch_size_for(*((side, side) if side else shape[1:]))
    if "warmup_epochs" not in given:  # a preset's warm-up, but never most of a short run
        values["warmup_epochs"] = min(values["warmup_epochs"], values["num_epochs"] / 5)
    return Config(**values)


# ---------------------------------------------------------------- checks and files


def check(values: Mapping[str, Any], *owners: type) -> None:
    """Each given value against its type, choices and rule; one that fails is named."""
    known = {f.name: f for owner in owners for f in dataclasses.fields(owner)}
    for name, value in values.items():
        if name not in known:
            raise BadOption(str(name), f"is not an option{did_you_mean(str(name), known)}")
        if value is None:
            continue
        kind, meta = kind_of(known[name]), known[name].metadata
        if not (isinstance(value, kind) or (kind is float and isinstance(value, int))) or (isinstance(value, bool) and kind is not bool):
            raise BadOption(name, f"must be {_KINDS[kind]}", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadOption(name, "must be a number", value)
        if meta["choices"] and value not in meta["choices"]:
            raise BadOption(name, f"must be one of {', '.join(meta['choices'])}{did_you_mean(str(value), meta['choices'])}", value)
        if meta["rule"] and not meta["rule"][0](value):
            raise BadOption(name, meta["rule"][1], value)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@functools.cache
def _hints() -> dict[str, Any]:
    return {**typing.get_type_hints(Config), **typing.get_type_hints(Action)}


def kind_of(field: dataclasses.Field[Any]) -> type:
    """int, float, bool or str, without the None."""
    hint = _hints()[field.name]
    return next(a for a in typing.get_args(hint) if a is not type(None)) if isinstance(hint, types.UnionType) else hint


def read_yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise BadOption("config", f"must be a file that can be read ({error.strerror})", path) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise BadOption("config", "must be a YAML file", path) from None
    if not isinstance(values, dict):
        raise BadOption("config", "must hold 'option: value' lines", path)
    # YAML reads 1e-3 as text, and the 0.2 of label_noise as a number.
    try:
        values = {k: parse(k, v) if k in FIELDS else v for k, v in values.items()}
        check(values, Config)
    except BadOption as error:
        raise BadOption(error.option, f"{error.rule}, in {path}", error.value) from None
    return {k: v for k, v in values.items() if v is not None}


def parse(name: str, value: Any) -> Any:
    """A number that came as text, and the other way round."""
    kind = kind_of(FIELDS[name])
    if name in NUMBERS and isinstance(value, list):
        return ",".join(map(str, value))
    if kind is str and type(value) in (int, float):
        return str(value)
    if not isinstance(value, str) or kind not in (int, float):
        return value
    try:
        return kind(value)
    except ValueError:
        raise BadOption(name, f"must be {_KINDS[kind]}", value) from None


def to_yaml(config: Config) -> str:
    import yaml

    # Without the place it went to: the file repeats the run, beside it.
    return yaml.safe_dump({k: v for k, v in dataclasses.asdict(config).items() if k != "output_dir"}, sort_keys=False)
