"""Our layers inside timm's own models."""

from typing import Any

import pytest
import torch

import layers
from tests.layers.reference import assert_same
from utils import BadOption

timm = pytest.importorskip("timm")
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}  # 4 x 4 patches


def tiny(spec: str, **options: Any) -> Any:
    return timm.models.vision_transformer.VisionTransformer(**TINY, attn_layer=layers.timm_layer(spec, **options))


@pytest.mark.parametrize("name", list(layers.LAYERS))
def test_every_layer_trains_in_a_timm_model(name: str) -> None:
    model = tiny(name)
    assert isinstance(model.blocks[0].attn, layers.LAYERS[name])
    loss = model(torch.randn(2, 3, 32, 32)).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_by_the_name_of_a_model_with_timms_weights() -> None:
    name, shape = "vit_tiny_patch16_224", {"img_size": 32, "num_classes": 5, "qk_norm": True}
    plain = timm.create_model(name, **shape).eval()
    ours = timm.create_model(name, attn_layer=layers.timm_layer("KvtAttention", K=5), **shape)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert_same(ours.eval()(x), plain(x), 1e-4)  # K = N


def test_options_and_dropout_reach_the_layer() -> None:
    convnn = layers.timm_layer("ConvNNAttention(K=5)", magnitude_type="cosine")
    drops = {"attn_drop_rate": 0.1, "proj_drop_rate": 0.2}
    model = timm.models.vision_transformer.VisionTransformer(**TINY, **drops, qkv_bias=False, attn_layer=convnn)
    attn = model.blocks[1].attn
    assert (attn.K, attn.magnitude_type, attn.attn_drop.p, attn.proj_drop.p) == (5, "cosine", 0.1, 0.2)
    assert attn.qkv.bias is None
    assert attn.proj.bias is not None


def test_the_grid_is_an_option_here() -> None:
    with pytest.raises(BadOption, match="window_dims needs the token grid"):
        tiny("NeighborhoodAttention(K=3, window_dims=2)")
    tiny("NeighborhoodAttention(K=3, window_dims=2)", grid=(4, 4), num_prefix_tokens=1)(torch.randn(2, 3, 32, 32)).sum().backward()


def test_device_and_type_are_passed_on() -> None:
    layer = layers.timm_layer("ConvNNAttention", K=5)(48, num_heads=3, qkv_bias=True, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_what_we_do_not_implement_is_refused() -> None:
    with pytest.raises(BadOption, match="KvtAttention does not implement timm's scale_norm"):
        layers.timm_layer("KvtAttention")(48, num_heads=3, scale_norm=True)
    with pytest.raises(BadOption, match="has no option 'K'"):
        layers.timm_layer("Attention", K=3)
    with pytest.raises(BadOption, match="must be one of Attention, ConvNN"):
        layers.timm_layer("KvtAttentoin")
