"""ConvNN attention against its definition in loops, and what its options promise."""

from typing import Any

import pytest
import torch
from torch import Tensor

import layers
from layers import ConvNNAttention
from layers import functional as L
from tests.layers.reference import DIM, GRID, PREFIX, TOKENS, assert_same, build, convnn_row, mixed, tokens
from utils import BadOption


def kernel_of(layer: Any) -> Tensor:
    """The convolution as a (K, E, D) matrix a rank."""
    weights = list(layer.conv.parameters())
    if layer.convolution_type == "standard":
        return weights[0].permute(2, 0, 1)
    depthwise = torch.stack([torch.diag(column) for column in weights[0][:, 0].t()])
    return depthwise if len(weights) == 1 else weights[1][..., 0] @ depthwise


def with_place(x: Tensor, place: Tensor | None) -> Tensor:
    return x if place is None else torch.cat([x, place], -1)


def by_loops(layer: Any, x: Tensor, candidates: list[int] | None, place: Tensor | None) -> Tensor:
    in_values = None if layer.convolution_type == "depthwise" else place

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The published scale is that of a head, without the coordinates.
        q = with_place(q, place)
        if place is not None and layer.magnitude_type == "matmul":
            q = q * (q.shape[1] / layer.head_dim) ** 0.5
        k, v = with_place(k, place), with_place(v, in_values)
        kernel, options = kernel_of(layer), (layer.K, layer.magnitude_type, layer.softmax_topk_val, candidates, layer.self_score)
        return torch.stack([convnn_row(n, q, k, v, kernel, *options) for n in range(len(q))])

    return mixed(layer, x, mix)


def randomized(layer: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    for weight in layer.conv.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    return layer.double()


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("convolution", ["depthwise", "standard", "depthwise-separable"])
@pytest.mark.parametrize("magnitude", L.MAGNITUDES)
@pytest.mark.parametrize("softmax", [True, False])
def test_all_tokens(magnitude: str, softmax: bool, convolution: str, num_heads: int) -> None:
    layer = randomized(
        ConvNNAttention(12, num_heads, K=5, magnitude_type=magnitude, softmax_topk_val=softmax, convolution_type=convolution)
    )
    x = tokens(n=11, dim=12, dtype=torch.float64)
    assert_same(layer(x), by_loops(layer, x, None, None), 1e-8)


@pytest.mark.parametrize("magnitude", L.MAGNITUDES)
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("own", ["one", "real"])
@pytest.mark.parametrize(("K", "samples"), [(4, 7), (9, 8), (9, 3), (1, 3)])  # enough candidates, too few for some tokens, for all
def test_spatial_samples(K: int, samples: int, own: str, softmax: bool, magnitude: str) -> None:
    options: dict[str, Any] = {"magnitude_type": magnitude, "softmax_topk_val": softmax, "self_score": own}
    layer = randomized(ConvNNAttention(12, 2, K=K, sampling_type="spatial", num_samples=samples, **options))
    x = tokens(n=13, dim=12, dtype=torch.float64)
    candidates = torch.linspace(0, 12, samples).long().tolist()
    assert_same(layer(x), by_loops(layer, x, candidates, None), 1e-8)


@pytest.mark.parametrize("convolution", ["depthwise", "standard", "depthwise-separable"])
@pytest.mark.parametrize("encoding", [True, "1d", "2d"])
@pytest.mark.parametrize("magnitude", L.MAGNITUDES)
def test_coordinates_with_every_convolution(magnitude: str, encoding: bool | str, convolution: str) -> None:
    options: dict[str, Any] = {"magnitude_type": magnitude, "convolution_type": convolution, "coordinate_encoding": encoding}
    layer = randomized(ConvNNAttention(12, 2, K=3, grid=(3, 4), num_prefix_tokens=1, **options))
    x = tokens(n=13, dim=12, dtype=torch.float64)
    cpu = torch.device("cpu")
    place = L.plane_coordinates((3, 4), 1, cpu) if encoding == "2d" else L.line_coordinates(13, cpu)
    assert_same(layer(x), by_loops(layer, x, None, place.double()), 1e-6)  # places are made in float32


def test_a_flag_without_a_value_is_the_published_encoding() -> None:
    assert ConvNNAttention(DIM, 3, coordinate_encoding=True).coordinate_encoding == "1d"
    assert ConvNNAttention(DIM, 3, coordinate_encoding=False).coordinate_encoding == ""


@pytest.mark.parametrize("magnitude", L.MAGNITUDES)
def test_missing_ranks_weigh_nothing(magnitude: str) -> None:
    for softmax in (True, False):
        options: dict[str, Any] = {"magnitude_type": magnitude, "softmax_topk_val": softmax}
        layer = build("ConvNNAttention(K=9, sampling_type='spatial', num_samples=4)", **options)
        q, k = torch.randn(2, 2, 3, TOKENS, DIM // 3)
        candidates = layer.candidates(TOKENS, q.device)
        index, weight = layer.neighbors(*L.comparable(q, k, magnitude), candidates)
        candidates = candidates.tolist()
        for n in range(TOKENS):
            listed = len({*candidates, n})
            assert (weight[:, :, n, :listed] != 0).all()
            assert (weight[:, :, n, listed:] == 0).all()
        assert index.min() >= 0
        assert index.max() < TOKENS
        assert torch.equal(index[..., 0], torch.arange(TOKENS).expand(2, 3, -1))


def test_random_candidates_are_drawn_anew_in_training_only() -> None:
    layer = build("ConvNNAttention(K=5, sampling_type='random', num_samples=11, eval_sampling='fixed')")
    x = tokens()
    torch.manual_seed(0)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)
    layer.eval()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(torch.get_rng_state(), before)  # evaluation does not move the training's draws


def test_eval_over_all_tokens_reads_beyond_the_draw() -> None:
    layer = build("ConvNNAttention(K=5, sampling_type='random', num_samples=11)").eval()
    assert layer.candidates(TOKENS, torch.device("cpu")).tolist() == list(range(TOKENS))
    assert len(layer.train().candidates(TOKENS, torch.device("cpu"))) == 11


def test_grid_candidates_are_patches() -> None:
    layer = build("ConvNNAttention(K=5, sampling_type='grid', num_samples=12)")
    candidates = layer.candidates(TOKENS, torch.device("cpu"))
    assert len(candidates) == 12
    assert candidates.min() >= PREFIX


def test_starts_as_plain_top_k_attention() -> None:
    depthwise, standard = build("ConvNNAttention(K=7)"), build("ConvNNAttention(K=7, convolution_type='standard')")
    assert torch.equal(depthwise.conv.weight, torch.ones(22, 1, 7))
    assert standard.conv.weight.shape == (22, 22, 7)
    separable = build("ConvNNAttention(K=7, convolution_type='depthwise-separable')").state_dict()
    assert separable["conv.0.weight"].shape == (22, 1, 7)
    assert separable["conv.1.weight"].shape == (22, 22, 1)


def test_equal_scores_go_to_the_first_tokens() -> None:
    """Images with flat background give tokens that are the same: the list must not depend on the machine."""
    layer = build("ConvNNAttention(K=5)")
    q = k = torch.ones(1, 3, TOKENS, 22)
    _, index, weight = layer.attend(q, k, k, 5, 1.0)
    assert (index == torch.arange(5)).all()
    assert_same(weight, torch.full_like(weight, 0.2), 1e-6)


def test_dropout_is_on_the_output_and_off_in_eval() -> None:
    layer = build("ConvNNAttention(K=5)", attention_dropout=0.5)
    q, k, v = torch.randn(3, 2, 3, TOKENS, 22)
    dropped = layer.mix(q, k, v)
    assert 0.4 < (dropped == 0).float().mean() < 0.6
    assert (layer.eval().mix(q, k, v) != 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"K": 0}, "K must be a whole number of at least 1, got 0"),
        ({"K": 38}, "K must be at most the number of candidate tokens (37), got 38"),
        ({"magnitude_type": "manhattan"}, "magnitude_type must be one of matmul, cosine, euclidean, got 'manhattan'"),
        (
            {"convolution_type": "dense"},
            "convolution_type must be one of depthwise, standard, depthwise-separable (did you mean 'depthwise'?), got 'dense'",
        ),
        ({"sampling_type": "spatial"}, "num_samples must be at least 1 with sampling_type spatial, got -1"),
        ({"sampling_type": "random"}, "num_samples must be at least 1 with sampling_type random, got -1"),
        ({"sampling_type": "random", "num_samples": 38}, "num_samples must be at most the number of tokens to choose from (37), got 38"),
        (
            {"sampling_type": "spatial", "num_samples": 8, "sample_padding": 15},
            "num_samples must be at most the number of tokens to choose from (7), got 8",
        ),
        (
            {"sampling_type": "grid", "num_samples": 4, "sample_padding": 2},
            "num_samples must be at most the number of tokens to choose from (3), got 4",
        ),
        ({"coordinate_encoding": "3d"}, "coordinate_encoding must be one of False, True, 1d, 2d, got '3d'"),
        ({"self_score": "two"}, "self_score must be one of one, real, got 'two'"),
        ({"eval_sampling": "none"}, "eval_sampling must be one of all, fixed, got 'none'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption) as error:
        ConvNNAttention(DIM, 3, grid=GRID, num_prefix_tokens=PREFIX, **options)
    assert str(error.value) == message


def test_without_a_grid_the_first_forward_says_the_same() -> None:
    layer = ConvNNAttention(DIM, 3, K=38)
    with pytest.raises(BadOption, match=r"^K must be at most the number of candidate tokens \(37\), got 38$"):
        layer(tokens())
    layer = ConvNNAttention(DIM, 3, sampling_type="random", num_samples=38)
    with pytest.raises(BadOption, match=r"^num_samples must be at most the number of tokens to choose from \(37\), got 38$"):
        layer(tokens())
    for options in ({"sampling_type": "grid", "num_samples": 4}, {"coordinate_encoding": "2d"}):
        with pytest.raises(BadOption, match="needs the token grid"):
            ConvNNAttention(DIM, 3, **options)


def test_a_grid_of_another_size_is_refused() -> None:
    for options in ("sampling_type='grid', num_samples=4", "coordinate_encoding='2d'"):
        with pytest.raises(BadOption, match=r"^grid must fit the 23 tokens"):
            build(f"ConvNNAttention(K=3, {options})")(tokens(n=23))


@pytest.mark.parametrize("grid", ["3", "(3,)", "(3, 0)", "'ab'", "(2.0, 2)", "(True, 4)"])
def test_a_grid_is_two_whole_numbers(grid):
    for name in ("ConvNNAttention", "KvtAttention", "NeighborhoodAttention", "SampledKnnAttention"):
        with pytest.raises(BadOption, match=r"^grid must be \(rows, columns\), whole numbers of at least 1"):
            layers.build(f"{name}(grid={grid}, K=1)", dim=6, num_heads=2, grid=(4, 4))


@pytest.mark.parametrize("sampling_type", ["grid", "spatial", "random"])
def test_one_sample_and_one_neighbor_leave_each_token_itself(sampling_type):
    layer = layers.build("ConvNNAttention", dim=6, num_heads=2, grid=(4, 4), K=1, sampling_type=sampling_type, num_samples=1).train()
    x = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 5] += 1
    same = (layer(x) == layer(changed)).all(2)
    assert same.sum().item() == 2 * 15
    assert not same[:, 5].any()
