"""Layers that the tests of the swap put into models."""

import pytest

import layers
from tests.models.swapping import SWAP_LAYERS


@pytest.fixture
def swap_layers(monkeypatch):
    """For the tests that ask only: other tests go through all layers that there are."""
    for layer in SWAP_LAYERS:
        monkeypatch.setitem(layers.LAYERS._parts, layer.__name__, layer)
