"""Outputs of the published implementations, to 1e-5."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import layers
from tests.layers.reference import assert_same

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {name: options for name, options in json.loads((GOLDEN / "cases.json").read_text()).items() if "layer" in options}
NAMES = {  # state-dict names of the arrays
    "qkv_weight": "qkv.weight",
    "proj_weight": "proj.weight",
    "conv_weight": "conv.weight",
    "conv_depthwise_weight": "conv.0.weight",
    "conv_pointwise_weight": "conv.1.weight",
}


@pytest.mark.parametrize("name", CASES)
def test_published_output(name: str) -> None:
    options = dict(CASES[name])
    arrays = {key: torch.from_numpy(array) for key, array in np.load(GOLDEN / f"{name}.npz").items()}
    x, y = arrays.pop("x"), arrays.pop("y")
    layer = layers.build(options.pop("layer"), dim=x.shape[2], **options)
    layer.load_state_dict({NAMES[key]: array for key, array in arrays.items()})
    for training in (True, False):
        assert_same(layer.train(training)(x), y)
