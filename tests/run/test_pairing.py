"""Equal starts: what models share begins alike, whatever else they have; without the flag, weights are what they always were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from run.complete import complete
from run.pairing import paired
from run.parts import build_model, load_data

SMALL = dict(num_layers=2, num_heads=2, d_hidden=8, d_mlp=12, patch_size=4)
DATA = dict(dataset="fake(train=40, test=10, size=8, classes=3)")


def weights(**options: Any) -> dict[str, Tensor]:
    given = {**SMALL, **DATA, "paired_init": True, "seed": 3, **options}
    data = load_data(given)
    return dict(build_model(complete(given, data), data, torch.device("cpu")).named_parameters())


def shared(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if name in other and one[name].shape == other[name].shape]


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in shared(one, other) if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def dense() -> dict[str, Tensor]:
    return weights(layer="Attention")


@pytest.mark.parametrize("layer", ["ConvNNAttention(K=3)", "BranchConv(K=3, kernel_size=3)", "Attention,ConvNNAttention(K=3)"])
def test_layers_share_what_they_have_in_common(dense: dict[str, Tensor], layer: str) -> None:
    other = weights(layer=layer)
    assert len(shared(dense, other)) >= 20
    assert set(other) - set(dense)  # it has parameters of its own
    assert not differ(dense, other)


def test_without_the_flag_they_differ(dense: dict[str, Tensor]) -> None:
    plain = weights(layer="Attention", paired_init=False)
    assert differ(plain, weights(layer="ConvNNAttention(K=3)", paired_init=False))
    assert differ(plain, dense)


def test_heads_share_backbone_and_linear_layer(dense: dict[str, Tensor]) -> None:
    both, votes = (weights(layer="Attention", head=head, embed_dim=8) for head in ("linear+attn-knn", "attn-knn"))
    assert not differ(dense, both)
    assert not differ(votes, both)
    assert len([name for name in shared(votes, both) if name.startswith("head.")]) >= 4
    assert torch.equal(dense["head.fc.weight"], both["head.predictor.linear.head.fc.weight"])
    assert torch.equal(votes["head.predictor.weigh.q_proj.weight"], both["head.predictor.vote.weigh.q_proj.weight"])


def test_another_seed_gives_other_weights_and_the_same_seed_the_same(dense: dict[str, Tensor]) -> None:
    assert not differ(dense, weights(layer="Attention"))
    other = differ(dense, weights(layer="Attention", seed=4))
    assert {"backbone.cls_token", "backbone.blocks.1.attn.qkv.weight", "head.fc.weight"} <= set(other)


def test_parts_of_one_shape_start_differently(dense: dict[str, Tensor]) -> None:
    first, second = (dense[f"backbone.blocks.{n}.attn.qkv.weight"] for n in (0, 1))
    assert not torch.equal(first, second)


def test_values_follow_the_layer_s_own_rule() -> None:
    module = paired(5, lambda: (nn.Linear(300, 200),))[0]
    bound = 300**-0.5
    assert module.weight.abs().max() <= bound
    assert abs(module.weight.std().item() - bound / 3**0.5) < 0.02 * bound
