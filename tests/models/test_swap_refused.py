"""Attention that computes more than a layer would: refused, with nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention as TimmAttention
from torch import nn

from models.swap import find_attention, swap_attention
from tests.models.swapping import SIZE, WIDTH, make, vit
from utils import BadOption

pytestmark = pytest.mark.usefixtures("swap_layers")

REFUSED = {
    "vit_relpos_small_patch16_224": ("blocks.0.attn", "relative-position bias"),
    "beit_base_patch16_224": ("blocks.0.attn", "relative-position bias"),
    "samvit_base_patch16_224": ("blocks.0.attn", "relative-position bias"),
    "swin_tiny_patch4_window7_224": ("layers.0.blocks.0.attn", "relative-position bias"),
    "levit_128s": ("stages.0.blocks.0.attn", "relative-position bias"),
    "maxvit_pico_rw_256": ("stages.0.blocks.0.attn_block.attn", "relative-position bias"),
    "eva02_tiny_patch14_224": ("blocks.0.attn", "rotary position embedding"),
    "vit_small_patch16_dinov3": ("blocks.0.attn", "rotary position embedding"),
    "vit_small_patch16_rope_224": ("blocks.0.attn", "rotary position embedding"),
    "cait_xxs24_224": ("blocks.0.attn", "talking heads"),
    "convit_tiny": ("blocks.0.attn", "gating"),
    "vit_dwee_patch16_reg1_gap_256": ("blocks.0.attn", "differential attention"),
    "vit_pwee_patch16_reg1_gap_256": ("blocks.0", "no single Linear qkv"),
    "xcit_nano_12_p8_224": ("blocks.0.attn", "a learned temperature"),
    "twins_svt_small": ("blocks.0.0.attn", "pooled or windowed tokens"),
    "hiera_tiny_224": ("blocks.0.attn", "pooled or windowed tokens"),
    "crossvit_tiny_240": ("blocks.0.fusion.0.attn", "no single Linear qkv"),
    "davit_tiny": ("stages.0.blocks.0.1.attn", "not known to be plain attention"),
    "nest_tiny": ("levels.0.transformer_encoder.0.attn", "not known to be plain attention"),
    "naflexvit_base_patch16_gap": ("blocks.0.attn", "is masked by NaFlexVit"),
    "resnet10t": ("ResNet", "needs attention to replace"),
}


@pytest.mark.parametrize(("name", "path", "reason"), [(n, *why) for n, why in REFUSED.items()], ids=REFUSED)
def test_more_than_plain_attention_is_refused(name, path, reason):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=7)
    before = list(model.modules())
    with pytest.raises(BadOption) as error:
        swap_attention(model, "Attention")
    assert str(error.value).startswith("layer Attention ")
    assert path in str(error.value)
    assert reason in str(error.value)
    assert list(model.modules()) == before


class OtherAttention(TimmAttention):
    pass


def gated(model: Any) -> None:
    model.blocks[1].attn = TimmAttention(33, 3, gated=True)


def other_width(model: Any) -> None:
    model.blocks[1].attn = TimmAttention(33, 3, dim_out=39)


def subclass(model: Any) -> None:
    model.blocks[1].attn = OtherAttention(33, 3)


def extra_parameter(model: Any) -> None:
    model.blocks[1].attn.sink = nn.Parameter(torch.zeros(3))


def other_scale(model: Any) -> None:
    model.blocks[1].attn.scale = 0.5


def hook(model: Any) -> None:
    model.blocks[1].attn.register_forward_hook(lambda *_: None)


def patched_forward(model: Any) -> None:
    model.blocks[1].attn.forward = lambda x, **_: x


def torch_attention(model: Any) -> None:
    model.blocks[1].attn = nn.MultiheadAttention(33, 3)


def other_projection(model: Any) -> None:
    model.blocks[1].attn.qkv = nn.Sequential(nn.Linear(33, 99))


CHANGES = {
    gated: r"holds gate besides plain attention: it has gating \(gate\)",
    other_width: r"33 to 99, 33 to 39, 3 heads",
    subclass: "test_swap_refused.OtherAttention, not known to be plain",
    extra_parameter: "holds sink besides plain attention",
    other_scale: r"scales logits by 0.5, not by 1/sqrt\(11\)",
    hook: "hooks of its own",
    patched_forward: "a forward or hooks of its own",
    torch_attention: "MultiheadAttention, not known to be plain",
    other_projection: "not Linear",
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_one_odd_block_stops_the_whole_swap(change, reason):
    model = vit()
    change(model)
    before = list(model.modules())
    rule = rf"^layer SwapTopK cannot take the place of blocks\.1\.attn: .*{reason}.*blocks=\[0\] can be swapped"
    with pytest.raises(BadOption, match=rule):
        swap_attention(model, "Attention,SwapTopK(K=4)")
    assert list(model.modules()) == before
    assert swap_attention(model, "SwapTopK(K=4)", blocks=[0]) == ["blocks.0.attn"]


def test_attention_alone_has_no_place_to_put_another():
    with pytest.raises(BadOption, match="give the model that holds it"):
        swap_attention(TimmAttention(33, 3), "Attention")


def test_attention_pools_are_left_alone():
    model = make("vit_base_patch16_siglip_224", 0, **WIDTH, **SIZE)
    pool = model.attn_pool
    assert list(find_attention(model)) == ["blocks.0.attn", "blocks.1.attn"]
    swap_attention(model, "SwapTopK(K=4)")
    assert model.attn_pool is pool
