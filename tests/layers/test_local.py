"""Windows side by side."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layers import LocalAttention
from tests.layers.reference import DIM, assert_same, attention, mixed, tokens
from utils import BadOption


def window_mask(n: int, window: int, back: int, forward: int, exact: bool) -> Tensor:
    place = torch.arange(n)
    ahead = place // window - (place // window)[:, None]  # windows between row and column
    mask = (ahead >= -back) & (ahead <= forward)
    apart = place - place[:, None]
    return mask & (apart >= -window * back) & (apart <= window * forward) if exact else mask


@pytest.mark.parametrize("n", [5, 35, 37])  # shorter than a window, whole windows, a last window to fill up
@pytest.mark.parametrize(("window", "back", "forward"), [(7, 1, 1), (7, 0, 0), (5, 2, 0), (128, 1, 1)])
@pytest.mark.parametrize("exact", [True, False])
def test_reads_its_windows_and_no_padding(n: int, window: int, back: int, forward: int, exact: bool) -> None:
    options: dict[str, Any] = {"window": window, "look_backward": back, "look_forward": forward, "exact_window": exact}
    if exact and 0 in (back, forward):
        exact = options["exact_window"] = False  # no windows to look into: exact would leave only the token itself that way
    layer = LocalAttention(DIM, 3, qkv_bias=True, **options).double()
    mask = window_mask(n, min(window, n), back, forward, exact)
    x = tokens(n=n, dtype=torch.float64)
    assert_same(layer(x), mixed(layer, x, lambda q, k, v: attention(q, k, v, mask)), 1e-10)


def test_the_published_preset() -> None:
    layer = LocalAttention(192, 1, preset="published")
    assert layer.chosen == {"window": 128, "look_backward": 1, "look_forward": 1, "exact_window": True, "rotary": True}
    assert layer.qkv.weight.shape == (3 * 64, 192)
    assert LocalAttention(192, 1, preset="published", window=7, rotary=False).chosen["window"] == 7


def test_rotary_tells_distances_apart() -> None:
    """Equal tokens: without positions all weights are equal, with them the output still is (values are equal)."""
    layer = LocalAttention(DIM, 3, window=37, rotary=True)
    plain = LocalAttention(DIM, 3, window=37)
    plain.load_state_dict(layer.state_dict())
    x = tokens()
    assert not torch.allclose(layer(x), plain(x), atol=1e-4)
    same = x[:, :1].expand(-1, 37, -1)
    assert_same(layer(same), plain(same), 1e-5)


def test_dropout_obeys_eval() -> None:
    layer = LocalAttention(DIM, 3, window=7, attention_dropout=0.5)
    assert not torch.equal(layer(tokens()), layer(tokens()))
    layer.eval()
    assert torch.equal(layer(tokens()), layer(tokens()))


def test_dropout_that_comes_later_is_applied() -> None:
    """A swap puts a model's dropout into a layer that was made without: each weight is dropped, or counts 1 / (1 - p) of itself."""
    layer = LocalAttention(DIM, 3, window=37)
    layer.attn_drop = nn.Dropout(0.3)
    torch.manual_seed(0)
    q, k = torch.zeros(2, 2, 3, 37, 22)
    one_hot = torch.eye(37)[:, :22].expand(2, 3, 37, 22)  # so the output is the weights of 22 tokens
    weight = layer.mix(q, k, one_hot)
    kept = weight > 0
    assert_same(weight[kept], torch.full_like(weight[kept], 1 / 37 / 0.7), 1e-6)
    assert abs(kept.float().mean() - 0.7) < 0.03  # of 4884 weights, +- 0.0066
    assert_same(layer.eval().mix(q, k, one_hot), torch.full((2, 3, 37, 22), 1 / 37), 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "long"}, "preset must be one of short, published, got 'long'"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"look_backward": -1}, "look_backward must be a whole number of at least 0, got -1"),
        ({"rotary": True, "head_dim": 5}, "rotary turns pairs of channels: heads must be of even width, they are 5 wide, got True"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption) as error:
        LocalAttention(DIM, 3, **options)
    assert str(error.value) == message
