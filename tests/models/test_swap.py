"""Attention swapped in place: same weights, same names, same logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import Attention as TimmAttention
from torch import nn

import layers
from models.swap import swap_attention, token_context
from tests.models.swapping import SIZE, WIDTH, SwapTopK, assert_close, make, vit
from utils import BadOption

pytestmark = pytest.mark.usefixtures("swap_layers")

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {  # name, options, tokens
    "vit": ("vit_tiny_patch16_224", SIZE, 16),
    "augreg": ("vit_small_patch32_224.augreg_in21k", {"img_size": (96, 96)}, 10),
    "deit": ("deit_tiny_patch16_224", SIZE, 16),
    "deit distilled": ("deit_tiny_distilled_patch16_224", SIZE, 17),
    "deit3": ("deit3_small_patch16_224", SIZE, 16),
    "dinov2": ("vit_small_patch14_reg4_dinov2", {"img_size": (42, 70)}, 20),
    "qk-norm": ("vit_tiny_patch16_224", {**SIZE, "qk_norm": True}, 16),
    "no class token": ("vit_medium_patch16_gap_240", SIZE, 15),
    "registers, no class token": ("vit_little_patch16_reg4_gap_256", SIZE, 19),
    "attention pool": ("vit_base_patch16_siglip_224", SIZE, 15),
    "norm of the output": ("beit3_base_patch16_224", SIZE, 16),
    "parallel": ("vit_small_patch16_18x2_224", SIZE, 16),
    "post-norm": ("vit_base_patch16_rpn_224", SIZE, 15),
    "convit": ("convit_tiny", {**SIZE, "local_up_to_layer": 0}, 16),
}


@pytest.mark.parametrize(("name", "options", "tokens"), MODELS.values(), ids=MODELS)
def test_saved_weights_give_the_same_logits(name, options, tokens, tmp_path):
    options = {**WIDTH, **options}
    if name == "convit_tiny":
        options["embed_dim"] = 11  # times num_heads, in this family
    images = torch.randn(3, 3, *options["img_size"])
    original = make(name, 1, **options)
    save_file(original.state_dict(), str(tmp_path / "weights.safetensors"))

    swapped = make(name, 2, **options)
    names = swap_attention(swapped, f"SwapTopK(K={tokens})")
    assert names == [path for path, module in original.named_modules() if type(module).__name__ in ("Attention", "MHSA")]
    assert len(names) == (4 if "18x2" in name else 2)
    assert all(type(swapped.get_submodule(path)) is SwapTopK for path in names)
    assert list(swapped.state_dict()) == list(original.state_dict())
    swapped.load_state_dict(load_file(str(tmp_path / "weights.safetensors")), strict=True)
    with torch.no_grad():
        expected, found = original(images), swapped(images)
    assert_close(found, expected, 1e-4)

    for path in names:  # and attention matters in these models: with one neighbor the logits are others
        swapped.get_submodule(path).K = 1
    with torch.no_grad():
        assert (swapped(images) - expected).abs().max() > 0.01


def test_the_pyramids_that_have_plain_attention():
    for name, count in {"pit_ti_224": 12, "mobilevit_xxs": 9, "caformer_s18": 12, "csatv2": 4}.items():
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=5)
        before = list(model.state_dict())
        assert len(swap_attention(model, "Attention")) == count
        assert list(model.state_dict()) == before


def test_the_very_tensors_move_and_gradients_reach_them():
    model = vit()
    model.blocks[1].attn.qkv.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    swap_attention(model, "SwapTopK(K=5)")
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert len(after) == len(before)

    model(torch.randn(2, 3, 48, 80)).square().sum().backward()
    assert model.blocks[0].attn.qkv.weight.grad.abs().min(1).values.max() > 0
    assert model.blocks[1].attn.qkv.weight.grad is None


def test_dropout_is_the_models():
    model = vit(attn_drop_rate=0.25, proj_drop_rate=0.125)
    swap_attention(model, "SwapTopK(K=16)")
    assert (model.blocks[0].attn.attn_drop.p, model.blocks[0].attn.proj_drop.p) == (0.25, 0.125)
    images = torch.randn(2, 3, 48, 80)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_heads_of_another_size_than_the_width_gives():
    model = vit(depth=1)
    model.blocks[0].attn = TimmAttention(33, 3, attn_head_dim=13, qkv_bias=True).eval()
    images = torch.randn(2, 3, 48, 80)
    before = model(images)
    swap_attention(model, "SwapTopK(K=16)")
    assert_close(model(images), before, 1e-4)


# ---------------------------------------------------------------- per block


def test_a_pattern_over_depth():
    model = vit(depth=5)
    assert swap_attention(model, "Attention*2,SwapTopK(K=3),SwapTopK*2", K=11) == [f"blocks.{i}.attn" for i in range(5)]
    assert [type(b.attn).__name__ for b in model.blocks] == ["Attention", "Attention", "SwapTopK", "SwapTopK", "SwapTopK"]
    assert all(isinstance(b.attn, layers.TokenMixer) for b in model.blocks)
    assert [b.attn.K for b in model.blocks[2:]] == [3, 11, 11]


def test_a_shared_option_that_no_layer_uses_is_said(capsys):
    swap_attention(vit(), "Attention", K=3)
    assert capsys.readouterr().err == "ignored by Attention: K\n"


def test_only_the_blocks_asked_for():
    model = vit(depth=5)
    old = [block.attn for block in model.blocks]
    assert swap_attention(model, "SwapTopK(K=2),SwapTopK(K=3)", blocks=(4, 1)) == ["blocks.1.attn", "blocks.4.attn"]
    assert [block.attn is attn for block, attn in zip(model.blocks, old, strict=True)] == [True, False, True, True, False]
    assert (model.blocks[1].attn.K, model.blocks[4].attn.K) == (2, 3)


@pytest.mark.parametrize("blocks", [(2,), (-1,), (0, 0), (), (True,)])
def test_blocks_that_do_not_exist(blocks):
    with pytest.raises(BadOption, match="blocks must"):
        swap_attention(vit(), "Attention", blocks=blocks)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("Attention*3", {}, r"layer must read Name\*COUNT, with a count from 1 to the number of blocks \(2\)"),
        ("Atention", {}, "did you mean 'Attention'"),
        ("Attention(K=3)", {}, "Attention has no option 'K'"),
        ("Attention,SwapTopK", {"k": 3}, "has no option 'k'"),
        ("SwapTopK(K=0)", {}, "K must be at least 1, got 0"),
        ("Attention", {"qkv_bias": False}, "qkv_bias cannot be given for a swap"),
        ("SwapTopK(dropout=0.1)", {}, "dropout cannot be given for a swap"),
        ("SwapOwnForward", {}, "must use the shared projections"),
    ],
)
def test_a_wrong_specification_changes_nothing(spec, options, message):
    model = vit()
    before = list(model.modules())
    with pytest.raises(BadOption, match=message):
        swap_attention(model, spec, **options)
    assert list(model.modules()) == before


def test_parameters_of_the_layers_own_are_the_only_new_names():
    model = vit().double()
    before = set(model.state_dict())
    swap_attention(model, "SwapConv(K=5)", blocks=[1])
    assert set(model.state_dict()) - before == {"blocks.1.attn.conv.weight", "blocks.1.attn.conv.bias"}
    assert before < set(model.state_dict())
    conv = model.blocks[1].attn.conv
    assert conv.weight.dtype is torch.float64
    assert not conv.training
    assert not model.blocks[1].attn.training


def test_mode_and_device_are_kept():
    model = vit().train()
    model.blocks[0].attn.attn_drop.eval()
    swap_attention(model, "SwapConv(K=5)")
    assert model.blocks[0].attn.training
    assert model.blocks[0].attn.conv.training
    assert not model.blocks[0].attn.attn_drop.training
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=2)
    swap_attention(model, "SwapConv(K=5)")
    assert {p.device.type for p in model.parameters()} == {"meta"}


# ---------------------------------------------------------------- where the tokens are


@pytest.mark.parametrize(
    ("name", "options", "grid", "prefix"),
    [
        ("vit_tiny_patch16_224", SIZE, (3, 5), 1),
        ("deit_tiny_distilled_patch16_224", SIZE, (3, 5), 2),
        ("vit_small_patch14_reg4_dinov2", {"img_size": (42, 70)}, (3, 5), 5),
        ("vit_medium_patch16_gap_240", SIZE, (3, 5), 0),
        ("vit_tiny_r_s16_p8_224", {"img_size": (96, 160)}, (3, 5), 1),
    ],
)
def test_layers_that_ask_get_the_grid(name, options, grid, prefix):
    model = make(name, 0, **{**WIDTH, **options})
    wrapped = nn.Sequential(model)
    assert swap_attention(wrapped, "SwapGrid") == ["0.blocks.0.attn", "0.blocks.1.attn"]
    assert [(b.attn.grid, b.attn.num_prefix_tokens) for b in model.blocks] == [(grid, prefix)] * 2
    model(torch.randn(1, 3, *options["img_size"]))  # the layer compares the number of its tokens


def test_a_pyramid_does_not_tell_its_grid_and_that_is_said(capsys):
    with torch.device("meta"):
        model = timm.create_model("pit_ti_224")
    assert token_context(model, "transformers.1.blocks.0.attn") == {}  # patch_embed.grid_size is the first stage's
    swap_attention(model, "SwapGrid", num_prefix_tokens=1)
    assert "transformers.0.blocks.0.attn: the model does not tell grid; SwapGrid takes its defaults" in capsys.readouterr().err


def test_given_context_wins_and_a_changing_grid_is_said(capsys):
    model = vit(dynamic_img_size=True)
    swap_attention(model, "SwapGrid,SwapGrid(grid=(5, 3))")
    assert [block.attn.grid for block in model.blocks] == [(3, 5), (5, 3)]
    assert "grid of SwapGrid: (3, 5) (the model takes images of any size" in capsys.readouterr().err


# ---------------------------------------------------------------- after the swap


def test_a_swapped_model_can_be_swapped_again_unless_parameters_would_be_lost():
    model = vit()
    images = torch.randn(2, 3, 48, 80)
    before = model(images)
    swap_attention(model, "SwapTopK(K=1)")
    swap_attention(model, "Attention")
    assert_close(model(images), before, 1e-5)
    swap_attention(model, "SwapConv(K=4)", blocks=[1])
    with pytest.raises(BadOption, match=r"blocks\.1\.attn: it holds conv besides plain attention"):
        swap_attention(model, "Attention")


def test_a_shared_module_is_swapped_everywhere():
    model = vit(depth=3)
    model.blocks[2].attn = model.blocks[0].attn
    assert swap_attention(model, "SwapTopK(K=3)*2") == ["blocks.0.attn", "blocks.1.attn"]
    assert model.blocks[2].attn is model.blocks[0].attn
    assert type(model.blocks[2].attn) is SwapTopK


def test_a_mask_is_an_error_not_ignored():
    model = vit()
    swap_attention(model, "Attention")
    with pytest.raises(ValueError, match="takes no attention mask"):
        model.forward_features(torch.randn(1, 3, 48, 80), attn_mask=torch.ones(16, 16, dtype=torch.bool))


def test_a_swapped_model_can_be_copied():
    model = vit()
    swap_attention(model, "SwapTopK(K=5)")
    images = torch.randn(2, 3, 48, 80)
    assert torch.equal(copy.deepcopy(model)(images), model(images))
