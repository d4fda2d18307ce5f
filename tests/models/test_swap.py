"""Attention swapped in place: same weights, same names, same logits; or refused, with nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import Attention as TimmAttention
from torch import Tensor, nn

import layers
from models.swap import find_attention, swap_attention, token_context
from utils import BadOption

WIDTH = {"embed_dim": 33, "num_heads": 3, "depth": 2, "num_classes": 7}  # heads of 11
SIZE = {"img_size": (48, 80)}  # 3 x 5 patches of 16


class SwapTopK(layers.TokenMixer):
    """The K largest logits by masking the dense matrix: slow, and plain to see."""

    def __init__(self, dim: int, num_heads: int = 8, *, K: int = 9, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        if K < 1:
            raise BadOption("K", "must be at least 1", K)
        self.K = K

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.transpose(-2, -1) * self.scale
        least = logits.topk(self.K).values[..., -1:]
        return self.attn_drop(logits.masked_fill(logits < least, float("-inf")).softmax(-1)) @ v


class SwapConv(SwapTopK):
    """With parameters of its own."""

    def __init__(self, dim: int, num_heads: int = 8, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        self.conv = nn.Conv1d(self.head_dim, self.head_dim, self.K, stride=self.K)


class SwapGrid(layers.Attention):
    """Wants to know where its tokens are."""

    def __init__(self, dim: int, num_heads: int = 8, *, grid: Any = None, num_prefix_tokens: int = 0, **base: Any) -> None:
        super().__init__(dim, num_heads, **base)
        self.grid, self.num_prefix_tokens = grid, num_prefix_tokens

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.shape[2] == self.num_prefix_tokens + self.grid[0] * self.grid[1]
        return super().mix(q, k, v)


class SwapOwnForward(layers.Attention):
    """Reads its projections in its own way."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return x


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """For these tests only: other tests go through all layers that there are."""
    for layer in (SwapTopK, SwapConv, SwapGrid, SwapOwnForward):
        monkeypatch.setitem(layers.LAYERS._parts, layer.__name__, layer)


def make(name: str, seed: int, **options: Any) -> Any:
    """A model in which every part shows: random norms and layer scales, and attention that is far from uniform."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.dim() == 2:
                parameter.mul_(20 if "qkv" in key else 5)
    return model.eval()


def vit(seed: int = 0, **options: Any) -> Any:
    return make("vit_tiny_patch16_224", seed, **{**WIDTH, **SIZE, **options})


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


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    gap = (found - expected).abs()
    assert gap.max() <= tolerance, f"largest difference {gap.max():.3g}, mean {gap.mean():.3g}"


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
    assert capsys.readouterr().err == "unused by Attention: K\n"


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


# ---------------------------------------------------------------- what is refused

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
    subclass: "test_swap.OtherAttention, not known to be plain",
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
