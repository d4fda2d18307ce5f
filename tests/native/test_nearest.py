"""The C code against float64 brute force, and against what layers/kernels.py computes without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import native
from layers import kernels, lists
from tests.native.reference import SIZES, assert_near, heads, random

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler here")

ROOT = Path(__file__).parent.parent.parent
SCANS = [  # Q, M, D, K
    (1, 1, 1, 1), (9, 5, 8, 5), (7, 389, 20, 9), (23, 1537, 32, 16), (65, 997, 64, 64), (3, 4001, 80, 21), (17, 769, 256, 16),
    (5, 401, 3, 100),
]  # fmt: skip


def brute(q: Tensor, k: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Best first, equals by column."""
    scores = q.double() @ k.double().transpose(2, 3)
    best = scores.sort(dim=-1, descending=True, stable=True)
    return best.values[..., :K], best.indices[..., :K]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_selection(size: tuple[int, ...], threads: int) -> None:
    B, H, N, M, D, K = size
    q, k = heads(B, H, N, D, 0), heads(B, H, M, D, 1)
    score, index = native.nearest(q, k, K, None)
    wanted, _ = brute(q, k, K)
    torch.testing.assert_close(score.double(), wanted, atol=1e-5, rtol=1e-5)
    # In float32 two scores may change places; those that are listed are what they say, and each column is there once.
    torch.testing.assert_close((q.double() @ k.double().transpose(2, 3)).gather(3, index), wanted, atol=1e-5, rtol=1e-5)
    assert (index.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_over_neighbors(size: tuple[int, ...]) -> None:
    B, H, N, M, D, K = size
    x, y, weight, factor = heads(B, H, N, D, 0), heads(B, H, M, D, 1), random(B, H, N, K, seed=2), random(K, D, seed=3)
    index = torch.randint(M, (B, H, N, K), generator=torch.Generator().manual_seed(4))
    of_list = y.double().gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, D)).view(B, H, N, K, D)
    for f in (None, factor):
        by_rank = weight.double()[..., None] * (1 if f is None else f.double())  # (B, H, N, K, D or 1)
        assert_near(native.bag(y, index, weight, f), (by_rank * of_list).sum(3))
        dots = (x.double()[..., None, :] * (1 if f is None else f.double()) * of_list).sum(4)
        assert_near(native.pair_dot(x, y, index, f), dots)
        onto = torch.zeros(B, H, M, D).double()
        sent = (by_rank * x.double()[..., None, :]).expand(-1, -1, -1, -1, D)
        onto.scatter_add_(2, index.flatten(2)[..., None].expand(-1, -1, -1, D), sent.reshape(B, H, N * K, D))
        assert_near(native.spread(x, index, weight, M, f), onto)
    gradient = (weight.double()[..., None] * x.double()[..., None, :] * of_list).sum((0, 1, 2))
    assert_near(native.factor_gradient(x, y, index, weight), gradient)


def test_whatever_the_number_of_threads_the_numbers_are_the_same() -> None:
    before = torch.get_num_threads()
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        q, k, v = (heads(2, 3, 29, 20, seed).clone().requires_grad_() for seed in range(3))
        factor = random(7, 20, seed=3).requires_grad_()
        found_by_scan = native.scan(q[0, 0].detach(), k.detach().reshape(-1, 20), None, 7)
        score, index = kernels.nearest(q, k, 7, None)
        kernels.rank_conv(v, index, score.softmax(-1), factor).square().sum().backward()
        found.append([score, index, *found_by_scan, *(t.grad for t in (q, k, v, factor))])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_equal_scores_go_by_column_and_what_is_no_number_comes_as_without() -> None:
    """As in kernels.top_columns: NaN above infinity, whatever its sign. A score of -0 is a sum, 0 + -0 = 0."""
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[1.0, 3, 1, 3, 3], [-inf, 2, 2, inf, 0], [nan, 1, 2, nan, 9], [0.0, -0.0, 0.0, -1, -0.0], [1, inf, nan, 0, nan]])
    rows[4, 2].view(torch.int32).bitwise_or_(-(2**31))  # inf - inf has this sign on x86
    k = rows.t().reshape(1, 1, 5, 5).contiguous()  # channel n of the columns has the scores of case n
    wanted = [[1, 3, 4], [3, 1, 2], [0, 3, 4], [0, 1, 2], [2, 4, 1]]
    for n, of_row in enumerate(wanted):
        one = k[..., n : n + 1].contiguous()
        assert native.nearest(torch.ones(1, 1, 1, 1), one, 3, None)[1].flatten().tolist() == of_row
    many = torch.ones(1, 1, 1025, 1)
    assert native.nearest(many[:, :, :2], many, 9, None)[1][0, 0].tolist() == [list(range(9))] * 2


@pytest.mark.parametrize("size", SCANS, ids=str)
def test_a_scan(size: tuple[int, ...], threads: int) -> None:
    Q, M, D, K = size
    q, x, more = random(Q, D, seed=0), random(M, D, seed=1), random(M, seed=2)
    for added in (None, more):
        exact = q.double() @ x.double().T + (0 if added is None else added.double())
        wanted = exact.sort(dim=1, descending=True, stable=True).values[:, :K]
        score, index = native.scan(q, x, added, K)
        torch.testing.assert_close(score.double(), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(exact.gather(1, index), wanted, atol=1e-5, rtol=1e-5)
        assert (index.sort(1).values.diff(dim=1) > 0).all()  # each row once


@pytest.mark.parametrize("K", [1, 2, 13, 64])
def test_a_scan_of_whole_numbers_is_exact_and_equals_go_by_row(K: int, threads: int) -> None:
    """Few different scores, so that the K-th is tied with many, in chunks before and after it."""
    generator = torch.Generator().manual_seed(K)
    q, x = (torch.randint(-2, 3, (count, 5), generator=generator).float() for count in (19, 1301))
    wanted = (q @ x.T).sort(dim=1, descending=True, stable=True)
    score, index = native.scan(q, x, None, K)
    assert torch.equal(index, wanted.indices[:, :K])
    assert torch.equal(score, wanted.values[:, :K])


@pytest.mark.parametrize("way", [1, -1])
def test_a_scan_of_rows_that_come_in_order(way: int) -> None:
    """The worst ones first: each is better than all before. And the best ones first."""
    x = torch.arange(way * 900.0, way * -900, -way)[:, None]
    score, index = native.scan(torch.ones(3, 1), x, None, 40)
    assert torch.equal(score, torch.arange(40) * -1.0 + (900 if way > 0 else 899) + torch.zeros(3, 1))
    assert (index == (torch.arange(40) if way > 0 else torch.arange(1799, 1759, -1))).all()


def test_what_is_no_number_is_never_found_by_a_scan() -> None:
    more = torch.zeros(500)
    more[:490], more[495], more[496] = torch.nan, torch.inf, -torch.inf
    score, index = native.scan(torch.zeros(2, 3), torch.ones(500, 3), more, 11)
    assert index.tolist() == [[495, 490, 491, 492, 493, 494, 497, 498, 499, -1, -1]] * 2
    assert score[0].tolist() == [torch.inf, *[0.0] * 8, -torch.inf, -torch.inf]


def test_a_scan_takes_no_memory_for_queries_by_rows() -> None:
    """4,096 x 100,000 scores would be 1.6 GB."""
    script = (
        "import resource, torch, native\n"
        "q, x = torch.randn(4096, 4), torch.randn(100_000, 4)\n"
        "native.scan(q[:8], x, None, 3)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "native.scan(q, x, None, 3)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 4000, f"{done.stdout} kB"


def kept(scores: Tensor, K: int, width: int) -> tuple[Tensor, Tensor]:
    """The K best of scores (Q, M) in bfloat16, of which `width` columns are handed over at a time."""
    best, chosen = torch.full((len(scores), K), -torch.inf), torch.full((len(scores), K), -1)
    for first in range(0, scores.shape[1], width):
        native.keep(scores[:, first : first + width].contiguous(), first, best, chosen)
    return best, chosen


KEPT = [(1, 1, 1, 1), (7, 389, 9, 389), (23, 1537, 16, 307), (3, 4001, 21, 4001), (5, 401, 100, 83), (2, 97, 97, 97)]  # Q, M, K, at a time


@pytest.mark.parametrize("size", KEPT, ids=str)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_scores_in_bfloat16_are_kept(size: tuple[int, ...], spread: float, threads: int) -> None:
    """The larger the spread, the fewer columns are equal; these go by their place."""
    Q, M, K, width = size
    scores = (spread * random(Q, M, seed=K)).bfloat16()
    wanted = scores.float().sort(dim=1, descending=True, stable=True)
    best, chosen = kept(scores, K, width)
    assert torch.equal(best, wanted.values[:, :K])
    assert torch.equal(chosen, wanted.indices[:, :K])


def test_what_is_no_number_is_never_kept() -> None:
    for few, number in ((3, 2.0), (3, -torch.inf), (0, 1.0)):  # fewer than are kept
        scores = torch.full((2, 501), torch.nan, dtype=torch.bfloat16)
        scores[:, 100 : 100 + few] = number
        best, chosen = kept(scores, 5, 501)
        there = few if number > -torch.inf else 0  # minus infinity is no better than none
        assert chosen.tolist() == [[*range(100, 100 + there), *[-1] * (5 - there)]] * 2
        assert best.tolist() == [[number] * there + [-torch.inf] * (5 - there)] * 2
    best, chosen = kept(torch.full((1, 501), torch.inf, dtype=torch.bfloat16), 5, 501)
    assert chosen.tolist() == [[0, 1, 2, 3, 4]]
    assert best.tolist() == [[torch.inf] * 5]


def test_scores_of_zero_are_kept_before_worse_ones() -> None:
    """Of either sign; a list that begins with what K columns reach must not begin with that itself."""
    scores = torch.zeros(2, 8192)
    scores[:, ::3] *= -1
    scores[:, 4096:] = -5 - torch.arange(4096.0) / 8
    best, chosen = kept(scores.bfloat16(), 3, 4096)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert best.tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1.0, 1e38])
def test_scores_of_any_size_are_kept(scale: float) -> None:
    for sign in (1, -1):
        scores = (sign * scale * (1 + torch.arange(4099) % 7 / 8)).expand(2, -1).contiguous().bfloat16()
        wanted = scores.float().sort(dim=1, descending=True, stable=True)
        best, chosen = kept(scores, 9, 1000)
        assert torch.equal(best, wanted.values[:, :9])
        assert torch.equal(chosen, wanted.indices[:, :9])


def test_scores_that_do_not_fit_their_lists_are_refused() -> None:
    scores, best, chosen = torch.zeros(3, 7).bfloat16(), torch.zeros(3, 2), torch.zeros(3, 2).long()
    for given in ((scores.float(), best, chosen), (scores.T, best, chosen), (scores, best[:2], chosen[:2]), (scores, best[:, :1], chosen)):
        with pytest.raises(ValueError, match="keep: "):
            native.keep(given[0], 0, given[1], given[2])


def test_a_row_leaves_itself_out() -> None:
    q, k = heads(2, 2, 11, 8, 0), heads(2, 2, 3, 8, 1)
    own = torch.tensor([0, 4, 11])  # the last one is no row
    score, index = native.nearest(q, k, 3, own)
    for n in range(11):
        listed = own[index[:, :, n]]
        assert (listed[..., :2] != n).all()
        assert torch.equal(score[:, :, n].isinf(), listed == n)


def test_inputs_may_lie_anywhere() -> None:
    q, k = heads(2, 3, 17, 20, 0), heads(2, 3, 17, 20, 1)
    for a, b in ((q.contiguous(), k.contiguous()), (q, k[:1].expand(2, -1, -1, -1)), (q.transpose(2, 3).contiguous().transpose(2, 3), k)):
        plain = kernels._nearest(a.flatten(0, 1).contiguous(), b.flatten(0, 1).contiguous(), 5, None)
        found = native.nearest(a, b, 5, None)
        assert torch.equal(found[1].flatten(0, 1), plain[1])


@pytest.mark.parametrize("wrong", [-1, 13, 2**40])
def test_an_index_outside_is_an_error_and_no_crash(wrong: int) -> None:
    x, y = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 13, 4)
    index, weight = torch.tensor([[[[0, 1], [2, wrong]]]]), torch.ones(1, 1, 2, 2)
    for call in (
        lambda: native.bag(y, index, weight),
        lambda: native.spread(x, index, weight, 13),
        lambda: native.pair_dot(x, y, index),
        lambda: native.factor_gradient(x, y, index, weight),
        lambda: native.attend(y, y, y, None, 2, 1.0, among=torch.tensor([0, 1, wrong])),
        lambda: native.attend(x, y, y, None, 3, 1.0, places=torch.tensor([[[0], [wrong]]])),
    ):
        with pytest.raises(IndexError, match="outside of the 13 columns"):
            call()


def test_sizes_that_do_not_fit_are_an_error_and_no_read_beyond_the_end() -> None:
    x, y, index, weight = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8), torch.zeros(2, 3, 5, 4, dtype=torch.long), torch.ones(2, 3, 5, 4)
    for call in (
        lambda: native.bag(y, index, weight[..., :3]),
        lambda: native.bag(y, index, weight, torch.ones(4, 7)),
        lambda: native.spread(x, index[:, :, :4], weight, 7),
        lambda: native.pair_dot(x, y[:1], index),
        lambda: native.pair_dot(x, y[..., :5], index),
        lambda: native.factor_gradient(x, y, index, weight[:, :2]),
        lambda: native.nearest(x, y[:, :2], 3, None),
        lambda: native.attend(x, y, y[:, :, :6], None, 3, 1.0),
        lambda: native.attend(x, y, y, index, 4, 1.0, bias=torch.ones(4, 5)),
        lambda: native.attend(x, y, y, index, 4, 1.0, keep=weight[:1]),
        lambda: native.attend(x, y, y, index[0, 0], 3, 1.0),
        lambda: native.attend(x, y, y, None, 3, 1.0, places=torch.zeros(3, 4, 1).long()),
        lambda: native.attend(x, y, y, None, 3, 1.0, places=torch.zeros(3, 5, 1, 1).long()),
        lambda: native.attend_gradient(x[..., :7], x, y, y, index, weight, 1.0, False),
        lambda: native.scan(x[0, 0], y[0, 0], torch.ones(6), 3),
        lambda: native.scan(x[0, 0], y[0, 0, :, :5], None, 3),
    ):
        with pytest.raises(ValueError, match=r" must be \(.*\), got \("):
            call()


@pytest.mark.parametrize("K", [0, 14])
def test_more_columns_than_there_are_can_not_be_selected(K: int) -> None:
    x = torch.ones(1, 1, 13, 4)
    with pytest.raises(ValueError, match=f"^attend: from 1 to 13 columns can be selected for each row, got {K}$"):
        native.attend(x, x, x, None, K, 1.0)
    with pytest.raises(ValueError, match=f"^attend: from 1 to 12 columns can be selected for each row, got {K}$"):
        native.attend(x, x, x, None, K + 1, 1.0, among=torch.arange(13))


@pytest.mark.parametrize("depthwise", [True, False])
def test_the_operators_announce_what_they_return_of_images_too(depthwise: bool) -> None:
    B, H, N, M, D, K, E = 2, 3, 5, 7, 4, 3, 6
    q, k = heads(B, H, N, D, 0).requires_grad_(), heads(B, H, M, D, 1).requires_grad_()
    index = torch.randint(M, (B, H, N, K), generator=torch.Generator().manual_seed(4))
    weight = random(B, H, N, K, seed=2).requires_grad_()
    kernel = random(*((K, D) if depthwise else (K, E, D)), seed=3).requires_grad_()
    for op, inputs in [
        (kernels.nearest, (q, k, K, None)),
        (kernels.bag, (k, index, weight)),
        (kernels.spread, (q, index, weight, M)),
        (kernels.pair_dot, (q, k, index)),
        (kernels.rank_conv, (k, index, weight, kernel)),
        (lists._attend, (q, k, k, None, K, 0.3, None, None, None, kernel, None, None)),
        (lists._attend, (q, k, k, index, K, 0.3, torch.zeros(N, K), 1.0, torch.ones_like(weight), None, None, None)),
        (lists._attend, (q, q, q, None, K, 0.3, None, 1.0, None, None, torch.tensor([0, 2, 4]), None)),
        (lists._attend, (q, k, k, None, K, 0.3, None, None, None, None, None, torch.zeros(H, N, 1).long())),
    ]:
        torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def never(*_: Tensor) -> bool:
    return False


@pytest.mark.parametrize("depthwise", [True, False])
@pytest.mark.parametrize(("m", "K"), [(13, 4), (197, 9), (1025, 3)])
def test_with_and_without_it_outputs_and_gradients_are_the_same(m: int, K: int, depthwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    D, E = 20, 6
    found = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(native, "takes", never)
        q, k, v = (heads(2, 3, n, D, seed).clone().requires_grad_() for seed, n in ((0, 11), (1, m), (2, m)))
        kernel = random(*((K, D) if depthwise else (K, E, D)), seed=5).requires_grad_()
        score, index = kernels.nearest(q, k, K, None)
        out = kernels.rank_conv(v, index, score.softmax(-1), kernel)
        together = kernels.bag(v, index, score.softmax(-1)).sum() + kernels.pair_dot(q, k, index).square().mean()
        (out.square().sum() + together).backward()
        found.append([score, index, out, *(t.grad for t in (q, k, v, kernel))])
    for a, b in zip(*found, strict=True):  # score, index, out, and gradients of q, k, v, kernel
        torch.testing.assert_close(a, b, atol=3e-4, rtol=1e-4)
        assert a.stride() == b.stride()
