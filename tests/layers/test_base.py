"""The contract: projections, options, and what is cached."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layers
from layers.base import TokenMixer
from tests.layers.reference import DIM, assert_same, attention, build, mixed, tokens
from utils import BadOption, options_of


class Values(TokenMixer):
    """The smallest layer: every token keeps its own value."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


def test_projections_by_hand() -> None:
    layer = Values(2, 2)
    layer.qkv.weight.data = torch.cat([torch.zeros(4, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])])
    layer.proj.weight.data = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    assert layer(torch.tensor([[[5.0, 7.0]]])).tolist() == [[[14.0, 15.0]]]


class Wrong(TokenMixer):
    """Returns what a test wants."""

    returned: Any = None

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.zeros(2, 5, 3, 11), "a tensor of (2, 5, 3, 11)"),  # heads after tokens
        (torch.zeros(2, 5, 33), "a tensor of (2, 5, 33)"),
        (torch.zeros(1, 3, 5, 11), "a tensor of (1, 3, 5, 11)"),
        ((torch.zeros(2, 3, 5, 11), None), "tuple"),
        (None, "NoneType"),
    ],
)
def test_a_mix_that_returns_something_else(returned: Any, said: str) -> None:
    layer = Wrong(33, 3)
    layer.returned = returned
    with pytest.raises(BadOption) as error:
        layer(tokens(n=5, dim=33))
    line = Wrong.mix.__code__.co_firstlineno
    wanted = f"Wrong.mix (test_base.py, line {line}) must return a tensor (B, H, N, D), here (2, 3, 5, 11), and returned {said}"
    assert str(error.value) == wanted


def test_what_a_mix_raises_is_left_alone() -> None:
    class Broken(TokenMixer):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        Broken(33, 3)(tokens(n=5, dim=33))


def test_state_dict_names_are_timms() -> None:
    def norm(width: int) -> nn.Module:
        return nn.LayerNorm(width)

    layer = layers.build("Attention", dim=DIM, num_heads=3, qkv_bias=True, proj_bias=True, qk_norm=norm)
    names = {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"}
    assert layer.state_dict().keys() == names
    assert layers.build("Attention", dim=DIM, num_heads=3).state_dict().keys() == {"qkv.weight", "proj.weight"}
    assert layer.q_norm.normalized_shape == (22,)


@pytest.mark.parametrize("num_heads", [1, 2, 3])
def test_attention_against_its_definition(num_heads: int) -> None:
    layer = layers.build("Attention", dim=DIM, num_heads=num_heads, qkv_bias=True, proj_bias=True).double()
    x = tokens(dtype=torch.float64)
    assert_same(layer(x), mixed(layer, x, attention), 1e-10)


def test_heads_of_another_width() -> None:
    layer = layers.build("Attention", dim=DIM, num_heads=5, head_dim=8)
    assert layer.qkv.weight.shape == (3 * 40, DIM)
    assert layer.proj.weight.shape == (DIM, 40)
    assert_same(layer(tokens()), mixed(layer, tokens(), attention), 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
        ({"num_heads": 4}, "d_hidden must be divisible by num_heads (4), got 66"),
        ({"num_heads": 3, "head_dim": 0}, "head_dim must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_shapes(options: dict[str, Any], message: str) -> None:
    for name in layers.LAYERS:
        with pytest.raises(BadOption) as error:
            layers.build(name, dim=DIM, **options)
        assert str(error.value) == message


def test_a_mask_from_outside_is_refused() -> None:
    layer = layers.build("KvtAttention", dim=DIM, num_heads=3)
    assert_same(layer(tokens(), attn_mask=None, is_causal=False), layer(tokens()))
    with pytest.raises(ValueError, match="KvtAttention chooses its own neighbors and takes no attention mask"):
        layer(tokens(), attn_mask=torch.ones(37, 37, dtype=torch.bool))
    with pytest.raises(ValueError, match="takes no attention mask"):
        layer(tokens(), is_causal=True)


def test_what_depends_on_the_shape_is_made_once_a_shape() -> None:
    layer = build("SparseAttention")
    cpu = torch.device("cpu")
    assert layer.mask(11, cpu) is layer.mask(11, cpu)
    assert layer.mask(11, cpu) is not layer.mask(13, cpu)
    assert layer.mask(11, cpu).shape == (11, 11)


def test_a_first_forward_in_inference_mode_does_not_stop_training() -> None:
    for spec in ("SparseAttention", "ConvNNAttention(coordinate_encoding=True)", "SampledKnnAttention", "NeighborhoodAttention"):
        layer = layers.build(spec, dim=DIM, num_heads=3).eval()
        with torch.inference_mode():
            layer(tokens())
        layer(tokens().requires_grad_()).sum().backward()


@pytest.mark.parametrize("name", list(layers.LAYERS))
def test_layers_can_be_copied_and_have_no_state_besides_weights(name: str) -> None:
    layer = layers.build(name, dim=DIM, num_heads=3).eval()
    layer(tokens())
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(tokens()), layer(tokens()))
    assert layer.state_dict().keys() == dict(layer.named_parameters()).keys()


# ---------------------------------------------------------------- the registry


NAMES = [
    "Attention",
    "ConvNNAttention",
    "KvtAttention",
    "LocalAttention",
    "NeighborhoodAttention",
    "SparseAttention",
    "SampledKnnAttention",
    "BranchConv",
    "BranchAttention",
]


def test_the_nine_layers() -> None:
    assert list(layers.LAYERS)[: len(NAMES)] == NAMES  # plugins come after
    for name in NAMES:
        assert layers.LAYERS[name].__doc__


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_works_on_a_small_image_with_no_options(name: str) -> None:
    layer = layers.build(name, dim=64, num_heads=4, grid=(4, 4), num_prefix_tokens=1)
    out = layer(tokens(n=17, dim=64))
    assert out.shape == (2, 17, 64)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_options_are_read_through_the_bases() -> None:
    assert {"K", "branch_ratio", "kernel_size", "sampling_type", "qkv_bias", "grid"} <= options_of(layers.LAYERS["BranchConv"]).keys()
    assert "near_dim" not in options_of(layers.LAYERS["ConvNNAttention"])
    assert options_of(layers.LAYERS["ConvNNAttention"])["K"] == 9


def test_an_option_that_the_layer_does_not_have() -> None:
    with pytest.raises(BadOption, match="has no option 'K'"):
        layers.build("Attention(K=3)", dim=DIM, num_heads=3)
    assert layers.pick_options("KvtAttention", {"K": 3, "kernel_size": 5}) == {"K": 3}


def test_the_call_wins_over_the_options() -> None:
    assert layers.build("KvtAttention(K=3)", dim=DIM, num_heads=3, K=5).K == 3
