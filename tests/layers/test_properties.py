"""What holds of every layer for any small size: found by hypothesis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layers
from utils import BadOption

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 9))


@pytest.mark.parametrize("name", list(layers.LAYERS))
@settings(max_examples=8, deadline=None, derandomize=True)
@given(SIZES)
def test_a_layer_refuses_its_sizes_or_treats_each_row_alone(name: str, sizes: tuple[int, ...]):
    """Shapes are kept, numbers finite, two evaluations equal, and no row of a batch reads another."""
    batch, height, width, heads, prefix, K = sizes
    torch.manual_seed(0)
    options = layers.pick_options(name, {"K": K, "kernel_size": K})
    try:
        layer = layers.build(name, dim=4 * heads, num_heads=heads, grid=(height, width), num_prefix_tokens=prefix, **options).eval()
        x = torch.randn(batch, height * width + prefix, 4 * heads, requires_grad=True)
        out = layer(x)
    except BadOption:
        return
    assert out.shape == x.shape
    assert torch.equal(out, layer(x))
    torch.testing.assert_close(torch.cat([layer(row[None]) for row in x]), out, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
