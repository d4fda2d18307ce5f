"""The ordinary operators of an exported graph compute what ours compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from layers import LAYERS, build, kernels, plain

torch.manual_seed(0)
B, H, N, M, D, E, K = 2, 3, 5, 11, 7, 2, 4


@pytest.fixture
def index() -> torch.Tensor:
    return torch.rand(B, H, N, M, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :K]


@pytest.mark.parametrize("kernel", [(K, D), (K, E, D)])
def test_sums_and_products(kernel: tuple[int, ...], index: torch.Tensor) -> None:
    v, x, weight, factors = torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, K), torch.randn(kernel)
    close = torch.testing.assert_close
    close(plain.bag(v, index, weight), kernels.bag(v, index, weight))
    close(plain.spread(x, index, weight, M), kernels.spread(x, index, weight, M))
    close(plain.pair_dot(x, v, index), kernels.pair_dot(x, v, index))
    close(plain.rank_conv(v, index, weight, factors), kernels.rank_conv(v, index, weight, factors))


def test_selection() -> None:
    q, k = torch.randn(B, H, N, D), torch.randn(B, H, M, D)
    for own in (None, torch.tensor([4, 2, 0, *[N] * (M - 3)])):
        for found, wanted in zip(plain.nearest(q, k, K, own), kernels.nearest(q, k, K, own), strict=True):
            torch.testing.assert_close(found, wanted)
    lists = torch.tensor([[4, 1, 2], [0, 6, 1]])[None, None]  # the others: 0, 3, 5, 6, ... and 2, 3, 4, 5, 7, ...
    places = torch.tensor([[0, 1, 3], [4, 0, 2]])[None]
    assert plain.others(lists, places).tolist() == kernels.others(lists, places).tolist() == [[[[0, 3, 6], [7, 2, 4]]]]


def test_padding_of_windows() -> None:
    from local_attention.local_attention import pad_to_multiple

    for length in (6, 7, 8):
        x = torch.randn(2, length, 3)
        (padded, found), (was_padded, wanted) = plain.pad_to_multiple(x, 4, dim=-2), pad_to_multiple(x, 4, dim=-2)
        assert padded == was_padded
        assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(LAYERS))
def test_every_layer_traces_to_ordinary_operators(name: str) -> None:
    """For any number of rows, and with the operators put back afterwards."""
    torch.manual_seed(0)
    layer = build(name, dim=12, num_heads=3, grid=(4, 4), num_prefix_tokens=1).eval()
    x, before = torch.randn(2, 17, 12), kernels.nearest
    with torch.no_grad(), plain.plain_kernels():
        traced = torch.jit.trace(layer, x, check_trace=False)
    assert kernels.nearest is before
    assert "neighbors::" not in str(traced.inlined_graph)
    other = F.normalize(torch.randn(5, 17, 12))
    with torch.no_grad():
        torch.testing.assert_close(traced(other), layer(other), atol=1e-5, rtol=1e-5)
