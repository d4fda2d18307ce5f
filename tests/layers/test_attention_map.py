"""The attention map of a layer, against the definitions, and against what its `mix` really does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layers
from layers.attention_map import Note, noted
from layers.base import TokenMixer
from tests.layers.reference import SPECS, TOKENS, assert_same, build, similarity

# Layers that mix all channels by the weights that they read with: their output is the weights times the values.
PLAIN = [s for s in SPECS if not s.startswith("Branch") and "standard" not in s and "separable" not in s]


def queries(heads: int, n: int = 13, width: int = 5, seed: int = 0, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, width, generator=generator) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("K", [None, 1, 4, 13])
@pytest.mark.parametrize("layer", ["KvtAttention", "ConvNNAttention"])
def test_against_loops(heads: int, K: int | None, layer: str) -> None:
    """Row by row: the K most similar, softmax over them; without K, all of them (Attention)."""
    q, k, _ = queries(heads)
    options: dict[str, Any] = {} if K is None else {"K": K}
    weight = layers.build("Attention" if K is None else layer, dim=5 * heads, num_heads=heads, **options).eval().attention_map(q, k)
    wanted = torch.zeros(2, heads, 13, 13)
    for b in range(2):
        for h in range(heads):
            for n in range(13):
                score = torch.stack([similarity(q[b, h, n], k[b, h, m], "matmul") for m in range(13)])
                best = sorted(range(13), key=lambda m: -float(score[m]))[: K or 13]
                wanted[b, h, n, best] = score[best].softmax(0)
    assert_same(weight, wanted)


@pytest.mark.parametrize("spec", PLAIN)
def test_weights_times_values_is_the_output(spec: str) -> None:
    layer = build(spec).eval()
    q, k, v = queries(3, TOKENS, layer.head_dim)
    weight = layer.attention_map(q, k)
    assert weight.shape == (2, 3, TOKENS, TOKENS)
    assert_same(weight @ v, layer.mix(q, k, v), 1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_read_without_a_weight(spec: str) -> None:
    """Changing a value changes only the rows that give it a weight; those rows it changes."""
    layer = build(spec).eval()
    q, k, v = queries(3, TOKENS, layer.head_dim, batch=1)
    weight, before = layer.attention_map(q, k), layer.mix(q, k, v)
    near = getattr(layer, "near_dim", layer.head_dim)  # of a branch, the channels that select
    for token in (0, 3, 17, TOKENS - 1):
        other = v.clone()
        other[:, :, token] += 1
        changed = (layer.mix(q, k, other) - before)[..., :near].abs().amax(-1) > 1e-6  # (B, H, N)
        assert torch.equal(changed, weight[..., token].abs() > 1e-6)


def test_a_branch_without_neighbors_is_its_other_half() -> None:
    q, k, _ = queries(3, TOKENS, 22)
    assert_same(build("BranchAttention(K=5, branch_ratio=0)").eval().attention_map(q, k), build("Attention").attention_map(q, k))
    weight = build("BranchConv(K=5, branch_ratio=0, kernel_size=3)").eval().attention_map(q, k)[0, 0]
    place = torch.arange(TOKENS)
    assert torch.equal(weight > 1e-6, (place[:, None] - place).abs() <= 1)


class Shifted(TokenMixer):
    """Each token reads the one before it, in the odd channels half as much; and something that is not read at all."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = torch.ones(v.shape[-1])
        factor[1::2] = 0.5
        return v.roll(1, 2) * factor + 7


def test_a_layer_that_mixes_channels_differently_and_says_nothing() -> None:
    q, k, _ = queries(2, 13, 6)
    weight = Shifted(12, 2).attention_map(q, k)
    assert_same(weight, 0.75 * torch.eye(13).roll(1, 0).expand(2, 2, 13, 13))


class Window(TokenMixer):
    """A plugin as in the README: no more than a mix."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        far = (place[:, None] - place).abs() > 2
        return (q @ k.transpose(-2, -1) * self.scale).masked_fill(far, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("n", "width"), [(13, 5), (5, 13), (11, 11)])
def test_a_plugin_needs_nothing_more(n: int, width: int) -> None:
    q, k, v = queries(3, n, width)
    layer = Window(3 * width, 3)
    weight = layer.attention_map(q, k)
    assert_same(weight.sum(-1), torch.ones(2, 3, n))
    assert_same(weight @ v, layer.mix(q, k, v))


def test_noted_puts_the_method_back() -> None:
    class Broken(nn.Module):
        def mix(self, x: int) -> int:
            return 7 // x

    module, notes = Broken(), list[Note]()
    assert module.mix(2) == 3
    with pytest.raises(ZeroDivisionError), noted(module, "mix", notes):
        module.mix(module.mix(3) - 2)
    assert "mix" not in vars(module)
    assert [(a, r) for _, a, r in notes] == [((3,), 2)]


def test_noted_puts_back_a_method_of_its_own() -> None:
    module: Any = nn.Identity()
    module.mix = own = lambda x: x + 1
    with noted(module, "mix", []):
        assert module.mix(1) == 2
        assert module.mix is not own
    assert module.mix is own
