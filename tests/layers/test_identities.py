"""Layers that must be each other under some options, with one, two and three heads, with and without class tokens."""

from typing import Any

import pytest
import torch

import layers
from layers import NeighborhoodAttention
from tests.layers.reference import DIM, GRID, PREFIX, TOKENS, assert_same, build, copy_weights, tokens

HEADS = (1, 2, 3)
PREFIXES = (0, 1, 2)


def pair(one: str, other: str, num_heads: int, prefix: int, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    """Two layers with the weights that both have, and tokens for them."""
    context: dict[str, Any] = {"dim": DIM, "num_heads": num_heads, "grid": GRID, "num_prefix_tokens": prefix}
    first, second = layers.build(one, **context, **options), layers.build(other, **context, **options)
    copy_weights(first, second)
    return first, second, tokens(n=GRID[0] * GRID[1] + prefix)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("layer", ["ConvNNAttention", "KvtAttention", "SampledKnnAttention"])
def test_all_tokens_as_neighbors_is_attention(layer: str, num_heads: int, prefix: int) -> None:
    attention, other, x = pair("Attention", f"{layer}(K={GRID[0] * GRID[1] + prefix})", num_heads, prefix)
    assert_same(other(x), attention(x))


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("K", [1, 2, 9, 16, 35])
def test_convnn_with_ones_is_kvt(K: int, num_heads: int, prefix: int) -> None:
    kvt, convnn, x = pair(f"KvtAttention(K={K})", f"ConvNNAttention(K={K})", num_heads, prefix)
    assert_same(convnn(x), kvt(x))


@pytest.mark.parametrize("num_heads", HEADS)
def test_convnn_with_equal_matrices_is_kvt_followed_by_the_matrix(num_heads: int) -> None:
    kvt, convnn, x = pair("KvtAttention(K=5)", "ConvNNAttention(K=5, convolution_type='standard')", num_heads, 1)
    torch.nn.init.zeros_(convnn.conv.weight)
    convnn.conv.weight.data[:] = 2 * torch.eye(DIM // num_heads)[:, :, None]
    assert_same(convnn(x), 2 * kvt(x))


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("layer", ["KvtAttention(K=5)", "ConvNNAttention(K=5, magnitude_type='cosine')"])
def test_heads_do_not_mix(layer: str, num_heads: int) -> None:
    """What one head's values are changes that head's output only."""
    mixer = build(layer, num_heads, DIM)
    q, k, v = torch.randn(3, 2, num_heads, TOKENS, DIM // num_heads)
    before = mixer.mix(q, k, v)
    changed = v.clone()
    changed[:, 0] += 1
    after = mixer.mix(q, k, changed)
    assert torch.equal(before[:, 1:], after[:, 1:])
    assert not torch.equal(before[:, 0], after[:, 0])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize(
    "layer",
    [
        "SparseAttention(sparse_mode='all')",
        "SparseAttention(sparse_context_window=74)",
        "SparseAttention(sparse_mode='strided', sparse_context_window=1)",
        "LocalAttention(window=37)",
        "LocalAttention(window=128)",
        "LocalAttention(window=20, exact_window=False)",
        "NeighborhoodAttention(K=35)",
        "SampledKnnAttention(K=5, num_samples=32)",
    ],
)
def test_a_window_of_all_tokens_is_attention(layer: str, num_heads: int, prefix: int) -> None:
    attention, other, x = pair("Attention", layer, num_heads, prefix)
    assert_same(other(x), attention(x))


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("ratio", [0, 0.0, 1, 1.0])
@pytest.mark.parametrize("single", ["ConvNNAttention(K=5, magnitude_type='cosine')", "Attention"])
def test_branch_attention_at_the_ends_is_its_single_layer(single: str, ratio: float, num_heads: int) -> None:
    if (ratio == 1) == single.startswith("ConvNN"):
        branch = f"BranchAttention(K=5, magnitude_type='cosine', branch_ratio={ratio}, proj_bias=True)"
        alone, both, x = pair(single, branch, num_heads, 1)
        both.proj.bias.data.zero_()
        assert both.state_dict().keys() - {"proj.bias"} == alone.state_dict().keys()
        assert_same(both(x), alone(x), 1e-6)


@pytest.mark.parametrize("num_heads", HEADS)
def test_branch_conv_at_the_ends_is_its_single_layer(num_heads: int) -> None:
    convnn, both, x = pair("ConvNNAttention(K=5)", "BranchConv(K=5, branch_ratio=1)", num_heads, 1)
    assert torch.equal(both(x), convnn(x))
    alone = build("BranchConv(branch_ratio=0, kernel_size=3)", num_heads)
    width = DIM // num_heads
    v = alone.qkv(x := tokens())[..., -DIM:]
    heads = [alone.conv1d(v[..., h * width : (h + 1) * width].transpose(1, 2)).transpose(1, 2) for h in range(num_heads)]
    assert_same(alone(x), alone.proj(torch.cat(heads, -1)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dims", "K", "dilation"), [(1, 3, 1), (1, 9, 2), (1, 35, 1), (1, 4, 3), (2, 3, 1), (2, 5, 1), (2, 2, 2), (2, 4, 1)]
)
@pytest.mark.parametrize("prefix", [0, 2])
def test_neighborhood_attention_is_nattens(dims: int, K: int, dilation: int, prefix: int) -> None:
    pytest.importorskip("natten")
    options: dict[str, Any] = {"K": K, "dilation": dilation, "window_dims": dims, "grid": GRID, "num_prefix_tokens": prefix}
    x = tokens(n=GRID[0] * GRID[1] + prefix, dim=48)
    for num_heads in (1, 3):
        ours = NeighborhoodAttention(48 // 3 * num_heads, num_heads, **options)
        with torch.no_grad():  # NATTEN has no backward on the CPU
            wanted = NeighborhoodAttention(48 // 3 * num_heads, num_heads, backend="natten", **options)
            copy_weights(ours, wanted)
            assert_same(ours(x[..., : ours.dim]), wanted(x[..., : ours.dim]), 1e-6)


@pytest.mark.parametrize(("size", "prefix"), [((5, 7), 0), ((5, 7), 2), ((1, 13), 1)])
def test_windows_over_a_grid_of_one_row_are_windows_over_the_sequence(size: tuple[int, int], prefix: int) -> None:
    options: dict[str, Any] = {"dim": DIM, "num_heads": 2, "num_prefix_tokens": prefix}
    sequence = layers.build("NeighborhoodAttention(K=1)", grid=size, **options)
    plane = layers.build("NeighborhoodAttention(K=1, window_dims=2)", grid=size, **options)
    copy_weights(sequence, plane)
    x = tokens(n=size[0] * size[1] + prefix)
    assert_same(plane(x), sequence(x), 1e-6)


def test_the_prefix_of_a_published_window_is_part_of_the_sequence() -> None:
    published = NeighborhoodAttention(DIM, 2, K=5, prefix="sequence", grid=GRID, num_prefix_tokens=PREFIX)
    plain = NeighborhoodAttention(DIM, 2, K=5)
    copy_weights(published, plain)
    assert torch.equal(published(tokens()), plain(tokens()))
