"""Sparse and neighborhood attention: fixed patterns."""

from typing import Any

import pytest
import torch
from torch import nn

from layers import NeighborhoodAttention, SparseAttention
from layers import functional as L
from tests.layers.reference import DIM, GRID, PREFIX, TOKENS, assert_same, attention, mixed, tokens
from utils import BadOption

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize(("mode", "window"), [("local", 5), ("local", 4), ("strided", 3), ("all", 1)])
def test_sparse_against_its_definition(mode: str, window: int, num_heads: int) -> None:
    layer = SparseAttention(DIM, num_heads, sparse_mode=mode, sparse_context_window=window).double()
    apart = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()
    mask = {"local": apart <= window // 2, "strided": apart % window == 0, "all": apart >= 0}[mode]
    x = tokens(dtype=torch.float64)
    assert_same(layer(x), mixed(layer, x, lambda q, k, v: attention(q, k, v, mask)), 1e-10)


def test_sparse_dropout_obeys_eval() -> None:
    layer = SparseAttention(DIM, 3, attention_dropout=0.5)
    assert not torch.equal(layer(tokens()), layer(tokens()))
    layer.eval()
    assert torch.equal(layer(tokens()), layer(tokens()))


@pytest.mark.parametrize(("K", "dilation"), [(3, 1), (5, 1), (2, 2), (1, 1)])
def test_the_plane_window_by_loops(K: int, dilation: int) -> None:
    h, w = GRID
    layer = NeighborhoodAttention(DIM, 3, K=K, dilation=dilation, window_dims=2, grid=GRID, num_prefix_tokens=PREFIX)
    mask = layer.mask(TOKENS, CPU)
    rows, columns = L.neighborhood_mask(h, K, dilation, CPU), L.neighborhood_mask(w, K, dilation, CPU)
    for i in range(TOKENS):
        for j in range(TOKENS):
            if i < PREFIX or j < PREFIX:
                wanted = True
            else:
                (a, b), (c, d) = divmod(i - PREFIX, w), divmod(j - PREFIX, w)
                wanted = bool(rows[a, c] and columns[b, d])
            assert mask[i, j] == wanted
    assert (mask[PREFIX:, PREFIX:].sum(1) == K * K).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"K": 36}, "K must be at most the number of tokens (35), got 36"),
        ({"K": 6, "window_dims": 2}, "K must be at most the shorter side of the token grid (5), got 6"),
        ({"K": 3, "window_dims": 2, "dilation": 2}, "dilation times K (3) must be at most the shorter side of the token grid (5), got 2"),
        ({"K": 0}, "K must be a whole number of at least 1, got 0"),
        ({"window_dims": 3}, "window_dims must be 1 or 2, got 3"),
        ({"window_dims": 2, "K": 3, "grid": None}, "window_dims needs the token grid, which this model does not give, got 2"),
        (
            {"window_dims": 2, "K": 3, "prefix": "sequence"},
            "prefix must be global with window_dims 2: class and register tokens have no place on the grid, got 'sequence'",
        ),
    ],
)
def test_bad_neighborhoods(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption) as error:
        NeighborhoodAttention(DIM, 3, **{"grid": GRID, "num_prefix_tokens": PREFIX, **options})
    assert str(error.value) == message


def test_without_a_grid_the_first_forward_says_the_same() -> None:
    with pytest.raises(BadOption, match=r"^K must be at most the number of tokens \(37\), got 38$"):
        NeighborhoodAttention(DIM, 3, K=38)(tokens())
    with pytest.raises(BadOption, match=r"^grid must fit the 23 tokens \(2 of them class and register tokens\), got \(5, 7\)$"):
        NeighborhoodAttention(DIM, 3, K=3, window_dims=2, grid=GRID, num_prefix_tokens=PREFIX)(tokens(n=23))


def test_bad_sparse_options() -> None:
    with pytest.raises(BadOption, match="sparse_mode must be one of all, local, strided, got 'random'"):
        SparseAttention(DIM, 3, sparse_mode="random")
    with pytest.raises(BadOption, match="sparse_context_window must be a whole number of at least 1, got 0"):
        SparseAttention(DIM, 3, sparse_context_window=0)


def test_natten_is_left_to_cuda() -> None:
    layer = NeighborhoodAttention(64, 2, K=5)
    assert not layer.eval().natten_takes_it() or layer.head_dim == 32
    assert not NeighborhoodAttention(DIM, 3, K=5).natten_takes_it()  # heads 22 wide
    assert not NeighborhoodAttention(64, 2, K=5, attention_dropout=0.1).natten_takes_it()
    layer(tokens(dim=64).requires_grad_()).sum().backward()


def test_natten_with_dropout_is_refused() -> None:
    rule = r"^backend must be auto or mask with attention dropout \(0.3\): NATTEN drops no weights, got 'natten'$"
    with pytest.raises(BadOption, match=rule):
        NeighborhoodAttention(64, 2, K=5, attention_dropout=0.3, backend="natten")
    for backend in ("auto", "mask"):
        NeighborhoodAttention(64, 2, K=5, attention_dropout=0.3, backend=backend)(tokens(dim=64))


def test_natten_with_dropout_that_comes_later_is_refused_in_training() -> None:
    pytest.importorskip("natten")
    layer = NeighborhoodAttention(64, 2, K=5, backend="natten")
    layer.attn_drop = nn.Dropout(0.3)
    with pytest.raises(BadOption, match=r"^backend must be auto or mask with attention dropout \(0.3\)"), torch.no_grad():
        layer(tokens(dim=64))
    layer.eval()
    masked = NeighborhoodAttention(64, 2, K=5, backend="mask").eval()
    masked.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert_same(layer(tokens(dim=64)), masked(tokens(dim=64)), 1e-5)


@pytest.mark.parametrize(("shape", "prefix"), [({}, 0), ({}, 2), ({"window_dims": 2, "dilation": 2}, 2)])
def test_natten_equals_the_mask(shape: dict[str, Any], prefix: int) -> None:
    pytest.importorskip("natten")
    options: dict[str, Any] = {"K": 3, "grid": (7, 11), "num_prefix_tokens": prefix, **shape}
    by_natten, masked = (NeighborhoodAttention(64, 2, backend=backend, **options).eval() for backend in ("natten", "mask"))
    masked.load_state_dict(by_natten.state_dict())
    x = tokens(n=77 + prefix, dim=64)
    with torch.no_grad():
        assert_same(by_natten(x), masked(x), 1e-5)
