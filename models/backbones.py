"""Any timm classification model as a backbone."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

import layers
from layers.dropout import dropped
from models.registry import ModelSpec
from models.swap import swap_attention
from models.vit import some_patches
from models.weights import check_values, load_matching, read_shapes, tell_matches
from utils import BadOption, did_you_mean, parse_parts, say, shortened

SMALL_IMAGE = 64  # up to this side a ResNet gets the CIFAR stem


def timm_config(name: str) -> dict[str, Any]:
    """timm's facts about a model: input size, normalization, name of the classifier."""
    short = name.removeprefix("timm/")
    family, _, tag = short.partition(".")
    if not timm.is_model(family):
        raise BadOption("model", f"must be a model that timm has{did_you_mean(family, timm.list_models())}", name)
    try:
        config = timm.get_pretrained_cfg(short, allow_unregistered=True)
    except RuntimeError:  # timm's word for an unknown tag
        tags = [known.partition(".")[2] for known in timm.list_models(f"{family}.*", pretrained=True)]
        raise BadOption("model", f"must have a tag that timm has ({', '.join(tags) or 'none'}){did_you_mean(tag, tags)}", name) from None
    return config.to_dict() if config else {}


def default_size(name: str) -> int:
    """The image side a timm model is made for; 0 where any size will do."""
    config = timm_config(name)
    return int(config["input_size"][-1]) if config.get("fixed_input_size") else 0


def normalization(name: str) -> dict[str, list[float]]:
    """Mean and standard deviation that the published weights expect."""
    config = timm_config(name)
    return {"mean": list(config["mean"]), "std": list(config["std"])} if "mean" in config else {}


def timm_backbone(spec: ModelSpec) -> nn.Module:
    """A timm model without its classifier. Where the classes match, `classifier` keeps it as the start of a linear head."""
    height, width = spec.image_size
    short, config = spec.name.removeprefix("timm/"), timm_config(spec.name)
    of_a_run = spec.pretrained not in (None, "hub") and any(key.startswith("backbone.") for key in read_shapes(str(spec.pretrained)))
    weights = {} if of_a_run else _weights(spec.pretrained, config)
    wanted: dict[str, Any] = {
        "num_classes": spec.num_classes,
        "in_chans": spec.shape[0],
        "img_size": (height, width),
        "drop_rate": spec.dropout,
        "attn_drop_rate": spec.attention_dropout,
        **weights,
    }
    if spec.token_dropout:
        layers.check_token_dropout([call for call, _ in parse_parts(spec.layer, "layer")], spec.token_dropout)
        wanted["patch_drop_rate"] = spec.token_dropout
    model: Any = _create(short, wanted, {"img_size", "drop_rate", "attn_drop_rate", "patch_drop_rate"})
    if "pretrained_cfg_overlay" in weights:  # timm passes over names that a file without a classifier lacks
        check_values(model.state_dict(), str(spec.pretrained))
        tell_matches(set(model.state_dict()), set(read_shapes(str(spec.pretrained))), str(spec.pretrained))
    if max(height, width) <= SMALL_IMAGE and _give_cifar_stem(model):
        say(f"{spec.name}: CIFAR stem (3 x 3 convolution of stride 1, no pooling) for images of {height} x {width}")
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    model.reset_classifier(0)
    model.num_features = getattr(model, "head_hidden_size", None) or model.num_features  # some widen the features in their head
    if spec.layer != "Attention":
        swap_attention(model, spec.layer, **dict(spec.layer_options))
    trained_for = weights.get("pretrained_cfg_overlay", config).get("num_classes") if weights else None
    if isinstance(classifier, nn.Linear) and trained_for == spec.num_classes:  # otherwise timm has made a new one
        # Not a submodule: the head copies it, the backbone ends at the features.
        object.__setattr__(model, "classifier_weights", classifier.state_dict())
    if of_a_run:
        load_matching(model, str(spec.pretrained))
    for part in model.modules():
        if type(part) in _BY_ROWS:
            part.__class__ = _BY_ROWS[type(part)]
    return model


class _PatchDropout(timm.layers.PatchDropout):
    """timm's, drawing by rows."""

    def forward(self, x: Tensor) -> Tensor:
        return some_patches(x, self.prob, self.num_prefix_tokens) if self.training and self.prob else x


class _DropPath(timm.layers.DropPath):
    """The same."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.drop_prob):
            return x
        kept = dropped(x.new_ones(len(x), *[1] * (x.ndim - 1)), self.drop_prob)
        return x * (kept if self.scale_by_keep else kept * (1 - self.drop_prob))


_BY_ROWS = {timm.layers.PatchDropout: _PatchDropout, timm.layers.DropPath: _DropPath}


def timm_size(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Of a timm model that is not made: its parameters, and the numbers that one block of a ViT takes in and gives for one image, times
    its blocks; 0 where that is not known."""
    wanted: dict[str, Any] = {"num_classes": 0, "in_chans": shape[0], "img_size": tuple(shape[1:])}
    try:
        with torch.device("meta"):
            model: Any = _create(name.removeprefix("timm/"), wanted, {"img_size"})
    except (RuntimeError, NotImplementedError):  # some compute with numbers while they are made
        return 0, 0
    tokens, width = getattr(getattr(model, "patch_embed", None), "num_patches", None) or 0, getattr(model, "embed_dim", 0)
    alike = width == model.num_features  # in others, tokens become fewer from stage to stage
    return sum(p.numel() for p in model.parameters()), 2 * tokens * width * len(model.blocks) if alike and tokens else 0


def _weights(pretrained: str | None, config: dict[str, Any]) -> dict[str, Any]:
    """create_model's arguments for published weights, or for a file with timm's keys (timm fits channels and positions)."""
    if pretrained is None:
        return {}
    if pretrained == "hub":
        return {"pretrained": True}
    shapes = read_shapes(pretrained)
    name = config.get("classifier") or ""
    head = shapes.get(f"{name if isinstance(name, str) else name[0]}.weight")
    overlay = {"file": pretrained, "custom_load": False, "num_classes": head[0] if head else 0}
    return {"pretrained": True, "pretrained_cfg_overlay": overlay}


def _create(name: str, wanted: dict[str, Any], optional: set[str]) -> nn.Module:
    """timm.create_model, leaving out those optional arguments that this model does not take."""
    while True:
        try:
            return timm.create_model(name, **wanted)
        except TypeError as error:
            refused = next((o for o in optional & set(wanted) if f"'{o}'" in str(error)), None)
            if refused is None:
                raise
            if refused == "patch_drop_rate":
                raise BadOption("token_dropout", f"must be 0: timm/{name} has no patches to leave out", wanted[refused]) from None
            if refused != "img_size" and wanted[refused]:
                say(f"timm/{name} takes no {refused}: left at its own value")
            del wanted[refused]
        except (AssertionError, ValueError) as error:
            raise BadOption("resize", f"must suit timm/{name} ({error})", wanted.get("img_size")) from None
        except (RuntimeError, OSError) as error:
            if "pretrained" not in wanted:
                raise
            raise BadOption("pretrained", f"must be weights of timm/{name} that can be read ({shortened(error, 160)})") from None


def _give_cifar_stem(model: Any) -> bool:
    """ResNets halve an image four times before their first block; small ones keep their size instead."""
    if not (hasattr(model, "conv1") and hasattr(model, "maxpool") and hasattr(model, "layer1")):
        return False
    first = model.conv1 if isinstance(model.conv1, nn.Conv2d) else next(m for m in model.conv1.modules() if isinstance(m, nn.Conv2d))
    stem = nn.Conv2d(first.in_channels, first.out_channels, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    if first is model.conv1:
        model.conv1 = stem
    else:
        model.conv1[0] = stem
    model.maxpool = nn.Identity()
    return True
