"""Token dropout: which tokens the blocks see in training, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models import ModelSpec, build
from models.vit import TokenDropout
from utils import BadOption

SMALL: dict[str, Any] = dict(name="vit", shape=(2, 15, 21), num_classes=5, patch_size=3, depth=2, dim=22, num_heads=2, d_mlp=13)


def numbered(batch: int, tokens: int) -> Tensor:
    """Tokens that say where they stand, (B, N, 3)."""
    return torch.arange(tokens, dtype=torch.float32)[None, :, None].expand(batch, -1, 3)


@pytest.mark.parametrize(("p", "kept"), [(0.5, 18), (0.3, 24), (0.99, 1)])  # of 35 patches: 17.5, 24.5 and 0.35, at least one
def test_class_tokens_stay_and_the_patches_that_remain_are_different_ones(p: float, kept: int) -> None:
    torch.manual_seed(0)
    drop = TokenDropout(p, 2).train()
    places = drop(numbered(7, 37))[..., 0].long()  # (7, 2 + kept)
    assert places.shape == (7, 2 + kept)
    assert (places[:, :2] == torch.tensor([0, 1])).all()
    for row in places:
        assert len(set(row.tolist())) == 2 + kept
        assert row.min() == 0
        assert row.max() < 37
    assert len({tuple(sorted(row.tolist())) for row in places}) > 1  # other patches for other images


def test_each_patch_is_as_likely_as_another() -> None:
    torch.manual_seed(1)
    places = TokenDropout(0.4, 1).train()(numbered(4_000, 6))[..., 0].long()[:, 1:]  # 3 of 5
    share = torch.bincount(places.flatten(), minlength=6)[1:] / 4_000
    assert (share - 0.6).abs().max() < 4 * (0.6 * 0.4 / 4_000) ** 0.5


def seen(model: Any, x: Tensor) -> int:
    lengths: list[int] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model(x)
    hook.remove()
    return lengths[0]


@pytest.mark.parametrize("spec", [SMALL, {**SMALL, "name": "timm/vit_tiny_patch16_224", "shape": (2, 32, 48)}], ids=["vit", "timm"])
def test_training_sees_fewer_tokens_and_evaluation_all(spec: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: Any = build(ModelSpec(**spec, token_dropout=0.5))
    x = torch.randn(3, *spec["shape"])
    patches = 35 if spec["name"] == "vit" else 6
    assert seen(model.train(), x) == 1 + round(patches / 2)
    assert seen(model.eval(), x) == 1 + patches
    assert torch.equal(model(x), model(x))
    torch.manual_seed(0)
    plain = build(ModelSpec(**spec)).eval()
    assert torch.equal(model(x), plain(x))  # the same weights are drawn with and without


def test_what_is_built_for_the_grid_refuses() -> None:
    with pytest.raises(BadOption, match=r"token_dropout must be 0 with layers .*\(ConvNNAttention\), got 0.5"):
        build(ModelSpec(**SMALL, layer="Attention,ConvNNAttention(K=3)", token_dropout=0.5))
    spec = {**SMALL, "name": "timm/vit_tiny_patch16_224", "shape": (2, 32, 48)}
    with pytest.raises(BadOption, match=r"token_dropout must be 0 with layers .*\(KvtAttention\), got 0.5"):
        build(ModelSpec(**spec, layer="KvtAttention(K=3)", token_dropout=0.5))
    with pytest.raises(BadOption, match=r"token_dropout must be 0: timm/resnet10t has no patches to leave out, got 0.5"):
        build(ModelSpec(**{**SMALL, "name": "timm/resnet10t"}, token_dropout=0.5))
