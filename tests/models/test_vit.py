"""The ViT of the ConvNN paper: its published size, its parts, and the layers that a pattern puts into it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layers
from classifiers import LinearHead
from evaluation import cost
from models import ModelSpec, build
from models.vit import VisionTransformer, sinusoidal_positions
from utils import BadOption, Call

SMALL: dict[str, Any] = dict(name="vit", shape=(2, 15, 21), num_classes=5, patch_size=3, depth=4, dim=22, num_heads=2, d_mlp=13)


class Left(layers.TokenMixer):
    """With options of its own, and a view of where its tokens are."""

    def __init__(self, dim: int, num_heads: int = 8, *, K: int = 3, grid: Any = None, num_prefix_tokens: int = 0, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        self.K, self.seen = K, (grid, num_prefix_tokens)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


class Right(layers.Attention):
    """Takes what the base takes."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for layer in (Left, Right):
        monkeypatch.setitem(layers.LAYERS._parts, layer.__name__, layer)


# ---------------------------------------------------------------- the published size


def test_the_published_parameters_and_flops_of_vit_tiny():
    torch.manual_seed(0)
    spec = ModelSpec(name="vit", shape=(3, 224, 224), num_classes=10, patch_size=16, depth=12, dim=192, num_heads=1, d_mlp=768)
    backbone = build(spec).eval()
    model = nn.Sequential(backbone, LinearHead(192, 10))
    assert cost.parameters(model) == 5_479_690
    # by hand: tokens 197, patches 196; projections and MLP of 12 blocks, attention of 12 blocks, patches, head
    by_hand = 12 * 197 * 192 * (3 * 192 + 192 + 2 * 768) * 2 + 12 * 2 * 197 * 197 * 192 * 2 + 196 * 768 * 192 * 2 + 192 * 10 * 2
    found = cost.gflops(model.eval(), torch.zeros(1, 3, 224, 224))
    assert found == pytest.approx(by_hand / 1e9, rel=1e-12)
    assert f"{found:.3f}" == "2.507"


def test_flops_are_of_one_row():
    model = build(ModelSpec(**SMALL)).eval()
    assert cost.gflops(model, torch.zeros(7, 2, 15, 21)) == cost.gflops(model, torch.zeros(1, 2, 15, 21)) > 0


# ---------------------------------------------------------------- parts


def test_positions_by_hand():
    table = sinusoidal_positions(3, 5)
    assert table.shape == (1, 3, 5)
    for position in range(3):
        angles = [position, position / 10_000 ** (2 / 5), position / 10_000 ** (4 / 5)]
        wanted = [math.sin(angles[0]), math.cos(angles[0]), math.sin(angles[1]), math.cos(angles[1]), math.sin(angles[2])]
        torch.testing.assert_close(table[0, position], torch.tensor(wanted))
    assert table[0, 0].tolist() == [0, 1, 0, 1, 0]


def test_tokens_are_class_token_then_patches_row_by_row():
    torch.manual_seed(0)
    model: Any = build(ModelSpec(**SMALL)).eval()
    assert model.grid == (5, 7)
    x = torch.randn(3, 2, 15, 21)
    tokens = model.tokens(x)
    assert tokens.shape == (3, 1 + 5 * 7, 22)
    torch.testing.assert_close(tokens[:, 0], (model.cls_token[:, 0] + model.pos_embed[:, 0]).expand(3, 22))
    for row, column in ((0, 0), (0, 6), (4, 0), (3, 5)):
        patch = x[:, :, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3].flatten(1)  # (B, 18)
        embedded = model.patch_norm(patch @ model.patch_embed.weight.flatten(1).T + model.patch_embed.bias)
        number = 1 + row * 7 + column
        torch.testing.assert_close(tokens[:, number], embedded + model.pos_embed[0, number])
    changed = x.clone()
    changed[:, :, 3:6, 9:12] += 1  # patch (1, 3)
    differs = (model.tokens(changed) != tokens).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == [1 + 1 * 7 + 3]


def test_forward_is_pre_norm_blocks_and_the_class_token():
    torch.manual_seed(0)
    model: Any = build(ModelSpec(**SMALL)).eval()
    x = torch.randn(3, 2, 15, 21)
    tokens = model.tokens(x)
    for block in model.blocks:
        tokens = tokens + block.attn(block.norm1(tokens))
        tokens = tokens + block.mlp.fc2(torch.nn.functional.gelu(block.mlp.fc1(block.norm2(tokens))))
    found = model(x)
    assert found.shape == (3, model.num_features)
    torch.testing.assert_close(found, model.norm(tokens)[:, 0])


def test_positions_follow_the_model_but_are_not_weights():
    model: Any = build(ModelSpec(**SMALL))
    assert "pos_embed" not in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())
    assert model.double().pos_embed.dtype == torch.float64


def test_dropout_is_on_in_training_only():
    torch.manual_seed(0)
    model = build(ModelSpec(**SMALL, dropout=0.3, attention_dropout=0.3))
    x = torch.randn(3, 2, 15, 21)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.3}


@pytest.mark.parametrize(("height", "width", "patch"), [(15, 21, 4), (16, 21, 3), (15, 22, 3), (15, 21, 22)])
def test_a_patch_must_divide_both_sides(height, width, patch):
    with pytest.raises(BadOption, match=rf"^patch_size must divide the image size \({height} x {width}\), got {patch}$"):
        build(ModelSpec(**{**SMALL, "shape": (2, height, width), "patch_size": patch}))


def test_heads_must_divide_the_width():
    with pytest.raises(BadOption, match=r"^d_hidden must be divisible by num_heads \(3\), got 22$"):
        build(ModelSpec(**{**SMALL, "num_heads": 3}))


def test_tables_and_images_are_not_mixed_up():
    tables = r"^model must be one for table rows \(mlp; identity for ready-made features\) with this data set, got 'vit'$"
    with pytest.raises(BadOption, match=tables):
        build(ModelSpec(**{**SMALL, "shape": (13,)}))
    with pytest.raises(BadOption, match=r"^model must be one for images \(vit, timm/NAME\) with this data set, got 'mlp'$"):
        build(ModelSpec(**{**SMALL, "name": "mlp"}))
    with pytest.raises(BadOption, match=r"^model must be one of vit, mlp, identity \(did you mean 'vit'\?\), got 'vitt'$"):
        build(ModelSpec(**{**SMALL, "name": "vitt"}))


def test_the_table_model():
    torch.manual_seed(0)
    model: Any = build(ModelSpec(name="mlp", shape=(13,), num_classes=5, depth=2, dim=11, d_mlp=7)).eval()
    x = torch.randn(3, 13)
    wanted = model.embed(x)
    for norm, mlp in model.blocks:
        wanted = wanted + mlp.fc2(torch.nn.functional.gelu(mlp.fc1(norm(wanted))))
    torch.testing.assert_close(model(x), model.norm(wanted).relu())
    assert model.num_features == 11


# ---------------------------------------------------------------- layers over depth


def test_a_pattern_over_depth_builds_what_it_says():
    model: Any = build(ModelSpec(**SMALL, layer="Left(K=7),Right*2,Left"))
    assert [type(block.attn).__name__ for block in model.blocks] == ["Left", "Right", "Right", "Left"]
    assert [block.attn.K for block in model.blocks if isinstance(block.attn, Left)] == [7, 3]
    assert model(torch.zeros(1, 2, 15, 21)).shape == (1, 22)


def test_a_layer_that_declares_the_grid_gets_it():
    model: Any = build(ModelSpec(**SMALL, layer="Left"))
    assert [block.attn.seen for block in model.blocks] == [((5, 7), 1)] * 4


def test_layer_options_reach_the_layers_that_have_them_and_a_call_wins(capsys):
    spec = ModelSpec(**SMALL, layer="Left,Left(K=7),Right*2", layer_options={"K": 5}, dropout=0.2, attention_dropout=0.1)
    model: Any = build(spec)
    assert [block.attn.K for block in model.blocks[:2]] == [5, 7]
    assert all((block.attn.proj_drop.p, block.attn.attn_drop.p) == (0.2, 0.1) for block in model.blocks)
    assert capsys.readouterr().err == ""  # K is used by one of them


def test_options_that_no_layer_has_are_ignored(capsys):
    """Whoever completes the configuration names them; the model just leaves them out."""
    options = {"K": 5, "kernel_size": 3, "branch_ratio": 0.5}
    model: Any = build(ModelSpec(**SMALL, layer="Right,Left", layer_options=options))
    assert model.blocks[1].attn.K == 5
    assert capsys.readouterr().err == ""
    assert layers.unused_options([Call("Right"), Call("Left")], options) == ["kernel_size", "branch_ratio"]


@pytest.mark.parametrize(
    ("layer", "rule"),
    [
        ("Rigth", r"layer must be one of .*Attention.* \(did you mean 'Right'\?\), got 'Rigth'"),
        ("Left(k=3)", r"Left has no option 'k' \(did you mean 'K'\?\); it has K, grid, "),
        ("Left*3", r"layer must name as many layers as there are blocks \(4\) or a divisor of it \(3 named\)"),
    ],
)
def test_wrong_layers(layer, rule):
    with pytest.raises(BadOption, match=f"^{rule}"):
        build(ModelSpec(**SMALL, layer=layer))


def test_same_seed_same_weights():
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return build(ModelSpec(**SMALL)).state_dict()

    first, again, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_every_weight_learns():
    torch.manual_seed(0)
    model = build(ModelSpec(**SMALL))
    assert isinstance(model, VisionTransformer)
    model(torch.randn(3, 2, 15, 21)).square().sum().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
