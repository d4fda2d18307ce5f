"""Calibration: what it finds, what it leaves alone, and that nothing but the rows it is given moves it."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classifiers import Bank
from classifiers.calibration import calibrate, choose_fit, train_attention
from classifiers.neighbor_heads import AttnKnnHead, KnnHead, LinearAttnKnnHead
from classifiers.predictors import HeadPredictor
from classifiers.retrieved import NO_NEIGHBORS, Retrieved
from evaluation.baselines import averaged, baseline_head, beside_features, beside_neighbors
from tests.classifiers.test_knn import bank_of
from utils import BadOption

C, D, K, N = 3, 5, 7, 601


class Fixed(nn.Module):
    """A head whose log-probabilities are the features."""

    def forward(self, features: Tensor) -> Tensor:
        return F.log_softmax(features, 1)


def nll(voter: nn.Module, questions: Retrieved, target: Tensor) -> float:
    with torch.no_grad():
        return F.nll_loss(torch.cat([voter(q) for q in questions.blocks()]), target).item()


def alone(features: Tensor) -> Retrieved:
    empty = features[:, :0]
    return Retrieved(features, empty, empty, empty.long(), empty, None)


def clusters(rows: int, seed: int, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """Unit vectors around one direction a class; some land among the wrong class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % C
    return F.normalize(torch.eye(C, D)[labels] + spread * torch.randn(rows, D, generator=generator), dim=1), labels


@pytest.fixture(scope="module")
def asked() -> tuple[Any, Retrieved, Tensor]:
    torch.manual_seed(0)
    head = AttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1)
    rows, labels = clusters(N, 1)
    bank = Bank(D)
    bank.add(rows, labels)
    head.refresh(bank)
    val, target = clusters(307, 2)
    with torch.no_grad():
        return head.eval(), head.ask(val), target


# ---------------------------------------------------------------- temperature


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_a_temperature_is_found_again(temperature: float) -> None:
    """Labels drawn from softmax(x / T): the fitted temperature of a head that says softmax(x) is T."""
    generator = torch.Generator().manual_seed(1)
    features = 3 * torch.randn(20011, C, generator=generator)
    target = torch.multinomial((features / temperature).softmax(1), 1, generator=generator)[:, 0]
    fitted = calibrate(HeadPredictor(Fixed()), alone(features), target, "temperature")
    assert fitted.log_temperature.exp().item() == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("mode", ["head", "temperature"])
def test_a_few_rows_that_are_all_right_leave_a_temperature(mode: str) -> None:
    features, target = torch.eye(C)[[0, 1, 2, 0]] * 2, torch.tensor([0, 1, 2, 0])
    fitted = calibrate(HeadPredictor(Fixed()), alone(features), target, mode)
    assert 0.2 < fitted.log_temperature.exp().item() < 1


def test_a_few_rows_leave_doubt(asked: tuple[Any, Retrieved, Tensor]) -> None:
    """Rows whose votes are all right: maximum likelihood would be certain of everything, Laplace's rule is not."""
    head, questions, _ = asked
    votes: Any = beside_neighbors(head, C, "none").raw["uniform"]
    with torch.no_grad():
        sure = votes.all_scores(questions)
    some = (sure.amax(1) == 1).nonzero()[:20, 0]
    panel = beside_neighbors(head, C, "head")
    panel.calibrate(questions.subset(some), sure.argmax(1)[some], seed=0)
    doubt = 1 - panel.log_probs(questions.subset(some), calibrated=True)["uniform"].exp().amax(1)
    assert doubt.min() > 1e-3


# ---------------------------------------------------------------- votes


@pytest.mark.parametrize("mode", MODES)
def test_rows_it_was_fitted_to_are_not_predicted_worse(mode: str, asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, target = asked
    voters: Any = beside_neighbors(head, C, mode).raw
    for voter in voters.values():
        before = copy.deepcopy(voter.state_dict())
        fitted = calibrate(voter, questions, target, mode)
        assert nll(fitted, questions, target) <= nll(voter, questions, target) + 1e-6
        assert all(torch.equal(before[k], v) for k, v in voter.state_dict().items())
        if mode == "none":
            assert all(torch.equal(before[k], v) for k, v in fitted.state_dict().items())


def test_held_out_rows_are_predicted_better(asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, target = asked
    rows, truth = clusters(1009, 3)
    with torch.no_grad():
        others = head.ask(rows)
    panel = beside_neighbors(head, C, "head")
    panel.calibrate(questions, target, seed=0)
    for name in ("uniform", "distance"):
        assert nll(panel.calibrated[name], others, truth) < 0.7 * nll(panel.raw[name], others, truth)
    assert nll(panel.calibrated["attention"], others, truth) < nll(panel.raw["attention"], others, truth)


def test_the_same_rows_give_the_same_fit(asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, target = asked
    torch.manual_seed(1)
    first = calibrate(head.predictor, questions, target, "head", seed=5)
    torch.manual_seed(2)  # the global generator has no part in it
    second = calibrate(head.predictor, questions, target, "head", seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))


def test_noise_is_not_learned(asked: tuple[Any, Retrieved, Tensor]) -> None:
    """Labels that have nothing to do with the rows: on other rows, knowing nothing costs log C, and this may cost little more."""
    head, questions, _ = asked
    generator = torch.Generator().manual_seed(7)
    fitted = calibrate(head.predictor, questions, torch.randint(C, (len(questions),), generator=generator), "head")
    with torch.no_grad():
        others = head.ask(clusters(1009, 3)[0])
    assert nll(fitted, others, torch.randint(C, (1009,), generator=generator)) < math.log(C) + 0.03


def test_epochs_are_chosen_by_rows_left_out(asked: tuple[Any, Retrieved, Tensor]) -> None:
    """The first neighbor is always right and the others never: an attention that can learn it should be fitted for as long as it may."""
    head, questions, _ = asked
    target = bank_of(head).labels[questions.index[:, 0]]
    assert choose_fit(head.predictor, questions, target, 0)[0] >= 4


def test_mixture_ends_near_the_better_part(asked: tuple[Any, Retrieved, Tensor]) -> None:
    """A linear head that knows the answer beside a vote that does not: the share of the vote falls."""
    head, _, _ = asked
    torch.manual_seed(0)
    mixed = LinearAttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1).eval()
    mixed.refresh(bank_of(head))
    rows, target = clusters(307, 4, spread=0.9)
    with torch.no_grad():
        mixed.linear.fc.weight.copy_(30 * torch.eye(C, D))
        exact = F.normalize(torch.eye(C, D)[target] + 0.05 * torch.randn(307, D, generator=torch.Generator().manual_seed(3)), dim=1)
        asked_of = mixed.ask(rows)
    questions = dataclasses.replace(asked_of, features=exact)
    fitted: Any = calibrate(mixed.predictor, questions, target, "head")
    assert fitted.share < 0.35
    fixed = LinearAttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1, interpolation=0.8).eval()
    fixed.refresh(bank_of(head))
    again: Any = calibrate(fixed.predictor, questions, target, "head")
    assert again.share.item() == pytest.approx(0.8)


def test_unknown_mode() -> None:
    with pytest.raises(BadOption, match="did you mean 'head'"):
        calibrate(HeadPredictor(Fixed()), alone(torch.eye(C)), torch.arange(C), "heads")


# ---------------------------------------------------------------- the panel


def test_panel_compares_on_the_same_neighbors(asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, _ = asked
    panel = beside_neighbors(head, C, "head")
    assert list(panel.raw) == ["uniform", "distance", "attention"]
    assert panel.main == "attention"
    uniform = panel.log_probs(questions, calibrated=False)["uniform"].exp()
    counts = torch.stack([(bank_of(head).labels[row] == torch.arange(C)[:, None]).sum(1) for row in questions.index])
    torch.testing.assert_close(uniform, counts / K, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(panel.log_probs(questions, calibrated=False)["attention"].exp(), head(questions.features).exp())


def test_views_are_averaged_as_probabilities(asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, _ = asked
    with torch.no_grad():
        other = head.ask(clusters(len(questions), 9)[0])
    panel = beside_neighbors(head, C, "none")
    one, two = (panel.log_probs(view, calibrated=False)["attention"] for view in (questions, other))
    torch.testing.assert_close(averaged([one, two]).exp(), (one.exp() + two.exp()) / 2)
    assert torch.equal(averaged([one]), one)


def test_every_k_from_one_search(asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, _ = asked
    found = beside_neighbors(head, C, "none").by_k(questions, [1, 3, K])
    for k, log_probs in ((k, found[k]["uniform"]) for k in (1, 3, K)):
        single = KnnHead(D, C, vote="uniform", k_train=k, embed_dim=0).eval()
        voter: Any = single.predictor
        voter.prior = None
        single.refresh(bank_of(head))
        torch.testing.assert_close(log_probs, single(questions.embedding))


def test_panel_beside_a_head_without_a_bank(asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, target = asked
    asker = baseline_head(D, C, k_train=K).eval()
    asker.refresh(bank_of(head))
    start = copy.deepcopy(asker.knn.state_dict())
    train_attention(asker.knn, asker.without_themselves(bank_of(head).ids), bank_of(head).labels, seed=0)
    assert any(not torch.equal(start[k], v) for k, v in asker.knn.state_dict().items())
    linear = nn.Linear(D, C)
    plain = nn.Sequential(linear, nn.LogSoftmax(1))
    panel = beside_features(plain, "linear", asker, "head")  # type: ignore[arg-type]
    assert list(panel.raw) == ["linear", "uniform", "distance", "attention"]
    assert panel.main == "linear"
    panel.calibrate(questions, target, 0)
    again = beside_features(plain, "linear", asker, "head")  # type: ignore[arg-type]
    again.load_state_dict(panel.state_dict())
    for name, log_probs in panel.log_probs(questions, calibrated=True).items():
        assert torch.equal(log_probs, again.log_probs(questions, calibrated=True)[name])
        assert log_probs.exp().sum(1).sub(1).abs().max() < 1e-5
        assert math.isfinite(nll(panel.calibrated[name], questions, target))


def test_a_row_is_the_same_alone_and_in_a_block(asked: tuple[Any, Retrieved, Tensor]) -> None:
    head, questions, _ = asked
    together = opinions(head.predictor, questions)
    some = torch.tensor([5, 300, 17])
    with torch.no_grad():
        torch.testing.assert_close(head.predictor.scores(questions.at(some)), together[some])
    assert Block(questions.features, questions.embedding, NO_NEIGHBORS, questions.means).neighbors.mask.numel() == 0
