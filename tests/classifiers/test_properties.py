"""What holds of bank, weights and predictors for any rows: found by hypothesis, from small ones."""

from __future__ import annotations

import re

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from classifiers.bank import Bank
from classifiers.factory import check_factory
from classifiers.weights import WEIGHTS, class_probabilities, heaviest
from utils import BadOption

quick = settings(max_examples=30, deadline=None, derandomize=True)
SIZES = st.tuples(st.integers(1, 23), st.integers(1, 5), st.integers(1, 7), st.integers(0, 999))  # rows, dimensions, k, seed


def some(rows: int, dim: int, seed: int) -> torch.Tensor:
    """Whole numbers, so that rows repeat and distances tie."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, (rows, dim))).float()


@quick
@given(SIZES, st.sampled_from(["flat", "ip"]))
def test_the_bank_finds_what_a_sort_finds(sizes: tuple[int, int, int, int], kind: str):
    rows, dim, k, seed = sizes
    k = min(k, rows)
    x, queries = some(rows, dim, seed), some(3, dim, seed + 1)
    bank = Bank(dim, kind=kind)
    bank.add(x, torch.arange(rows) % 3)
    exclude = torch.tensor([0, rows - 1, rows + 5])
    found = bank.search(queries, k, exclude=exclude)
    for i, query in enumerate(queries):
        distance = -(x @ query) if kind == "ip" else (x - query).square().sum(1)
        order = sorted((d, row) for row, d in enumerate(distance.tolist()) if row != exclude[i])[:k]
        there = found.mask[i]
        assert found.index[i][there].tolist() == [row for _, row in order]
        assert found.distance[i][there].tolist() == [d for d, _ in order]
        assert int(there.sum()) == len(order)


@quick
@given(SIZES, st.sampled_from(["uniform", "distance", "softmax-cosine"]))
def test_weights_and_votes_are_probabilities(sizes: tuple[int, int, int, int], name: str):
    rows, dim, k, seed = sizes
    k = min(k, rows)
    bank = Bank(dim, kind="flat")
    bank.add(some(rows, dim, seed), torch.arange(rows) % 3)
    query = some(4, dim, seed + 1)
    found = bank.search(query, k)
    weights = WEIGHTS[name](query, found.embedding, found.distance, found.label, found.mask)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    few = heaviest(weights, found.mask)
    torch.testing.assert_close(few.sum(1), torch.ones(4))
    assert ((few > 0) <= (weights > 0)).all()
    votes = class_probabilities(weights, found.label, 3, [k, 1], found.mask)
    torch.testing.assert_close(votes.sum(2), torch.ones(2, 4))
    assert (votes[1].argmax(1) == found.label[:, 0]).all()  # of one neighbor, its label


@quick
@given(SIZES)
def test_a_vote_does_not_depend_on_the_order_of_the_batch(sizes: tuple[int, int, int, int]):
    rows, dim, k, seed = sizes
    k = min(k, rows)
    bank = Bank(dim, kind="flat")
    bank.add(some(rows, dim, seed), torch.arange(rows) % 3)
    query = some(5, dim, seed + 1)
    forward, backward = bank.search(query, k), bank.search(query.flip(0), k)
    assert torch.equal(forward.index, backward.index.flip(0))
    assert torch.equal(forward.distance, backward.distance.flip(0))


@quick
@given(st.text("HNSWIVFPQxRLrt0123456789,_+()kM", max_size=24), st.integers(1, 32))
def test_a_factory_string_is_refused_or_is_made_of_sane_numbers(text: str, dim: int):
    """No other exception, and no number beyond its bounds, whatever is typed."""
    try:
        check_factory(text, dim, "must be")
    except BadOption:
        return
    assert all(int(number) <= 1 << 21 for number in re.findall(r"\d+", text))
