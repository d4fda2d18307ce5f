"""Two ways side by side."""

import pytest
import torch

from layers import BranchAttention, BranchConv
from layers import functional as L
from tests.layers.reference import DIM, TOKENS, assert_same, build, tokens
from utils import BadOption


@pytest.mark.parametrize("name", ["BranchConv(kernel_size=3", "BranchAttention("])
def test_each_part_of_the_channels_goes_its_way(name: str) -> None:
    layer = build(f"{name.rstrip('(')}{'(' if name.endswith('(') else ', '}K=5, branch_ratio=0.5)")
    assert (layer.near_dim, layer.rest_dim) == (11, 11)
    q, k, v = torch.randn(3, 2, 3, TOKENS, 22)
    near = build("KvtAttention(K=5)", num_heads=3, dim=33).mix(q[..., :11], k[..., :11], v[..., :11])
    out = layer.mix(q, k, v)
    assert_same(out[..., :11], near)
    assert_same(out[..., 11:], layer.mix_rest(q[..., 11:], k[..., 11:], v[..., 11:]))


def test_branch_conv_by_hand() -> None:
    layer = build("BranchConv(branch_ratio=0, kernel_size=3)", num_heads=1, dim=3)
    layer.conv1d.weight.data = torch.eye(3)[:, :, None] * torch.tensor([1.0, 10.0, 100.0])
    layer.conv1d.bias.data.zero_()
    v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1).expand(1, 1, 4, 3)
    assert layer.mix(v, v, v)[0, 0, :, 0].tolist() == [10 + 200, 1 + 20 + 300, 2 + 30 + 400, 3 + 40]


@pytest.mark.parametrize(("ratio", "near"), [(0, 0), (0.02, 0), (0.3, 7), (1 / 3, 7), (0.5, 11), (0.99, 22), (1, 22)])
def test_a_ratio_that_does_not_divide_is_rounded_and_said(ratio: float, near: int, capsys: pytest.CaptureFixture[str]) -> None:
    L.say_once.cache_clear()
    for _ in range(2):
        assert BranchAttention(DIM, 3, branch_ratio=ratio).near_dim == near
    said = capsys.readouterr().err
    if near == ratio * 22:
        assert said == ""
    else:
        wanted = f"branch_ratio: {ratio} of 66 channels does not divide among 3 heads; {3 * near} channels go through ConvNN"
        assert said == f"{wanted} ({near / 22:.4g})\n"


@pytest.mark.parametrize("ratio", [0, 0.3, 1])
@pytest.mark.parametrize("options", ["sampling_type='random', num_samples=7", "coordinate_encoding=True, convolution_type='standard'"])
def test_options_of_convnn_reach_the_branch(options: str, ratio: float) -> None:
    for name in ("BranchConv", "BranchAttention"):
        layer = build(f"{name}(K=5, branch_ratio={ratio}, {options})")
        layer(tokens()).sum().backward()
        assert (layer.conv is None) == (ratio == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("branch_ratio=1.5", "branch_ratio must be between 0 and 1, got 1.5"),
        ("branch_ratio=-0.1", "branch_ratio must be between 0 and 1, got -0.1"),
        ("kernel_size=4", "kernel_size must be odd, so that a token sits in the middle, got 4"),
        ("kernel_size=39", "kernel_size must be at most the number of tokens (37), got 39"),
        ("kernel_size=0", "kernel_size must be a whole number of at least 1, got 0"),
        ("K=38", "K must be at most the number of candidate tokens (37), got 38"),
    ],
)
def test_bad_options(options: str, message: str) -> None:
    with pytest.raises(BadOption) as error:
        build(f"BranchConv({options})")
    assert str(error.value) == message


def test_without_a_grid_the_first_forward_says_the_same() -> None:
    with pytest.raises(BadOption, match=r"^kernel_size must be at most the number of tokens \(37\), got 39$"):
        BranchConv(DIM, 3, kernel_size=39)(tokens())
