"""Heads over a bank: who is a neighbor, what is trained, and what is interpolated."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classifiers import HEADS, Bank
from classifiers.class_means import ClassMeans
from classifiers.neighbor_heads import AttnKnnHead, KnnHead, LinearAttnKnnHead, LinearKnnHead, NeighborHead
from classifiers.predictors import Interpolation
from classifiers.weights import WEIGHTS, log_probabilities
from utils import BadOption

B, F_, D, C, N, K = 7, 13, 12, 5, 31, 6
NEIGHBOR_HEADS = ("knn", "attn-knn", "linear+knn", "linear+attn-knn")


def unit_rows(n: int, dim: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def bank_of(head: NeighborHead) -> Bank:
    assert head.bank is not None
    return head.bank


def with_bank(head: NeighborHead, kind: str = "flat", seed: int = 1) -> Any:
    bank = Bank(head.embedder.dim, kind=kind)
    bank.add(unit_rows(N, head.embedder.dim, seed), torch.arange(N) % C)
    head.refresh(bank)
    return head


def make(name: str, **options: object) -> Any:
    torch.manual_seed(3)
    options = {"embed_dim": D, "k_train": K, **options}
    return with_bank(HEADS[name](F_, C, **options))  # type: ignore[arg-type]


# ---------------------------------------------------------------- who is a neighbor


def on_a_line(labels: list[int]) -> Any:
    """Unit vectors at 0, 1, 2, ... degrees: the nearest to each is known by hand."""
    angle = torch.arange(len(labels)) * math.pi / 180
    head = KnnHead(2, 2, vote="uniform", k_train=1, contrastive_weight=0.0, standardize=False)
    bank = Bank(2)
    bank.add(torch.stack([angle.cos(), angle.sin()], 1), torch.tensor(labels))
    head.refresh(bank)
    return head.train()


def test_a_training_row_is_not_its_own_neighbor() -> None:
    head = on_a_line([0, 1, 1])
    features, index = bank_of(head).embeddings[:1], torch.tensor([0])
    # Its only near neighbor is row 1, of class 1. Row 0 itself would have said 0.
    near = head.search(head.embed(features), 1, index)
    assert near.index.tolist() == [[1]]
    assert head.loss(features, torch.tensor([1]), index)["knn_nll"] < head.loss(features, torch.tensor([0]), index)["knn_nll"]


def test_both_rows_of_a_mixed_one_are_left_out() -> None:
    head = on_a_line([0, 0, 1])
    both = torch.tensor([[0, 1]])
    soft = torch.tensor([[0.5, 0.5]])
    assert head.search(bank_of(head).embeddings[:1], 1, both).index.tolist() == [[2]]
    certain = head.loss(bank_of(head).embeddings[:1], torch.tensor([[0.0, 1.0]]), both)["knn_nll"]
    assert certain < head.loss(bank_of(head).embeddings[:1], soft, both)["knn_nll"] < 20


def test_leaving_a_row_out_of_its_own_neighbors_changes_the_accuracy() -> None:
    """Classes that alternate along a line: with itself in the list every row is right, without it every row is wrong."""
    head = on_a_line([0, 1] * 10)
    ids, labels = bank_of(head).ids, bank_of(head).labels
    out = torch.cat([head.predictor(block) for block in head.leave_one_out(ids).blocks()]).argmax(1)
    kept = torch.cat([head.predictor(block) for block in head.retrieve(bank_of(head).embeddings).blocks()]).argmax(1)
    assert (kept == labels).all()
    assert not (out == labels).any()


def test_a_sampled_bank_is_seen_in_training_only() -> None:
    head = make("attn-knn", neighbor_sample=0.3)
    head.train()
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        part = bank_of(head).sample(9)
        assert len(part) == 9
        assert torch.equal(part.embeddings, bank_of(head).take(part.ids)[0])
        assert torch.equal(part.labels, bank_of(head).take(part.ids)[1])
        seen |= set(part.ids.tolist())
    assert seen == set(range(N))
    features, target, index = torch.randn(B, F_), torch.arange(B) % C, torch.arange(B)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(head.loss(features, target, index)["knn_nll"].item())
    assert losses[0] == losses[1] != losses[2]
    head.eval()
    assert torch.equal(head(features), head(features))
    full = make("attn-knn")
    full.load_state_dict(head.state_dict())
    assert torch.equal(full.eval()(features), head(features))


def test_inner_product_bank_votes_alike() -> None:
    features = torch.randn(B, F_)
    for vote in ("distance", "softmax-cosine", "uniform"):
        flat = make("knn", vote=vote)
        inner = with_bank(make("knn", vote=vote), kind="ip")
        torch.testing.assert_close(inner(features), flat(features), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("columns", [1, 2])
def test_class_means_leave_the_row_out_too(columns: int) -> None:
    rows, labels = unit_rows(N, D), torch.arange(N) % C
    labels[labels == C - 1] = 0
    labels[7] = C - 1  # the only one of its class
    bank = Bank(D)
    bank.add(rows, labels)
    exclude = torch.stack([torch.arange(N), (torch.arange(N) + C) % N], 1)[:, :columns]
    exclude = exclude[:, 0] if columns == 1 else exclude
    found = ClassMeans(bank, C).cosine(rows, exclude)
    for i in range(N):
        stays = torch.ones(N, dtype=torch.bool)
        stays[exclude[i]] = False
        for c in range(C):
            of_class = rows[stays & (labels == c)]
            expected = F.cosine_similarity(rows[i], of_class.mean(0), dim=0).item() if len(of_class) else 0.0
            assert found[i, c].item() == pytest.approx(expected, abs=2e-5)
    assert found[7, C - 1] == 0
    twice = torch.stack([torch.arange(N)] * 2, 1)  # the middle row of an odd batch is mixed with itself
    torch.testing.assert_close(ClassMeans(bank, C).cosine(rows, twice), ClassMeans(bank, C).cosine(rows, twice[:, 0]))


# ---------------------------------------------------------------- what is trained


@pytest.mark.parametrize("name", [*NEIGHBOR_HEADS, "knn by distance"])
@pytest.mark.parametrize("soft", [False, True])
def test_gradients_reach_backbone_projection_and_attention(name: str, soft: bool) -> None:
    options: dict[str, Any] = {"entropy_reg": 0.1} if "attn" in name else {"vote": "distance"} if "distance" in name else {}
    backbone, head = nn.Linear(11, F_), make(name.partition(" ")[0], **options)
    target = torch.arange(B) % C
    index = torch.stack((torch.arange(B), torch.arange(B).flip(0)), 1) if soft else torch.arange(B)
    goal = 0.7 * F.one_hot(target, C).float() + 0.3 * F.one_hot(target.flip(0), C) if soft else target
    terms = head.loss(backbone(torch.randn(B, 11)), goal, index)
    expected = {"knn_nll", "contrastive", "proxies"} | ({"entropy"} if "attn" in name else set())
    expected |= {"linear_cross_entropy"} if "linear" in name else set()
    assert set(terms) == expected
    terms["knn_nll"].backward(retain_graph=True)
    parts = {"backbone": backbone.parameters(), "projection": head.embedder.parameters()}
    if "attn" in name:
        parts["attention"] = head.vote.weigh.parameters()
    for part, parameters in parts.items():
        norms = [p.grad.norm().item() for p in parameters if p.grad is not None]
        assert norms, part
        assert all(math.isfinite(n) for n in norms)
        assert sum(n > 0 for n in norms) >= len(norms) // 2, (part, norms)
    torch.stack(list(terms.values())).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", NEIGHBOR_HEADS)
def test_training_lowers_the_loss(name: str) -> None:
    head = make(name, contrastive_weight=0.0)
    features, target, index = torch.randn(B, F_), torch.arange(B) % C, torch.arange(B)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = torch.stack(list(head.loss(features, target, index).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_parts_have_learning_rates_of_their_own() -> None:
    head = make("linear+attn-knn")
    parts = {name: head.part_of(name) for name, _ in head.named_parameters()}
    assert set(parts.values()) == {"head", "projection", "attention"}
    assert parts["predictor.linear.head.fc.weight"] == "head"
    assert parts["embedder.project.0.weight"] == "projection"
    assert parts["predictor.vote.weigh.q_proj.weight"] == "attention"
    assert {part for name, part in parts.items() if ".prior." in name or "proxies" in name} == {"head"}


def test_confidence_is_not_trained() -> None:
    head = make("linear+attn-knn")
    frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
    temperatures = {f"predictor{part}.log_temperature" for part in ("", ".linear", ".vote")}
    assert frozen == temperatures | {"predictor.vote.log_vote_temperature", "predictor.share_logit", "predictor.linear.class_bias"}


def test_not_a_number_is_the_loops_business() -> None:
    head = make("attn-knn")
    features = torch.full((B, F_), math.nan)
    assert head.loss(features, torch.arange(B) % C, torch.arange(B))["knn_nll"].isnan()
    assert head.eval()(features).isnan().all()


# ---------------------------------------------------------------- interpolations, ensembles, values


@pytest.mark.parametrize("kind", [LinearKnnHead, LinearAttnKnnHead])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_an_interpolation_is_the_weighted_mean(kind: Any, share: float) -> None:
    head = with_bank(kind(F_, C, embed_dim=D, k_train=K, interpolation=share)).eval()
    features = torch.randn(B, F_)
    assert isinstance(head.predictor, Interpolation)
    block = next(head.retrieve(features).blocks())
    expected = share * head.predictor.vote(block).exp() + (1 - share) * head.predictor.linear(block).exp()
    torch.testing.assert_close(head(features).exp(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(head.linear(features), head.predictor.linear(block))


def test_an_ensemble_is_the_mean_over_k() -> None:
    features = torch.randn(B, F_)
    several = make("knn", vote="distance", k_ensemble="2,3,6").eval()
    several.predictor.prior = None
    singles = []
    for k in (2, 3, 6):
        one = make("knn", vote="distance", k_eval=k).eval()
        one.predictor.prior = None
        singles.append(one(features).exp())
    torch.testing.assert_close(several(features), log_probabilities(torch.stack(singles).mean(0)), atol=1e-5, rtol=1e-5)


def test_adaptive_k_trusts_one_neighbor_where_attention_does() -> None:
    head = make("knn", adaptive_k=True).eval()
    head.predictor.prior = None
    weights = torch.tensor([[0.96, 0.01, 0.01, 0.01, 0.005, 0.005]])
    head.predictor.weigh = lambda *_: weights
    block = next(head.retrieve(torch.randn(1, F_)).blocks())
    assert head.predictor.weights(block)[0].count_nonzero() == 2  # exp(entropy) is 1.26
    uniform = torch.full((1, K), 1 / K)
    head.predictor.weigh = lambda *_: uniform
    assert head.predictor.weights(block)[0].count_nonzero() == K


def test_tabr_values_train_and_vote() -> None:
    head = make("attn-knn", values="tabr", k_ensemble="2,6")
    features = torch.randn(B, F_, requires_grad=True)
    head.loss(features, torch.arange(B) % C, torch.arange(B))["knn_nll"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.predictor.values.parameters())
    probs = head.eval()(features).exp()
    torch.testing.assert_close(probs.sum(1), torch.ones(B))


# ---------------------------------------------------------------- what is refused


def test_a_bank_of_another_dimension() -> None:
    head = AttnKnnHead(F_, C, embed_dim=D)
    bank = Bank(D + 1)
    bank.add(unit_rows(N, D + 1), torch.arange(N) % C)
    with pytest.raises(BadOption, match="dimension \\(12\\), got 13"):
        head.refresh(bank)


def test_a_class_that_the_bank_lacks() -> None:
    head = AttnKnnHead(F_, C, embed_dim=D)
    bank = Bank(D)
    bank.add(unit_rows(N, D), torch.arange(N) % (C - 1))
    with pytest.raises(BadOption, match="no row of 4"):
        head.refresh(bank)


@pytest.mark.parametrize(("option", "value"), [("k_train", 32), ("k_eval", "3,32"), ("k_ensemble", "32")])
def test_more_neighbors_than_rows(option: str, value: object) -> None:
    with pytest.raises(BadOption, match=f"{option} must be at most the number of rows in the bank \\(31\\), got 32"):
        make("attn-knn", **{option: value})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"embed_dim": 10}, "embed_dim must be a multiple of the number of attention heads \\(4\\), got 10"),
        ({"values": "lables"}, "did you mean 'labels'"),
        ({"prior": "none"}, "prior must be one of learned, constant"),
        ({"k_eval": "5,x"}, "k_eval must be whole numbers"),
        ({"k_eval": 0}, "k_eval must be whole numbers"),
        ({"index": "hsnw"}, "index must be one of"),
    ],
)
def test_options_are_checked(options: dict[str, object], rule: str) -> None:
    with pytest.raises(BadOption, match=rule):
        make("attn-knn", **options) if "index" not in options else Bank(D, kind=str(options["index"]))


def test_without_a_bank_there_is_no_vote() -> None:
    with pytest.raises(BadOption, match="refresh"):
        AttnKnnHead(F_, C, embed_dim=D)(torch.randn(B, F_))


@pytest.mark.parametrize("name", ["knn", "linear+attn-knn"])
def test_mixed_precision_does_not_move_a_row_from_its_place_in_the_bank(name: str) -> None:
    head, features = make(name).eval(), torch.randn(13, F_, generator=torch.Generator().manual_seed(5))
    with torch.autocast("cpu", torch.bfloat16):
        half = head.embed(features.bfloat16())
    assert (half == head.embed(features.bfloat16().float())).all()


def test_a_vote_may_have_options() -> None:
    head, features = make("knn", vote="softmax-cosine(temperature=0.5)"), torch.randn(7, F_)
    block = head.retrieve(features).block(slice(None))
    cosine = (block.embedding[:, None] * block.neighbors.embedding).sum(2)
    torch.testing.assert_close(head.vote.weights(block), (cosine / 0.5).softmax(1))
    assert head.vote.name == "softmax-cosine"
    for wrong, rule in {"softmax-cosine(heat=1)": "has no option 'heat'", "softmax-cosine(": "must read Name", "sotfmax": "one of"}.items():
        with pytest.raises(BadOption, match=rule):
            make("knn", vote=wrong)


@pytest.mark.parametrize(
    ("weigh", "rule"),
    [
        (lambda distance: distance[:, 0], r"must return weights \(queries, neighbors\), here \(7, 6\), got \(7,\)"),
        (lambda distance: distance * math.nan, "must return weights that are numbers of at least 0"),
        (lambda distance: -distance, "must return weights that are numbers of at least 0"),
    ],
)
def test_a_vote_that_gives_no_weights_is_named(weigh: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(query: Tensor, neighbors: Tensor, distance: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        weights: Tensor = weigh(distance)
        return weights

    monkeypatch.setitem(WEIGHTS._parts, "mine", mine)
    head = make("knn", vote="mine").eval()
    with pytest.raises(BadOption, match=f"^vote mine {rule}$"):
        head(torch.randn(7, F_))
