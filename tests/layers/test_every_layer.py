"""What holds for every layer: shapes, gradients, determinism, half precision, compilation, memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from layers import kernels
from tests.layers.reference import DIM, GRID, HEADS, PREFIX, SPECS, TOKENS, assert_same, build, largest_allocation, tokens

LISTS = [s for s in SPECS if s.startswith(("ConvNN", "Kvt", "Sampled", "Branch"))]  # those that hold lists of neighbors


@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_shapes_and_gradients(spec: str, num_heads: int) -> None:
    layer = build(spec, num_heads)
    x = tokens().requires_grad_()
    out = layer(x)
    assert out.shape == x.shape
    out.square().mean().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 0


@pytest.mark.parametrize("spec", [s for s in SPECS if "grid" not in s and "2d" not in s and "dims" not in s])
def test_any_sequence_length(spec: str) -> None:
    layer = build(spec)
    for n in (11, 53):
        layer(tokens(n=n).requires_grad_()).sum().backward()


@pytest.mark.parametrize("spec", SPECS)
def test_eval_is_deterministic_bit_for_bit(spec: str) -> None:
    layer = build(spec, attention_dropout=0.3, dropout=0.3).eval()
    x = tokens()
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("spec", SPECS)
def test_gradcheck_of_the_layer(spec: str) -> None:
    layer = build(spec).double().eval()
    names, weights = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    x = tokens(batch=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("magnitude", ["matmul", "cosine", "euclidean"])
@pytest.mark.parametrize("sampled", [{}, {"sampling_type": "spatial", "num_samples": 3, "self_score": "real"}])
def test_gradcheck_of_every_similarity_at_equal_queries_and_keys(sampled: dict[str, Any], magnitude: str, softmax: bool) -> None:
    layer = build("ConvNNAttention(K=4)", 2, 4, magnitude_type=magnitude, softmax_topk_val=softmax, **sampled).double()
    q, v = torch.randn(2, 1, 2, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    k = q.clone()
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    assert torch.autograd.gradcheck(layer.mix, inputs)
    assert torch.autograd.gradcheck(lambda q, v: layer.mix(q, q, v), (inputs[0], inputs[2]))


@pytest.mark.parametrize("spec", [s for s in SPECS if "(K=5" in s and "grid" not in s and "random" not in s] + ["Attention"])
def test_gradcheck_of_the_others_at_equal_queries_and_keys(spec: str) -> None:
    layer = build(spec, 2, 8).double().eval()
    width = layer.head_dim
    q, v = torch.randn(2, 1, 2, TOKENS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    inputs = tuple(t.requires_grad_() for t in (q, q.detach().clone(), v))
    assert torch.autograd.gradcheck(layer.mix, inputs, fast_mode=True)


@pytest.mark.parametrize("spec", LISTS)
def test_equal_tokens_have_finite_gradients(spec: str) -> None:
    layer = build(spec)
    layer.qkv.weight.data[DIM : 2 * DIM] = layer.qkv.weight.data[:DIM]  # keys are queries
    x = tokens()[:, :1].expand(-1, TOKENS, -1).clone().requires_grad_()
    layer(x).square().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


POSITION_FREE = (
    "Attention",
    "KvtAttention(K=5)",
    "ConvNNAttention(K=5)",
    "ConvNNAttention(K=5, magnitude_type='euclidean', convolution_type='standard')",
    "ConvNNAttention(K=5, magnitude_type='cosine', convolution_type='depthwise-separable')",
    "SparseAttention(sparse_mode='all')",
    "BranchAttention(K=5)",
)


@pytest.mark.parametrize("spec", POSITION_FREE)
def test_permuting_the_tokens_permutes_the_output(spec: str) -> None:
    layer = build(spec)
    x, order = tokens(), torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    assert_same(layer(x[:, order]), layer(x)[:, order])


def readers(spec: str) -> Tensor:
    """Which rows change when one token does: (N, N), row by changed column."""
    layer = build(spec)
    x = tokens(batch=1)
    before = layer(x)
    changed = []
    for j in range(TOKENS):
        other = x.clone()
        other[:, j] += 1
        changed.append((layer(other) != before).any(-1)[0])
    return torch.stack(changed, 1)


@pytest.mark.parametrize(
    "spec",
    [
        "NeighborhoodAttention(K=5)",
        "NeighborhoodAttention(K=3, dilation=4)",
        "NeighborhoodAttention(K=3, window_dims=2)",
        "SparseAttention(sparse_context_window=5)",
        "SparseAttention(sparse_mode='strided', sparse_context_window=3)",
    ],
)
def test_one_token_changes_only_what_may_read_it(spec: str) -> None:
    mask = build(spec).mask(TOKENS, torch.device("cpu"))
    assert torch.equal(readers(spec), mask)
    assert not mask.all()


def test_one_token_changes_only_the_windows_that_look_at_it() -> None:
    place = torch.arange(TOKENS)
    near = (place // 7 - place[:, None] // 7).abs() <= 1
    assert torch.equal(readers("LocalAttention(window=7, exact_window=False)"), near)
    assert torch.equal(readers("LocalAttention(window=7)"), near & ((place - place[:, None]).abs() <= 7))


@pytest.mark.parametrize("spec", SPECS)
def test_bfloat16_autocast(spec: str) -> None:
    layer = build(spec)
    x = tokens()
    torch.manual_seed(0)
    exact = layer(x)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x.requires_grad_())
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    if spec not in LISTS:  # bfloat16 projections choose some other neighbors, as they should
        assert_same(out, exact, 0.02)
    halved = build(spec).bfloat16()
    assert halved(x.detach().bfloat16()).dtype == torch.bfloat16


def test_autocast_does_not_reach_the_selection() -> None:
    q, k = torch.randn(2, 6, 101, 22, generator=torch.Generator().manual_seed(0))
    wanted = kernels.nearest(q, k, 9, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = kernels.nearest(q, k, 9, None)
        assert torch.equal(got[1], wanted[1])
        assert torch.equal(got[0], wanted[0])
        assert kernels.pair_dot(q, k, got[1]).dtype == torch.float32


@pytest.mark.parametrize("spec", SPECS)
def test_one_graph_without_breaks(spec: str) -> None:
    torch._dynamo.reset()
    layer = build(spec)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=False)
    for training in (True, False) if "random" in spec or "Sampled" in spec else (True,):  # the others do the same in both
        layer.train(training)
        x = tokens()
        torch.manual_seed(0)
        wanted = layer(x)
        torch.manual_seed(0)
        assert_same(compiled(x), wanted, 1e-6)


@pytest.mark.parametrize("spec", ["ConvNNAttention(K=5)", "KvtAttention(K=5)", "NeighborhoodAttention(K=5)", "SampledKnnAttention(K=5)"])
def test_one_graph_with_its_backward(spec: str) -> None:
    torch._dynamo.reset()
    layer = build(spec).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    plain, traced = (tokens().requires_grad_() for _ in range(2))
    assert plain.grad is None
    layer(plain).square().mean().backward()
    wanted = [p.grad.clone() for p in (plain, *layer.parameters())]
    layer.zero_grad()
    compiled(traced).square().mean().backward()
    for got, want in zip((traced, *layer.parameters()), wanted, strict=True):
        assert_same(got.grad, want, 1e-6)


@pytest.mark.parametrize("magnitude", ["matmul", "cosine", "euclidean"])
@pytest.mark.parametrize("spec", LISTS)
def test_neighbors_are_never_laid_out(spec: str, magnitude: str) -> None:
    """No (B, H, N, K, D) tensor, forward or backward, and nothing as large."""
    options: dict[str, Any] = {"magnitude_type": magnitude} if "magnitude_type" not in spec and "ConvNN" in spec else {}
    layer = build(spec.replace("K=5", "K=9"), **options)
    width = layer.near_dim if spec.startswith("Branch") else layer.head_dim
    laid_out = 4 * 2 * HEADS * TOKENS * 9 * width  # bytes; more than the projections and the scores have
    x = tokens().requires_grad_()
    assert largest_allocation(lambda: layer(x).sum().backward()) < laid_out


def test_context_reaches_the_layers_that_ask() -> None:
    assert build("NeighborhoodAttention(K=3)").grid == GRID
    assert build("ConvNNAttention").num_prefix_tokens == PREFIX
