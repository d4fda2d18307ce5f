"""The Triton kernel, run by Triton's interpreter, against the operators that compute the same. A process of its own: test_triton_topk.py.

Triton decides for the interpreter when it is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["NEIGHBORS_NATIVE"] = "0"  # gradients as a GPU has them, of torch's operators

import torch
from torch import Tensor

from layers import kernels, lists, triton_topk
from tests.layers.reference import assert_same


def composed(q: Tensor, k: Tensor, v: Tensor, K: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    score, index = kernels.nearest(q, k, K, None)
    weight = (score * scale).softmax(-1)
    return kernels.bag(v, index, weight), index, weight


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(B: int, H: int, N: int, M: int, D: int) -> list[Tensor]:
    """As a layer has them: heads are slices of one projection."""
    shapes = ((N, 1), (M, 2), (M, 3))
    return [random(B, rows, H, D, seed=seed).transpose(1, 2).requires_grad_() for rows, seed in shapes]


def equal_with_gradients() -> None:
    """Sizes that fill no block and no power of two."""
    for B, H, N, M, D, K in ((2, 1, 5, 5, 8, 5), (1, 2, 19, 70, 20, 3)):
        q, k, v = inputs(B, H, N, M, D)
        ours, wanted = lists.attend(q, k, v, K, 0.3), composed(q, k, v, K, 0.3)
        assert ours[1].dtype == torch.int32
        assert torch.equal(ours[1].long(), wanted[1])
        assert_same(ours[2], wanted[2], 1e-6)
        assert_same(ours[0], wanted[0], 1e-5)
        assert ours[0].transpose(1, 2).is_contiguous()
        slope = random(*q.shape, seed=4)
        firsts = [torch.autograd.grad(out[0], (q, k, v), slope, create_graph=True) for out in (ours, wanted)]
        seconds = [torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), (q, k, v)) for first in firsts]
        for gradients in (firsts, seconds):
            for our, other in zip(*gradients, strict=True):
                assert_same(our, other, 1e-4)


def equal_scores_by_column() -> None:
    """Whole numbers, whose products tie often, and a key that stands in three places."""
    q, k, v = (torch.randint(-1, 2, (1, 1, n, 4), generator=torch.Generator().manual_seed(n)).float() for n in (7, 67, 67))
    k[..., [3, 30, 66], :] = 2.0
    order = (q @ k.transpose(2, 3)).sort(dim=-1, descending=True, stable=True).indices[..., :9]
    assert torch.equal(triton_topk.attend(q, k, v, 9, 1.0)[1].long(), order)


def a_row_of_nan_stays_alone() -> None:
    q, k, v = (t.detach().clone() for t in inputs(1, 1, 5, 5, 8))
    q[0, 0, 2] = torch.nan
    ours, wanted = triton_topk.attend(q, k, v, 2, 1.0), composed(q, k, v, 2, 1.0)
    assert ours[0][0, 0, 2].isnan().all()
    assert torch.equal(ours[0].isnan(), wanted[0].isnan())
    assert_same(ours[0].nan_to_num(), wanted[0].nan_to_num(), 1e-5)


def nan_of_either_sign_comes_first() -> None:
    q, k, v = (t.detach().clone() for t in inputs(1, 1, 5, 5, 8))
    k[0, 0, 3, 0], k[0, 0, 1, 0] = torch.nan, -torch.tensor(torch.nan)
    assert triton_topk.attend(q, k, v, 3, 1.0)[1][..., :2].tolist() == composed(q, k, v, 3, 1.0)[1][..., :2].tolist() == [[[[1, 3]] * 5]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    lists.in_one_kernel = lambda *_: True  # there is no GPU
    equal_with_gradients()
    equal_scores_by_column()
    a_row_of_nan_stays_alone()
    nan_of_either_sign_comes_first()
    print("equal")
