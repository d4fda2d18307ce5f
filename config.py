"""Every flag once: its name, default, help and rule, grouped by topic. The command line, YAML files and checkpoints all read this page.

Loads without torch, so that --help answers at once. A `Config` is complete: every field holds a value of its type. What a preset of
the data set or the run itself sets (`preset`, `later`) has no default here: run/complete.py fills it in.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from utils import BadOption, did_you_mean

Rule = tuple[Callable[[Any], bool], str]


def at_least(least: float) -> Rule:
    return lambda value: value >= least, f"must be at least {least}"


def above(low: float) -> Rule:
    return lambda value: value > low, f"must be above {low}"


# All test rows are embedded once a view, and kept: with a zero too many, that would go on for days.
VIEWS: Rule = (lambda value: 1 <= value <= 1000, "must be from 1 to 1000")


def fraction(*, to_1: bool = False) -> Rule:
    """[0, 1) by default, [0, 1] with `to_1`."""
    return (lambda v: 0 <= v <= 1, "must be between 0 and 1") if to_1 else (lambda v: 0 <= v < 1, "must be at least 0 and below 1")


PART: Rule = (lambda v: 0 < v <= 1, "must be above 0 and at most 1")
WORKERS: Rule = (lambda v: 0 <= v <= 1024, "must be from 0 to 1024")  # with a zero too many, the machine would do nothing but fork
SEED: Rule = (lambda v: 0 <= v < 2**63, "must be from 0 to 2^63 - 1")


def flag(default: Any, text: str, *, rule: Rule | None = None, choices: Iterable[str] = (), preset: bool = False) -> Any:
    """A field that is a flag."""
    return dataclasses.field(default=default, metadata=dict(help=text, rule=rule, choices=tuple(choices), preset=preset))


def preset(text: str, *, rule: Rule | None = None, choices: Iterable[str] = ()) -> Any:
    """A flag whose default is the data set's; the help says so."""
    return flag(MISSING, text, rule=rule, choices=choices, preset=True)


def later(text: str, *, rule: Rule | None = None) -> Any:
    """A flag whose default follows from other flags and from the rows."""
    return flag(MISSING, text, rule=rule)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: str = preset("vit, mlp (tables), identity (ready-made features), or timm/NAME for any timm model")
    patch_size: int = preset("side of a patch in pixels", rule=at_least(1))
    num_layers: int = preset("blocks", rule=at_least(1))
    num_heads: int = preset("attention heads", rule=at_least(1))
    d_hidden: int = preset("width of a token", rule=at_least(1))
    d_mlp: int = preset("width inside the MLP of a block", rule=at_least(1))
    dropout: float = preset("dropout after projections and in the MLP", rule=fraction())
    attention_dropout: float = preset("dropout on attention weights", rule=fraction())
    token_dropout: float = flag(0.0, "share of the patches that each training step leaves out, others for each image", rule=fraction())
    pretrained: str | None = flag(None, "hub (timm/NAME's published weights), FILE.safetensors, or RUN")
    freeze_backbone: bool = flag(False, "train the head only, on features that are computed once and kept in the run")


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """None leaves an option to the layer."""

    layer: str = flag("Attention", 'NAME, "NAME(option=value)", or a pattern over depth "A*6,B(K=9)*6"')
    K: int | None = flag(None, "neighbors a token, or window size", rule=at_least(1))
    convolution_type: str | None = flag(
        None, "convolution over the ranked neighbors", choices=("depthwise", "standard", "depthwise-separable")
    )
    softmax_topk_val: bool | None = flag(None, "softmax over the K scores, or the raw scores")
    sampling_type: str | None = flag(None, "candidates for neighbors", choices=("all", "random", "spatial", "grid"))
    num_samples: int | None = flag(None, "how many candidates are sampled", rule=at_least(-1))
    sample_padding: int | None = flag(None, "tokens left out at both ends by spatial sampling", rule=at_least(0))
    magnitude_type: str | None = flag(None, "similarity of tokens", choices=("matmul", "cosine", "euclidean"))
    coordinate_encoding: bool | None = flag(None, "append token coordinates before the neighbors are chosen")
    self_score: str | None = flag(None, "score of a token with itself when candidates are sampled", choices=("real", "one"))
    branch_ratio: float | None = flag(None, "part of the channels that goes through ConvNN", rule=fraction(to_1=True))
    kernel_size: int | None = flag(None, "kernel of the convolution branch", rule=at_least(1))
    sparse_mode: str | None = flag(None, "sparse pattern", choices=("all", "local", "strided"))
    sparse_context_window: int | None = flag(None, "window or stride of the sparse pattern", rule=at_least(1))


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    head: str = flag("linear", "classifier on the features: linear, knn, attn-knn, linear+knn, linear+attn-knn")
    embed_dim: int | None = flag(None, "size of an embedding; 0: the features (default: 256; knn: 0)", rule=at_least(0))
    standardize: bool = later("features to mean 0, variance 1 before they are embedded (default: where something is learned from it)")
    vote: str = flag("softmax-cosine", "how the neighbors of knn vote: uniform, distance, softmax-cosine")
    k_train: int = later("neighbors in training (default: 16; 20 for softmax-cosine, as DINO)", rule=at_least(1))
    attention_heads: int = flag(4, "heads of the attention over neighbors", rule=at_least(1))
    distance_bias: bool = flag(True, "a learned function of the distance in that attention")
    neighbor_self_attention: bool = flag(False, "attention among the neighbors first")
    prototypes: bool = flag(False, "neighbors near the prototype of their class weigh more")
    label_bias: bool = flag(False, "a bias by a neighbor's label")
    values: str = flag("labels", "what a neighbor contributes: its label, or TabR's label + difference", choices=("labels", "tabr"))
    prior: str = flag("learned", "share of the prior in the vote: by distance and entropy, or constant", choices=("learned", "constant"))
    interpolation: float | None = flag(None, "share of the vote, linear has the rest (default: fitted)", rule=fraction(to_1=True))
    index: str = flag("auto", "FAISS index: auto, flat, ip, hnsw, ivf, ivfpq, or a factory string")
    recall: float = flag(0.99, "share of the neighbors that an approximate index must find (of 500; less 2 standard errors)", rule=PART)
    bank_cap: int | None = flag(None, "most rows that the bank holds", rule=at_least(1))
    bank_evict: str = flag("fifo", "which rows leave a full bank", choices=("fifo", "class-balanced"))
    shard_bank: bool = flag(
        False, "of several processes each keeps its part of the bank only: 1/n of the memory, messages in each search (torchrun)"
    )
    memory_update_freq: float = flag(
        1.0, "epochs between refreshes of the bank in training", rule=(lambda v: 1e-6 <= v <= 1e6, "must be from 1e-6 to 1e6")
    )
    neighbor_sample: float = flag(1.0, "random part of the bank that a training step sees", rule=PART)
    contrastive_weight: float = flag(0.5, "weight of the supervised contrastive loss", rule=at_least(0))
    contrastive_form: str = flag("temperature", "its form", choices=("temperature", "margin"))
    contrastive_temperature: float = flag(0.1, "its temperature", rule=above(0))
    contrastive_margin: float = flag(0.5, "its margin, a cosine", rule=(lambda v: -1 <= v <= 1, "must be between -1 and 1"))
    hard_negatives: float = flag(0.0, "how much near rows of other classes weigh in it", rule=at_least(0))
    proxy_weight: float = later(
        "weight of a cross-entropy over a learned vector a class (default: 3 for timm from scratch, or 0)", rule=at_least(0)
    )
    entropy_reg: float = flag(0.0, "weight of keeping the attention from resting on few neighbors", rule=at_least(0))
    views: int = flag(4, "augmented views of each row with --freeze_backbone --augment", rule=at_least(1))


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    dataset: str = flag("digits", "a name, folder:PATH, npz:FILE or csv:FILE:TARGET")
    data_path: str = flag("./data", "where data sets are read from and downloaded to")
    resize: int = preset("image side that the model sees (0: as it is)", rule=at_least(0))
    augment: bool = preset("random crops, and flips where they keep the class")
    noise: float = flag(0.0, "standard deviation of Gaussian noise on images (0..1); with --test_only on test images", rule=at_least(0))
    val_fraction: float = flag(0.1, "share of the training set held out for validation", rule=fraction())
    split_seed: int = flag(0, "validation rows and all else about the data follow from it, whatever --seed is", rule=SEED)
    test_seed: int = flag(0, "draws the test rows of a data set that has none of its own, whatever the other seeds are", rule=SEED)
    label_noise: str | None = flag(None, "RATE[:symmetric|asymmetric] or FILE.npz:KEY, training split only")
    noisy_val: bool = flag(False, "--label_noise for the labels of the validation rows too")
    keep_duplicates: bool = flag(False, "exact copies of training rows stay: as neighbors of each other, and as validation rows")
    subset: float = flag(1.0, "share of the training and validation rows that is used, class by class", rule=PART)
    skip_broken: bool = flag(False, "leave out image files that can't be read; without it they are counted and refused")
    imbalance: float = flag(1.0, "long tail: rows of the last class / rows of the first", rule=PART)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    num_epochs: int = preset("passes over the training split", rule=at_least(1))
    head_epochs: int = later(
        "then passes of the head alone, over the features of the finished backbone (default: 10 where neighbors are embedded or attended)",
        rule=at_least(0),
    )
    batch_size: int = preset("rows a step", rule=at_least(1))
    optimizer: str = flag("adamw", "optimizer", choices=("adam", "sgd", "adamw"))
    lr: float = preset("peak learning rate", rule=above(0))
    lr_backbone: float | None = flag(None, "learning rate of the backbone (default: --lr)", rule=at_least(0))
    lr_projection: float | None = flag(None, "learning rate of the projection to embeddings (default: --lr)", rule=at_least(0))
    lr_attention: float | None = flag(
        None, "learning rate of the attention over neighbors (default: --lr, at most 5e-4; with SGD --lr)", rule=at_least(0)
    )
    weight_decay: float = preset("weight decay, on matrices only", rule=at_least(0))
    momentum: float = flag(0.9, "momentum of sgd", rule=fraction())
    scheduler: str = preset("learning rate over time", choices=("step", "cosine", "plateau", "none"))
    lr_step: int = flag(20, "epochs between steps; epochs without progress for plateau", rule=at_least(1))
    lr_gamma: float = flag(0.1, "factor of a step", rule=PART)
    warmup_epochs: float = preset("linear warm-up", rule=at_least(0))
    criterion: str = flag("CrossEntropy", "loss of the linear head", choices=("CrossEntropy", "MSE"))
    label_smoothing: float = flag(0.0, "share of the target spread over all classes", rule=fraction())
    mixup_alpha: float = preset("MixUp, Beta(a, a); 0 is off", rule=at_least(0))
    cutmix_alpha: float = flag(0.0, "CutMix, Beta(a, a); 0 is off", rule=at_least(0))
    clip_grad_norm: float = flag(1.0, "largest gradient norm; 0 is off", rule=at_least(0))
    accumulate: int = flag(1, "batches an optimizer step", rule=at_least(1))
    ema_decay: float = preset("average the weights over steps and evaluate the average; 0 is off", rule=fraction())
    dropout_ramp: bool = later("dropout grows over the epochs, from 0 (default: for heads over neighbors)")
    select: str = flag(
        "accuracy",
        "the epoch that counts: by validation accuracy (within one standard error, the lower nll), by nll, or the last",
        choices=("accuracy", "nll", "last"),
    )
    patience: int = flag(0, "stop after so many epochs without a better one on validation rows; 0 is off", rule=at_least(0))


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    k_eval: str | None = flag(None, "neighbors in evaluation (default: --k_train); of several, a table beside the result")
    k_ensemble: str | None = flag(None, "mean of the votes of several k: 5,10,20")
    adaptive_k: bool = flag(False, "the exp(entropy of the weights) heaviest neighbors of each query")
    calibrate: str = flag(
        "head", "what sets confidence, fitted to validation rows: all of it, or one temperature", choices=("none", "head", "temperature")
    )
    recalibrate: bool = flag(False, "with --test_only: fit confidence anew, to validation rows as this test reads them")
    tta: int = flag(1, "views whose probabilities are averaged: identity, flip, random crops", rule=VIEWS)
    continual: bool = flag(False, "also: test rows join the bank with their labels, once they were classified")
    ood: str | None = flag(None, "a data set whose test rows should look foreign (AUROC)")
    baselines: bool = later("votes beside a head without a bank (default: up to 100,000 training rows)")


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    device: str = flag("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    seed: int = flag(0, "weights, order, augmentation and noise in training follow from it", rule=SEED)
    paired_init: bool = flag(False, "parts that models share start with the same weights from one seed; compare sets it")
    deterministic: bool = flag(False, "same numbers on every run with the same thread count; errors where torch can't")
    workers: int | None = flag(None, "processes that read image files (default: the cores, 8 at most)", rule=WORKERS)
    use_amp: bool = flag(False, "bf16 autocast (fp16 with loss scaling on GPUs without bf16)")
    use_compiled: bool = flag(False, "torch.compile the backbone")
    compile_mode: str = flag("default", "mode of torch.compile", choices=("default", "reduce-overhead", "max-autotune"))
    feature_cache: str | None = flag(None, "where --freeze_backbone keeps features, for many runs (default: in the run)")
    plugin: str | None = flag(None, "FILE.py of your own layers, heads, models and data sets, imported first")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    output_dir: str | None = flag(None, "directory of the run (default: runs/DATE-DATASET-LAYER)")
    tracker: str = flag("none", "where metrics go besides metrics.jsonl", choices=("none", "tensorboard", "wandb", "trackio"))


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to do this time; not part of what a run is, so not saved with it."""

    config: str | None = flag(None, "FILE.yaml of defaults (a run's config.yaml repeats it); the command line wins")
    overwrite: bool = flag(False, "replace the run that --output_dir holds")
    resume: str | None = flag(None, "RUN to continue as if it had never stopped")
    stop_after: int | None = flag(None, "end this sitting after so many epochs in all; --resume goes on", rule=at_least(1))
    test_only: bool = flag(False, "evaluate --checkpoint and stop")
    timeout: float = flag(60.0, "seconds without a sign after which a process of several counts as lost (torchrun)", rule=above(0))
    checkpoint: str | None = flag(None, "RUN, or a folder in its checkpoints, for --test_only")


# ---------------------------------------------------------------- a run's configuration

TOPICS: dict[str, type] = {
    "model": ModelOptions,
    "layers": LayerOptions,
    "head": HeadOptions,
    "data": DataOptions,
    "training": TrainingOptions,
    "evaluation": EvaluationOptions,
    "system": SystemOptions,
    "output": OutputOptions,
}
FIELDS = {f.name: f for owner in (*TOPICS.values(), Action) for f in dataclasses.fields(owner)}
TOPIC_OF = {f.name: topic for topic, owner in TOPICS.items() for f in dataclasses.fields(owner)}
LAYER_OPTIONS = tuple(f.name for f in dataclasses.fields(LayerOptions) if f.name != "layer")
HEAD_OPTIONS = tuple(f.name for f in dataclasses.fields(HeadOptions) if f.name != "head")
# Their values follow from other flags where nobody gives them one.
DERIVED = {name for name, f in FIELDS.items() if f.default is MISSING and not f.metadata["preset"]} | {"lr_attention"}
NUMBERS = ("k_eval", "k_ensemble")  # several of them; in YAML also as a list
SENDING = ("wandb", "trackio")  # trackers that write elsewhere than into the run
RENAMED = {"mix_lambda": "interpolation", "compare_votes": "baselines"}  # in older command lines, files and checkpoints


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete. `ignored` names the options that have no effect in it, each with what makes it so."""

    model: ModelOptions
    layers: LayerOptions
    head: HeadOptions
    data: DataOptions
    training: TrainingOptions
    evaluation: EvaluationOptions
    system: SystemOptions
    output: OutputOptions
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], ignored: Mapping[str, str] | None = None) -> Config:
        """From flags and their values."""
        groups = {topic: {n: v for n, v in values.items() if TOPIC_OF[n] == topic} for topic in TOPICS}
        return cls(**{topic: owner(**groups[topic]) for topic, owner in TOPICS.items()}, ignored=dict(ignored or {}))

    def flat(self) -> dict[str, Any]:
        """Flags and their values."""
        return {name: getattr(getattr(self, topic), name) for name, topic in TOPIC_OF.items()}

    def but(self, **values: Any) -> Config:
        """The same with other values of some flags."""
        return Config.of({**self.flat(), **values}, self.ignored)


# What may differ between a checkpoint and its evaluation, or a run and its continuation, without changing what the run is.
PLACE = frozenset(
    {"feature_cache", "data_path", "device", "workers", "use_compiled", "compile_mode", "tracker", "output_dir", "plugin", "shard_bank"}
)
LATE = frozenset({"calibrate", "recalibrate", "tta", "continual", "ood", "baselines"})  # looked at when training is over
NEIGHBORS = frozenset({"k_eval", "k_ensemble", "adaptive_k"})  # not in a resumed run: validation measures with them, and picks the epoch
FREE_IN_TEST = PLACE | LATE | NEIGHBORS | {"dataset", "batch_size", "noise", "use_amp", "deterministic"}
FREE_IN_RESUME = PLACE - {"output_dir"} | LATE | {"num_epochs", "patience", "dataset", "label_noise"}  # the rows are compared


def free_in_test(saved: Mapping[str, Any], given: Mapping[str, Any]) -> frozenset[str]:
    """With --continual also what bounds the bank that grows."""
    grows = given.get("continual", saved.get("continual"))
    return FREE_IN_TEST | {"bank_cap", "bank_evict"} if grows else FREE_IN_TEST


# ---------------------------------------------------------------- checks and files


def check(values: Mapping[str, Any], *owners: type) -> None:
    """Each given value against its type, choices and rule; one that fails is named. Without `owners`: the options of a run."""
    known = {f.name: f for owner in owners or TOPICS.values() for f in dataclasses.fields(owner)}
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
        if value == "":
            raise BadOption(name, "must not be empty", value)
        if meta["choices"] and value not in meta["choices"]:
            raise BadOption(name, f"must be one of {', '.join(meta['choices'])}{did_you_mean(str(value), meta['choices'])}", value)
        if meta["rule"] and not meta["rule"][0](value):
            raise BadOption(name, meta["rule"][1], value)
        if kind in (int, float) and isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise BadOption(name, "must be from -2^63 to 2^63 - 1", value)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@functools.cache
def _hints() -> dict[str, Any]:
    return {name: hint for owner in (*TOPICS.values(), Action) for name, hint in typing.get_type_hints(owner).items()}


def kind_of(field: dataclasses.Field[Any]) -> type:
    """int, float, bool or str, without the None."""
    hint = _hints()[field.name]
    return next(a for a in typing.get_args(hint) if a is not type(None)) if isinstance(hint, types.UnionType) else hint


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names that they have now."""
    return {RENAMED.get(name, name): value for name, value in values.items()}


def of_saved_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration of a run, by today's names. An option that is newer than the run has the value that says what it did."""
    then = {"standardize": False, "dropout_ramp": False, "keep_duplicates": True, "split_seed": values["seed"]}
    then |= {"proxy_weight": 0.0, "head_epochs": 0}
    return then | with_new_names(values)


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
    except ValueError:  # also a number of more than 4,300 digits
        raise BadOption(name, f"must be {_KINDS[kind]}", value) from None


def to_yaml(config: Config) -> str:
    """What repeats the run: every option that has an effect, but for the place it was written to, where this file lies."""
    import yaml

    values = {k: v for k, v in config.flat().items() if k != "output_dir" and k not in config.ignored}
    lines = [f"# ignored because of {reason}: {', '.join(names)}\n" for reason, names in by_reason(config.ignored).items()]
    return yaml.safe_dump(values, sort_keys=False) + "".join(lines)


def effective(config: Config) -> dict[str, Any]:
    """What repeats the run, as values."""
    return {k: v for k, v in config.flat().items() if k != "output_dir" and k not in config.ignored and v is not None}


def by_reason(ignored: Mapping[str, str]) -> dict[str, list[str]]:
    """Options without effect by what makes them so."""
    found: dict[str, list[str]] = {}
    for name, reason in ignored.items():
        found.setdefault(reason, []).append(name)
    return found
