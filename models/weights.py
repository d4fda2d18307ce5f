"""Pretrained weights from a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from utils import BadOption, say


def with_weights(model: nn.Module, pretrained: str | None) -> nn.Module:
    """A model of our own, with the weights of a file if one is named."""
    if pretrained == "hub":
        raise BadOption("pretrained", "hub has weights for timm/NAME models only; give FILE.safetensors", pretrained)
    if pretrained:
        load_matching(model, pretrained)
    return model


def load_matching(model: nn.Module, path: str) -> None:
    """Weights from a safetensors file where names and shapes match; says what was left out, refuses if most of it is."""
    read_shapes(path)  # its errors
    found: dict[str, Tensor] = {k.removeprefix("backbone."): v for k, v in load_file(path).items() if not k.startswith("head.")}
    own = model.state_dict()
    check_values(own, path)
    fitting = {k: v for k, v in found.items() if k in own and own[k].shape == v.shape}
    model.load_state_dict(fitting, strict=False)
    tell_matches(set(own), {k for k in found if k in fitting or k not in own}, path)


def check_values(own: Mapping[str, Tensor], path: str) -> None:
    """That the file has finite numbers where the model has numbers: counts and codes would load without a word."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            wanted = own.get(name.removeprefix("backbone."))
            if wanted is None or not wanted.is_floating_point():
                continue
            found = file.get_tensor(name)
            if not found.is_floating_point():
                raise BadOption("pretrained", f"must hold weights that are numbers with a fraction; {name} is {found.dtype}", path)
            if not found.float().isfinite().all():
                raise BadOption("pretrained", f"must hold finite weights; {name} has NaN, infinity or numbers beyond float32", path)


def read_shapes(path: str) -> dict[str, tuple[int, ...]]:
    if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for ever
        raise BadOption("pretrained", "must be hub or an undamaged .safetensors file (it is no file)", path)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        missing = "does not exist" if not Path(path).exists() else f"{type(error).__name__}"
        raise BadOption("pretrained", f"must be hub or an undamaged .safetensors file ({missing})", path) from None


def tell_matches(own: set[str], found: set[str], path: str) -> None:
    """Says how many names of a model and of a file are the same; refuses if most of the model's are missing."""
    both = own & found
    if 2 * len(both) < len(own):  # what little fits would start a model of almost random weights
        raise BadOption("pretrained", f"must hold weights of this model ({len(both)} of {len(own)} tensors match by name and shape)", path)
    left = sorted(own ^ found)
    say(f"pretrained: {len(both)} of {len(own)} tensors from {path}" + (f"; not matched: {', '.join(left[:6])}" if left else ""))
