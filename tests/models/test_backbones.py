"""timm models as backbones: stems for small images, weights from a file, and names that do not exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import layers
from models import ModelSpec, build
from models.backbones import default_size, normalization
from models.weights import load_matching
from utils import BadOption

VIT = "vit_tiny_patch16_224"


def spec(name: str = VIT, size: int = 32, channels: int = 3, classes: int = 7, **options: Any) -> ModelSpec:
    return ModelSpec(name=f"timm/{name}", shape=(channels, size, size), num_classes=classes, **options)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[Path, Any]:
    """A file with timm's keys for 7 classes and 224 x 224, and the model it came from."""
    torch.manual_seed(3)
    model: Any = timm.create_model(VIT, num_classes=7).eval()
    nn.init.normal_(model.head.weight)
    file = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(model.state_dict(), str(file))
    return file, model


# ---------------------------------------------------------------- ResNets


def test_a_small_image_gets_the_cifar_stem(capsys):
    model: Any = build(spec("resnet18")).eval()
    assert (model.conv1.kernel_size, model.conv1.stride, model.conv1.padding, model.conv1.in_channels) == ((3, 3), (1, 1), (1, 1), 3)
    assert isinstance(model.maxpool, nn.Identity)
    assert model.layer1(model.maxpool(model.act1(model.bn1(model.conv1(torch.zeros(1, 3, 32, 32)))))).shape[2:] == (32, 32)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 512) == (2, model.num_features)
    assert "timm/resnet18: CIFAR stem" in capsys.readouterr().err


def test_a_large_image_keeps_the_stem_of_imagenet(capsys):
    model: Any = build(spec("resnet18", size=224, channels=1))
    assert (model.conv1.kernel_size, model.conv1.stride, model.conv1.in_channels) == ((7, 7), (2, 2), 1)
    assert isinstance(model.maxpool, nn.MaxPool2d)
    assert capsys.readouterr().err == ""


def test_a_stem_of_several_convolutions_stops_halving():
    model: Any = build(spec("resnet10t", channels=2)).eval()
    assert (model.conv1[0].stride, model.conv1[0].in_channels) == ((1, 1), 2)
    assert model.maxpool(model.conv1(torch.zeros(1, 2, 32, 32))).shape[2:] == (32, 32)


# ---------------------------------------------------------------- features of any model


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "ghostnet_050", "efficientvit_b0", "mambaout_femto", "xcit_nano_12_p16_224"])
def test_num_features_is_what_comes_out(name):
    """Some models widen their features after pooling: what they call num_features is not what they give."""
    model: Any = build(spec(name)).eval()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, model.num_features)


def test_dropout_reaches_models_that_take_it_and_the_others_say_so(capsys):
    model: Any = build(spec(dropout=0.3, attention_dropout=0.2))
    assert model.blocks[0].attn.attn_drop.p == 0.2
    assert model.head_drop.p == 0.3
    assert capsys.readouterr().err == ""
    build(spec("resnet18", size=224, attention_dropout=0.2))
    assert capsys.readouterr().err == "timm/resnet18 takes no attn_drop_rate: left at its own value\n"


def test_attention_is_swapped_where_a_layer_is_named(monkeypatch):
    class Other(layers.Attention):
        """Attention under another name."""

    monkeypatch.setitem(layers.LAYERS._parts, "Other", Other)
    model: Any = build(spec(layer="Other"))
    assert {type(block.attn) for block in model.blocks} == {Other}


# ---------------------------------------------------------------- weights from a file


def test_weights_for_the_same_classes_come_with_their_classifier(weights):
    file, original = weights
    model: Any = build(spec(size=224, pretrained=str(file))).eval()
    x = torch.randn(2, 3, 224, 224)
    features = model(x)
    kept = model.classifier_weights
    assert torch.equal(kept["weight"], original.head.weight)
    torch.testing.assert_close(features @ kept["weight"].T + kept["bias"], original(x), rtol=1e-4, atol=1e-5)
    assert not any("classifier" in name or name.startswith("head.") for name in model.state_dict())


def test_weights_for_other_classes_come_without(weights):
    file, original = weights
    model: Any = build(spec(size=224, classes=5, pretrained=str(file))).eval()
    assert not hasattr(model, "classifier_weights")
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in model.state_dict().items())


def test_weights_for_other_channels_are_summed(weights):
    """A gray image through the summed filters is the same as that image three times through the filters for colors."""
    file, original = weights
    model: Any = build(spec(size=224, channels=1, pretrained=str(file))).eval()
    x = torch.randn(2, 1, 224, 224)
    wanted = original.forward_head(original.forward_features(x.expand(2, 3, 224, 224)), pre_logits=True)
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)


def test_weights_for_another_size_get_their_positions_resampled(weights):
    file, original = weights
    model: Any = build(spec(size=48, pretrained=str(file))).eval()
    assert model.pos_embed.shape == (1, 1 + 3 * 3, 192)
    assert torch.equal(model.pos_embed[:, 0], original.pos_embed[:, 0])
    assert torch.equal(model.blocks[5].mlp.fc1.weight, original.blocks[5].mlp.fc1.weight)


def test_weights_without_a_classifier(weights, tmp_path):
    file, original = weights
    save_file({k: v for k, v in load_file(str(file)).items() if not k.startswith("head.")}, str(tmp_path / "body.safetensors"))
    model: Any = build(spec(size=224, pretrained=str(tmp_path / "body.safetensors")))
    assert not hasattr(model, "classifier_weights")
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in model.state_dict().items())


def test_without_weights_there_is_no_classifier_to_start_from():
    assert not hasattr(build(spec()), "classifier_weights")


@pytest.mark.parametrize("name", [f"timm/{VIT}", "vit"])
def test_files_that_are_no_weights(name, weights, tmp_path):
    content = weights[0].read_bytes()
    file = tmp_path / "damaged.safetensors"
    wanted = ModelSpec(name=name, shape=(3, 224, 224), num_classes=7, pretrained=str(file))
    with pytest.raises(BadOption, match=r"^pretrained must be hub or an undamaged .safetensors file \(does not exist\), got '.*damaged"):
        build(wanted)
    header = 8 + int.from_bytes(content[:8], "little")
    damaged = (b"", b"text", content[:4], content[: header - 7], content[: header + 1000], content[:-1], bytes(8) + content[8:])
    for damage in (*damaged, content[:99] + b"\xff" + content[100:]):
        file.write_bytes(damage)
        with pytest.raises(BadOption, match=r"^pretrained must be hub or an undamaged .safetensors file \(\w+\)"):
            build(wanted)


def test_weights_of_another_model_are_refused(tmp_path):
    file = tmp_path / "other.safetensors"
    save_file({"some.weight": torch.zeros(3, 5)}, str(file))
    for name in (f"timm/{VIT}", "timm/resnet18", "vit"):
        with pytest.raises(BadOption, match=r"^pretrained must hold weights of this model \(0 of \d+ tensors match by name and shape\)"):
            build(ModelSpec(name=name, shape=(3, 32, 32), num_classes=7, pretrained=str(file)))
    save_file({"head.weight": torch.zeros(7, 5), "head.bias": torch.zeros(7)}, str(file))  # the right name, another width
    with pytest.raises(BadOption, match=rf"^pretrained must be weights of timm/{VIT} that can be read") as error:
        build(spec(pretrained=str(file)))
    assert str(error.value).endswith('"cls_token", "pos_embed", "patch_embed.proj.weight"...)')  # cut after a word


def test_timm_is_loaded_for_timm_models_only():
    """Loading it takes longer than loading all of the toolkit."""
    code = "import sys, models; assert 'timm' not in sys.modules; import models.backbones; assert 'timm' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_that_fit_in_part_say_so(weights, tmp_path, capsys):
    file = tmp_path / "part.safetensors"
    save_file({k: v for k, v in weights[1].state_dict().items() if not k.startswith(("head", "blocks.11"))}, str(file))
    build(spec(size=224, pretrained=str(file)))
    said = capsys.readouterr().err
    assert said.startswith(f"pretrained: 138 of 152 tensors from {file}; not matched: blocks.11.attn.proj.bias, ")


def test_weights_of_a_run_have_names_of_their_own(tmp_path):
    """A run saves backbone and head, after the stem was changed: its file continues in a model that was changed alike."""
    torch.manual_seed(0)
    trained = build(spec("resnet10t"))
    file = tmp_path / "model.safetensors"
    save_file({**{f"backbone.{k}": v for k, v in trained.state_dict().items()}, "head.fc.weight": torch.zeros(7, 512)}, str(file))
    again = build(spec("resnet10t", pretrained=str(file)))
    assert all(torch.equal(value, trained.state_dict()[key]) for key, value in again.state_dict().items())
    assert not hasattr(again, "classifier_weights")


def test_hub_is_for_timm():
    with pytest.raises(BadOption, match=r"^pretrained hub has weights for timm/NAME models only; give FILE.safetensors"):
        build(ModelSpec(name="vit", shape=(3, 32, 32), num_classes=7, pretrained="hub"))


def test_load_matching(tmp_path, capsys):
    """The file of a run has `backbone.` before its names, and the head's weights."""

    def network(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, width))

    torch.manual_seed(0)
    source, target = network(11), network(13)
    before: dict[str, Tensor] = {k: v.clone() for k, v in target.state_dict().items()}
    named = {f"backbone.{k}": v for k, v in source.state_dict().items()}
    file = tmp_path / "model.safetensors"
    save_file({**named, "head.fc.weight": torch.zeros(3, 11), "head.0.bias": torch.zeros(7)}, str(file))
    load_matching(target, str(file))
    after = target.state_dict()
    assert all(torch.equal(after[name], source.state_dict()[name]) for name in ("0.weight", "0.bias"))
    assert torch.equal(after["1.weight"], before["1.weight"])  # 11 rows do not fit 13
    said = capsys.readouterr().err
    assert said == f"pretrained: 2 of 4 tensors from {file}; not matched: 1.bias, 1.weight\n"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda v: v.long(), "must hold weights that are numbers with a fraction; 0.weight is torch.int64"),
        (lambda v: v > 0, "must hold weights that are numbers with a fraction; 0.weight is torch.bool"),
        (lambda v: v.to(torch.complex64), "must hold weights that are numbers with a fraction; 0.weight is torch.complex64"),
        (lambda v: v.index_fill(0, torch.tensor([3]), torch.nan), "must hold finite weights; 0.weight has NaN"),
        (lambda v: v * torch.inf, "must hold finite weights; 0.weight has NaN"),
        (lambda v: v.double() * 1e200, "must hold finite weights; 0.weight has NaN"),
    ],
)
def test_weights_that_are_no_weights_are_refused(change, rule, tmp_path):
    """Integers, truth values and complex numbers were "17 of 17 loaded"."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))  # whose count of batches is an integer, and may be
    weights = {**model.state_dict()}
    load_matching_of(model, weights, tmp_path)
    with pytest.raises(BadOption, match=f"^pretrained {rule}"):
        load_matching_of(model, {**weights, "0.weight": change(weights["0.weight"])}, tmp_path)


def load_matching_of(model, weights, folder):
    save_file({name: value.clone() for name, value in weights.items()}, str(folder / "model.safetensors"))
    load_matching(model, str(folder / "model.safetensors"))


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("resnet19", r"must be a model that timm has \(did you mean 'resnet18'\?\), got 'timm/resnet19'"),
        ("resnet19.a1_in1k", r"must be a model that timm has \(did you mean 'resnet18'\?\), got 'timm/resnet19.a1_in1k'"),
        ("", "must be a model that timm has, got 'timm/'"),
        ("resnet18.a1_in1", r"must have a tag that timm has \(a1_in1k, .*\) \(did you mean 'a1_in1k'\?\), got 'timm/resnet18.a1_in1'"),
        ("resnet18.", r"must have a tag that timm has \(a1_in1k, .*\), got 'timm/resnet18.'"),
    ],
)
def test_unknown_names_get_the_nearest(name, rule):
    with pytest.raises(BadOption, match=f"^model {rule}"):
        build(spec(name))
    with pytest.raises(BadOption, match=f"^model {rule}"):
        default_size(f"timm/{name}")


def test_images_only():
    tables = r"^model must be one for table rows \(mlp; identity for ready-made features\) with this data set, got 'timm/resnet18'"
    with pytest.raises(BadOption, match=tables):
        build(ModelSpec(name="timm/resnet18", shape=(13,), num_classes=3))


def test_facts_about_a_model():
    assert (default_size(f"timm/{VIT}"), default_size("timm/resnet18")) == (224, 0)
    assert normalization(f"timm/{VIT}") == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert normalization("timm/resnet18") == {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
