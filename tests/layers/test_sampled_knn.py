"""Top K exactly, the others by a sample."""

import pytest
import torch

from layers import SampledKnnAttention
from tests.layers.reference import DIM, TOKENS, assert_same, build, tokens
from utils import BadOption


def test_the_sample_is_outside_the_top_k_and_without_repeats() -> None:
    layer = build("SampledKnnAttention(K=5, num_samples=11)")
    q, k = torch.randn(2, 2, 3, TOKENS, 22)
    for training in (True, False):
        index = layer.train(training).attended(q, k, k).lists
        assert index.shape == (2, 3, TOKENS, 16)
        _, log_count = layer.sample(q)
        assert log_count.exp().sum().item() == pytest.approx(TOKENS)
        best = (q @ k.transpose(-1, -2)).topk(5).indices
        assert torch.equal(index[..., :5], best)
        ordered = index.sort(-1).values
        assert (ordered[..., 1:] > ordered[..., :-1]).all()


def test_every_other_token_is_drawn_as_often() -> None:
    layer = build("SampledKnnAttention(K=5, num_samples=8)")
    q, k = torch.randn(2, 1, 3, TOKENS, 22)
    torch.manual_seed(0)
    drawn = torch.zeros(3, TOKENS, TOKENS)
    for _ in range(400):
        index = layer.attended(q, k, k).lists[0, ..., 5:]
        drawn.scatter_add_(2, index, torch.ones_like(index, dtype=torch.float))
    best = layer.attended(q, k, k).lists[0, ..., :5]
    assert (drawn.gather(2, best) == 0).all()
    others = drawn[drawn > 0] / 400  # each of 32 others in 8 / 32 of the draws, +- 0.022
    assert len(others) == 3 * TOKENS * 32
    assert abs(others.mean() - 0.25) < 1e-6
    assert others.std() < 0.03


def test_the_estimate_is_near_attention_where_truncation_is_biased() -> None:
    """Flat scores: the top 5 hold a seventh of the mass, and the mean of many estimates the whole of it."""
    attention, kvt = build("Attention"), build("KvtAttention(K=5)")
    sampled = build("SampledKnnAttention(K=5, num_samples=8)")
    for layer in (kvt, sampled):
        layer.load_state_dict(attention.state_dict())
    x = tokens()
    torch.manual_seed(0)
    with torch.no_grad():
        exact = attention(x)
        off = torch.stack([sampled(x) for _ in range(300)]).mean(0) - exact
        truncated = kvt(x) - exact
    assert off.square().mean() < 0.02 * truncated.square().mean()


def test_weights_by_hand() -> None:
    """Five equal scores, K = 2, one sample that stands for three: 1/5, 1/5, 3/5."""
    layer = SampledKnnAttention(4, 1, K=2, num_samples=1)
    zeros = torch.zeros(1, 1, 5, 4)
    assert_same(layer.attended(zeros, zeros, zeros).weight, torch.tensor([0.2, 0.2, 0.6]).expand(1, 1, 5, 3), 1e-6)


def test_eval_draws_are_fixed_and_do_not_move_the_training_draws() -> None:
    layer = build("SampledKnnAttention(K=5, num_samples=7)")
    x = tokens(batch=3)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    before = torch.get_rng_state()
    out = layer(x)
    assert torch.equal(out, layer(x))
    assert torch.equal(before, torch.get_rng_state())
    assert_same(layer(x[1:2]), out[1:2], 1e-6)  # whatever else is in the batch


def test_bad_options() -> None:
    with pytest.raises(BadOption, match=r"^K must be at most the number of candidate tokens \(37\), got 38$"):
        build("SampledKnnAttention(K=38)")
    with pytest.raises(BadOption, match=r"^num_samples must be a whole number of at least 1, got 0$"):
        SampledKnnAttention(DIM, 3, num_samples=0)
