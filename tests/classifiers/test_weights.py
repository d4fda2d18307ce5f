"""Weights, the votes they make, and the prior: by hand, against scikit-learn, and against loops over samples."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier

from classifiers.bank import Bank
from classifiers.neighbor_heads import weights_of
from classifiers.prior import Prior
from classifiers.retrieved import Context
from classifiers.weights import WEIGHTS, class_probabilities, heaviest, inverse_distance, log_probabilities, softmax_cosine, uniform
from utils import BadOption

B, K, D, C = 13, 11, 7, 5


def case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, neighbors = torch.randn(B, D, generator=generator), torch.randn(B, K, D, generator=generator)
    distance = (query[:, None] - neighbors).square().sum(2)
    labels = torch.randint(C, (B, K), generator=generator)
    mask = torch.rand(B, K, generator=generator) > 0.3
    mask[0], mask[1], mask[2] = True, False, torch.arange(K) == 4
    return query, neighbors, distance, labels, mask


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("vote", list(WEIGHTS))
def test_weights_sum_to_one_and_missing_neighbors_weigh_nothing(vote):
    query, neighbors, distance, labels, mask = case()
    weights = WEIGHTS[vote](query, neighbors, distance, labels, mask)
    assert torch.allclose(weights.sum(1), mask.any(1).float(), atol=1e-6)
    assert (weights[~mask] == 0).all()
    nonsense = neighbors.masked_fill(~mask[..., None], torch.nan), distance.masked_fill(~mask, torch.inf), labels.masked_fill(~mask, -1)
    assert (WEIGHTS[vote](query, *nonsense, mask) == weights).all()
    full = WEIGHTS[vote](query, neighbors, distance, labels, None)
    assert torch.allclose(full[0], weights[0])
    assert torch.allclose(full.sum(1), torch.ones(B))


@pytest.mark.parametrize(("vote", "sklearn"), [("uniform", "uniform"), ("distance", "distance")])
def test_against_scikit_learn(vote, sklearn):
    generator = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(211, D, generator=generator), torch.randint(C, (211,), generator=generator)
    rows[100:120], labels[100:120] = rows[:20], labels[:20]  # doubles: several neighbors at distance 0
    queries = torch.cat([torch.randn(31, D, generator=generator), rows[:23]])
    bank = Bank(D, kind="flat")
    bank.add(rows, labels)
    found = bank.search(queries, K)
    weights = WEIGHTS[vote](queries, found.embedding, found.distance, found.label, found.mask)
    probs = class_probabilities(weights, found.label, C, [K], found.mask)[0]
    wanted = KNeighborsClassifier(K, weights=sklearn, algorithm="brute").fit(rows.double().numpy(), labels.numpy())
    error = (probs - torch.from_numpy(wanted.predict_proba(queries.double().numpy()))).abs()
    assert error.max() < 2e-6, (error.max().item(), error.mean().item())


def test_dino_by_loops():
    query, neighbors, distance, labels, mask = case()
    weights = softmax_cosine(query, neighbors, distance, labels, mask)
    for b in range(B):
        there = [j for j in range(K) if mask[b, j]]
        raw = [math.exp(F.cosine_similarity(query[b], neighbors[b, j], dim=0).item() / 0.07) for j in there]
        for j, value in zip(there, raw, strict=True):
            assert weights[b, j].item() == pytest.approx(value / sum(raw), rel=1e-4, abs=1e-9)


def test_distance_vote_by_hand():
    distance = torch.tensor([[1.0, 4.0, 16.0], [0.0, 1.0, 0.0], [1e-30, 4e-30, 1.0], [1e30, 4e30, 1e36]])
    labels = torch.zeros(4, 3, dtype=torch.long)
    found = inverse_distance(labels, labels, distance, labels, None)
    wanted = [[4 / 7, 2 / 7, 1 / 7], [1 / 2, 0, 1 / 2], [2 / 3, 1 / 3, 0], [1 / 1.501, 0.5 / 1.501, 0.001 / 1.501]]
    for mine, other in zip(found.tolist(), wanted, strict=True):
        assert mine == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("vote", list(WEIGHTS))
def test_gradients_are_finite_at_distance_zero(vote):
    query, neighbors, _, labels, mask = case()
    query.requires_grad_()
    neighbors = torch.where(torch.arange(K)[:, None] == 0, query[:, None], neighbors)
    distance = (query[:, None] - neighbors).square().sum(2)
    weights = WEIGHTS[vote](query, neighbors, distance, labels, mask)
    probs = class_probabilities(weights, labels, C, [K], mask)[0]
    F.nll_loss(log_probabilities(probs), labels[:, 0]).backward() if probs.requires_grad else None
    if vote != "uniform":
        assert query.grad is not None
        assert query.grad.isfinite().all()


def test_an_unknown_vote():
    with pytest.raises(BadOption, match=r"vote must be one of uniform, .*\(did you mean 'uniform'\?\), got 'unifrom'"):
        WEIGHTS["unifrom"]


# ---------------------------------------------------------------- probabilities


def test_probabilities_by_hand():
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.1], [0.0, 0.0, 0.0], [0.3, 0.3, 0.4]])
    labels = torch.tensor([[2, 0, 2], [1, 1, 0], [0, 2, 2], [1, 1, 1]])
    mask = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [False] * 3])
    found = class_probabilities(weights, labels, 3, [3], mask)[0]
    # the third has no weights: they vote alike. The fourth has no neighbors: 1/C
    wanted = torch.tensor([[0.25, 0, 0.75], [0.2, 0.8, 0], [1 / 3, 0, 2 / 3], [1 / 3, 1 / 3, 1 / 3]])
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_many_k_by_loops(masked, seed):
    *_, labels, mask = case(seed)
    weights = torch.rand(B, K, generator=torch.Generator().manual_seed(seed)).softmax(1)
    ks = [7, 1, 11, 3, 7]
    given = mask if masked else None
    found = class_probabilities(weights, labels, C, ks, given)
    assert found.shape == (5, B, C)
    assert torch.allclose(found.sum(2), torch.ones(5, B), atol=1e-6)
    for i, k in enumerate(ks):
        cut = class_probabilities(weights[:, :k], labels[:, :k], C, [k], mask[:, :k] if masked else None)
        assert torch.allclose(found[i], cut[0], atol=1e-6)
        for b in range(B):
            there = [j for j in range(k) if not masked or mask[b, j]]
            total = sum(weights[b, j].item() for j in there)
            for c in range(C):
                wanted = sum(weights[b, j].item() for j in there if labels[b, j] == c) / total if there else 1 / C
                assert found[i, b, c].item() == pytest.approx(wanted, abs=1e-6)


def test_a_cut_softmax_is_renormalized():
    """Logits that are the same: 16 weights of 1/16. Cut at 8 they sum to a half; the probabilities to one."""
    weights, labels = torch.full((1, 16), 1 / 16), torch.arange(16)[None] % 2
    assert class_probabilities(weights, labels, 2, [8], None)[0].tolist() == [[0.5, 0.5]]


def test_weights_that_underflow():
    """A softmax may give the first k neighbors exactly nothing; they vote alike then."""
    weights, labels = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0, 1, 2]])
    found = class_probabilities(weights, labels, 3, [2, 3])
    assert found[0, 0].tolist() == [0.5, 0.5, 0]
    assert found[1, 0].tolist() == pytest.approx([0, 0, 1], abs=1e-12)


def test_refusals():
    weights, labels = torch.ones(2, 3), torch.tensor([[0, 1, 2], [0, 0, 5]])
    for k in (0, 4):
        with pytest.raises(BadOption, match=rf"k must be from 1 to the number of neighbors \(3\), got {k}"):
            class_probabilities(weights, labels, 7, [2, k])
    with pytest.raises(BadOption, match="labels of neighbors must be from 0 to 4, got 5"):
        class_probabilities(weights, labels, 5, [3])
    with pytest.raises(BadOption, match="share of the prior must be above 0 and below 1, got 0"):
        Prior(3, share=0)


# ---------------------------------------------------------------- adaptive k


def test_adaptive_k_by_hand():
    sure = [1.0, 0.0, 0.0, 0.0]
    two = [0.0, 0.5, 0.0, 0.5]
    alike = [0.25, 0.25, 0.25, 0.25]
    skewed = [0.1, 0.7, 0.1, 0.1]  # exp(entropy) = 2.56: three of them, the nearer of the equal ones
    found = heaviest(torch.tensor([sure, two, alike, skewed, [0.0] * 4]))
    assert found.tolist() == [sure, two, alike, pytest.approx([1 / 9, 7 / 9, 1 / 9, 0]), [0.0] * 4]
    masked = heaviest(torch.tensor([skewed]), torch.tensor([[True, False, True, True]]))
    assert masked[0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_adaptive_k_by_loops(seed, scale):
    *_, mask = case(seed)
    weights = (scale * torch.randn(B, K, generator=torch.Generator().manual_seed(seed))).softmax(1)
    found = heaviest(weights, mask)
    for b in range(B):
        there = [j for j in range(K) if mask[b, j]]
        total = sum(weights[b, j].item() for j in there)
        share = {j: weights[b, j].item() / total for j in there}
        count = math.ceil(math.exp(-sum(p * math.log(p) for p in share.values() if p > 0)) - 1e-4) if there else 0
        best = sorted(there, key=lambda j: -share[j])[:count]
        for j in range(K):
            wanted = share[j] / sum(share[i] for i in best) if j in best else 0
            assert found[b, j].item() == pytest.approx(wanted, abs=1e-5)


# ---------------------------------------------------------------- the prior


@pytest.mark.parametrize("constant", [False, True])
def test_prior_keeps_probabilities(constant):
    query, neighbors, distance, labels, mask = case()
    probs = class_probabilities(uniform(query, neighbors, distance, labels, mask), labels, C, [K], mask)[0]
    torch.manual_seed(0)
    prior = Prior(C, constant=constant)
    found = prior(probs, Context(distance.masked_fill(~mask, torch.inf), mask))
    assert torch.allclose(found.sum(1), torch.ones(B), atol=1e-6)
    assert (found > 0).all()
    assert torch.allclose(found[1], torch.full((C,), 1 / C))
    assert (prior.share(probs, Context(distance, mask))[1] == 1).all()
    sure = class_probabilities(torch.ones(3, K), torch.zeros(3, K, dtype=torch.long), C, [K])[0]
    mixed = prior(sure, Context(torch.ones(3, K)))
    assert mixed[:, 0].min() > 0.9  # the vote still decides
    if constant:
        assert torch.allclose(mixed[:, 1:], torch.full((3, C - 1), 0.05 / C), atol=1e-6)
    with torch.no_grad():
        prior.share_logit.fill_(-1e6)
    assert log_probabilities(prior(sure, Context(torch.ones(3, K)))).min() > -20  # never a log of zero


def test_prior_from_frequencies():
    prior = Prior(3)
    prior.start_from(torch.tensor([0, 0, 0, 0, 2]))
    assert prior.class_logits.softmax(0).tolist() == pytest.approx([5 / 8, 1 / 8, 2 / 8])


@pytest.mark.parametrize("constant", [False, True])
def test_prior_learns_and_gradients_reach_it(constant):
    query, neighbors, distance, labels, mask = case()
    torch.manual_seed(0)
    prior = Prior(C, constant=constant)
    weights = softmax_cosine(query.requires_grad_(), neighbors, distance, labels, mask)
    cosines = torch.rand(B, C)
    log_probs = log_probabilities(prior(class_probabilities(weights, labels, C, [K], mask)[0], Context(distance, mask, cosines)))
    F.nll_loss(log_probs, torch.randint(C, (B,))).backward()
    for name, parameter in prior.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_prior_leans_to_the_class_whose_mean_is_near():
    prior = Prior(3, constant=True, share=0.5)
    vote, cosines = torch.tensor([[1.0, 0, 0]]), torch.tensor([[0.9, 0.4, -0.8]])
    logits = [prior.class_mean_weight.item() * cosine for cosine in (0.9, 0.4, -0.8)]
    total = sum(math.exp(x) for x in logits)
    expected = [0.5 * (i == 0) + 0.5 * math.exp(x) / total for i, x in enumerate(logits)]
    assert prior(vote, Context(torch.ones(1, 4), None, cosines))[0].tolist() == pytest.approx(expected)
    assert prior(vote, Context(torch.ones(1, 4)))[0].tolist() == pytest.approx([0.5 + 0.5 / 3, 0.5 / 3, 0.5 / 3])


def noisy_votes() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Votes that are all sure; those of near neighbors are right in 99 % of the rows, those of far ones in 60 %."""
    generator = torch.Generator().manual_seed(0)
    far = torch.rand(1009, generator=generator) < 0.5
    truth = torch.randint(C, (1009,), generator=generator)
    wrong = torch.rand(1009, generator=generator) < torch.where(far, 0.4, 0.01)
    said = torch.where(wrong, (truth + 1) % C, truth)
    distance = torch.where(far, 1.5, 0.1)[:, None] * (0.9 + 0.2 * torch.rand(1009, K, generator=generator))
    return F.one_hot(said, C).float(), distance, truth


def test_a_share_that_depends_on_distance_beats_a_constant_one_and_none():
    probs, distance, truth = noisy_votes()
    nll = {"none": F.nll_loss(log_probabilities(probs), truth).item()}
    for constant in (True, False):
        torch.manual_seed(0)
        prior = Prior(C, constant=constant)
        optimizer = torch.optim.Adam(prior.parameters(), lr=0.05)
        for _ in range(150):
            optimizer.zero_grad()
            loss = F.nll_loss(log_probabilities(prior(probs, Context(distance))), truth)
            loss.backward()
            optimizer.step()
        nll["constant" if constant else "learned"] = loss.item()
    assert nll["learned"] < nll["constant"] - 0.05 < nll["none"] - 1, nll


@pytest.mark.parametrize("temperature", ["-1", "0", "'x'", "None", "1e999", "True", "1e-30", "[0.1]"])
def test_a_temperature_is_a_number_that_leaves_something_of_the_cosine(temperature):
    with pytest.raises(BadOption, match=r"^vote takes a number from 0.0001 to 10,000 as the temperature of softmax-cosine"):
        weights_of(f"softmax-cosine(temperature={temperature})")
    assert weights_of("softmax-cosine(temperature=2)")[0] == "softmax-cosine"
