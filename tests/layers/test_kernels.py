"""The operators on neighbor lists against loops."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from layers import kernels
from layers.kernels import bag, nearest, pair_dot, rank_conv, rank_conv_backward, spread, top_columns
from tests.layers.reference import assert_same

G, N, D, E = 3, 11, 5, 7


def lists(m: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Neighbors with repeats, and weights: (G, N, K)."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(m, (G, N, K), generator=generator)
    return index, torch.randn(G, N, K, generator=generator, dtype=torch.float64)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_top_columns_by_hand() -> None:
    scores = np.array([[-1.0, 3.0, -0.5, 3.0, 0.0], [-np.inf, -2.0, -2.0, np.inf, 1e-30]], np.float32)
    assert top_columns(scores, 3).tolist() == [[1, 3, 4], [3, 4, 1]]
    assert top_columns(scores, 5).tolist() == [[1, 3, 4, 2, 0], [3, 4, 1, 2, 0]]
    assert top_columns(scores, 0).shape == (2, 0)
    none = np.array([[1.0, np.nan, np.inf, 2.0, -np.nan]], np.float32)  # of either sign
    assert np.signbit(none).any()
    assert top_columns(none, 3).tolist() == [[1, 4, 2]]


@pytest.mark.parametrize(("m", "K"), [(2, 1), (13, 13), (257, 5), (301, 301), (1031, 64)])
def test_top_columns_orders_equals_by_column(m: int, K: int) -> None:
    scores = torch.randint(-4, 5, (17, m), generator=torch.Generator().manual_seed(m)).float()
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :K]
    assert np.array_equal(top_columns(scores.numpy(), K), wanted.numpy())


@pytest.mark.parametrize("block", [1, 40, 2**17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_in_blocks_of_any_size(block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)
    q, k = random(G, N, D).to(dtype), random(G, 13, D, seed=2).to(dtype)
    scores = q @ k.transpose(1, 2)
    score, index = nearest(q, k, 4, None)
    wanted = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(index, wanted.indices[..., :4])
    assert_same(score, wanted.values[..., :4], 1e-6)


@pytest.mark.parametrize("block", [20, 2**17])
def test_nearest_leaves_a_row_out_of_its_own_list(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)
    own = torch.tensor([0, 4, 10])
    score, index = nearest(random(G, N, D), random(G, 3, D, seed=2), 3, own)
    for n in range(N):
        rows = own[index[:, n]]
        assert (rows[:, :2] != n).all()
        assert torch.equal(score[:, n].isinf(), rows == n)


@pytest.mark.parametrize(("m", "K"), [(11, 3), (11, 1), (97, 2)])  # dense weights, and one rank after the other
def test_sums_over_neighbors_against_loops(m: int, K: int) -> None:
    index, weight = lists(m, K)
    x, y = random(G, N, D), random(G, m, D, seed=2)
    gathered, spreaded, dots = torch.zeros(G, N, D), torch.zeros(G, m, D), torch.zeros(G, N, K)
    gathered, spreaded, dots = gathered.double(), spreaded.double(), dots.double()
    for g, n, r in np.ndindex(G, N, K):
        gathered[g, n] += weight[g, n, r] * y[g, index[g, n, r]]
        spreaded[g, index[g, n, r]] += weight[g, n, r] * x[g, n]
        dots[g, n, r] = x[g, n] @ y[g, index[g, n, r]]
    assert_same(bag(y, index, weight), gathered, 1e-12)
    assert_same(spread(x, index, weight, m), spreaded, 1e-12)
    assert_same(pair_dot(x, y, index), dots, 1e-12)


@pytest.mark.parametrize("depthwise", [True, False])
def test_rank_conv_is_a_conv1d_over_laid_out_neighbors(depthwise: bool) -> None:
    index, weight = lists(13, 4)
    v = random(G, 13, D)
    conv = torch.nn.Conv1d(D, D if depthwise else E, 4, stride=4, groups=D if depthwise else 1, bias=False).double()
    laid_out = torch.stack([v[g][index[g]] for g in range(G)]) * weight[..., None]  # (G, N, K, D)
    wanted = conv(laid_out.permute(0, 3, 1, 2).reshape(G, D, N * 4)).transpose(1, 2)
    kernel = conv.weight[:, 0].t() if depthwise else conv.weight.permute(2, 0, 1)
    assert_same(rank_conv(v, index, weight, kernel), wanted, 1e-12)


@pytest.mark.parametrize(("m", "K"), [(13, 4), (97, 2)])
def test_gradients_of_the_kernels(m: int, K: int) -> None:
    index, weight = lists(m, K)
    x, y = random(G, N, D).requires_grad_(), random(G, m, D, seed=2).requires_grad_()
    weight.requires_grad_()
    depthwise, full = random(K, D, seed=3).requires_grad_(), random(K, E, D, seed=4).requires_grad_()
    gradcheck = torch.autograd.gradcheck
    assert gradcheck(lambda y, w: bag(y, index, w), (y, weight), fast_mode=True)
    assert gradcheck(lambda x, w: spread(x, index, w, m), (x, weight), fast_mode=True)
    assert gradcheck(lambda x, y: pair_dot(x, y, index), (x, y), fast_mode=True)
    assert gradcheck(lambda x, y: nearest(x, y, K, None)[0], (x, y), fast_mode=True)
    assert gradcheck(lambda y, w, k: rank_conv(y, index, w, k), (y, weight, depthwise), fast_mode=True)
    assert gradcheck(lambda y, w, k: rank_conv(y, index, w, k), (y, weight, full), fast_mode=True)


def test_sums_over_neighbors_can_be_differentiated_twice() -> None:
    index, weight = lists(13, 4)
    y = random(G, 13, D).requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda y, w: bag(y, index, w), (y, weight), fast_mode=True)


@pytest.mark.parametrize(("m", "K"), [(13, 4), (97, 2)])
@pytest.mark.parametrize("depthwise", [True, False])
def test_the_operators_tell_a_compiler_the_truth(m: int, K: int, depthwise: bool) -> None:
    """Shapes and strides as announced, whatever the strides of the inputs."""
    index, weight = lists(m, K)
    x, y = random(G, D, N).transpose(1, 2), random(G, D, m, seed=2).transpose(1, 2)
    kernel = random(D, K, seed=3).t() if depthwise else random(E, D, K, seed=3).permute(2, 0, 1)
    grad = random(D if depthwise else E, N, G).permute(2, 1, 0)
    for op, inputs in [
        (nearest, (x, y, K, None)),
        (nearest, (x, y, 2, torch.arange(m))),
        (bag, (y, index, weight)),
        (spread, (x, index, weight, m)),
        (pair_dot, (x, y, index)),
        (rank_conv, (y, index, weight, kernel)),
        (rank_conv_backward, (grad, y, index, weight, kernel)),
    ]:
        inputs = tuple(i.requires_grad_() if isinstance(i, Tensor) and i.is_floating_point() else i for i in inputs)
        torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_a_flop_counter_sees_the_operators() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    index, weight = lists(13, 4)
    with FlopCounterMode(display=False) as counter:
        nearest(random(G, N, D), random(G, 13, D), 4, None)
        bag(random(G, 13, D), index, weight)
    assert counter.get_total_flops() == 2 * G * N * 13 * D + 2 * G * N * 4 * D


WITHOUT = """
import sys
sys.modules["native"] = None  # as where the folder is not there
import torch
from classifiers.bank import Bank
from layers import LAYERS, build
for name in LAYERS:
    x = torch.randn(2, 17, 12, requires_grad=True)
    build(name, dim=12, num_heads=3, grid=(4, 4), num_prefix_tokens=1)(x).sum().backward()
bank = Bank(4)
bank.add(torch.eye(4), torch.arange(4), torch.arange(4))
assert bank.search(torch.eye(4), 1).index.flatten().tolist() == [0, 1, 2, 3]
"""


def test_everything_works_where_native_is_not_there(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kernels: torch (native/ is not there)") == 1
