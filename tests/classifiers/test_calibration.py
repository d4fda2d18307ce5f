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
from classifiers.calibration import MANY, MODES, SPREADS, calibrate, choose_fit, fit_narrower, train_attention
from classifiers.fit import Scored
from classifiers.heads import LinearHead
from classifiers.neighbor_heads import AttnKnnHead, KnnHead, LinearAttnKnnHead
from classifiers.predictors import HeadPredictor, Vote
from classifiers.prior import Prior
from classifiers.retrieved import NO_NEIGHBORS, Block, Retrieved
from evaluation.baselines import averaged, baseline_head, beside_features, beside_neighbors
from tests.classifiers.test_neighbor_heads import bank_of
from utils import BadOption

C, D, K, N = 3, 5, 7, 601


class Fixed(nn.Module):
    """A head whose log-probabilities are the features."""

    def forward(self, features: Tensor) -> Tensor:
        return F.log_softmax(features, 1)


def nll(predictor: nn.Module, retrieved: Retrieved, target: Tensor) -> float:
    with torch.no_grad():
        return F.nll_loss(torch.cat([predictor(block) for block in retrieved.blocks()]), target).item()


def clusters(rows: int, seed: int, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """Unit vectors around one direction a class; some land among the wrong class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % C
    return F.normalize(torch.eye(C, D)[labels] + spread * torch.randn(rows, D, generator=generator), dim=1), labels


class Brittle(HeadPredictor):
    """Its arithmetic overflows, as L-BFGS's does on few rows, where a class bias or the temperature has gone too far."""

    def __init__(self, bias: float, temperature: float) -> None:
        super().__init__(Fixed(), C)
        self.most = bias, temperature

    def log_probs(self, scores: Tensor, context: Any) -> Tensor:
        if self.class_bias.abs().max() > self.most[0] or self.log_temperature.abs() > self.most[1]:
            raise RuntimeError("value cannot be converted to type double without overflow")
        return super().log_probs(scores, context)


@pytest.mark.parametrize(
    ("bias", "temperature", "said"),
    [(0.0, 9.0, "one temperature is fitted instead"), (0.0, 0.0, "its confidence stays as trained"), (9.0, 9.0, "")],
)
def test_a_fit_that_is_not_finite_gives_way(bias: float, temperature: float, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To a temperature, then to none; the probabilities are finite, and it is said. Without trouble nothing is."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(120, C, generator=generator)
    target = torch.multinomial((features / 2.5 + torch.eye(C)[0]).softmax(1), 1, generator=generator)[:, 0]
    retrieved = Retrieved.without_neighbors(features)
    fitted = calibrate(Brittle(bias, temperature), retrieved, target, "head")
    assert (fitted.get_parameter("class_bias").abs().max() > 0.05) == (bias > 0)
    assert (fitted.log_temperature.abs() > 0.3) == (temperature > 0)
    assert fitted.predict(retrieved).isfinite().all()
    told = capsys.readouterr().err
    assert said in told
    assert bool(told) == bool(said)


def test_a_fit_that_is_not_finite_gets_less_room(capsys: pytest.CaptureFixture[str]) -> None:
    features = torch.randn(120, C, generator=torch.Generator().manual_seed(1))
    retrieved, target = Retrieved.without_neighbors(features), torch.zeros(120, dtype=torch.long)  # it would go as far as it may
    predictor = Brittle(0.8, 9.0)
    fit_narrower(predictor, Scored.by(predictor, retrieved, target), spread=1.0)
    assert 0.01 < predictor.class_bias.abs().max() <= 0.8
    assert "a fit with spread 1 is not finite; one with 0." in capsys.readouterr().err


@pytest.fixture(scope="module")
def fitting() -> tuple[Any, Retrieved, Tensor]:
    torch.manual_seed(0)
    head = AttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1)
    rows, labels = clusters(N, 1)
    bank = Bank(D)
    bank.add(rows, labels)
    head.refresh(bank)
    val, target = clusters(307, 2)
    with torch.no_grad():
        return head.eval(), head.retrieve(val), target


# ---------------------------------------------------------------- temperature


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_a_temperature_is_found_again(temperature: float) -> None:
    """Labels drawn from softmax(x / T): the fitted temperature of a head that says softmax(x) is T."""
    generator = torch.Generator().manual_seed(1)
    features = 3 * torch.randn(20011, C, generator=generator)
    target = torch.multinomial((features / temperature).softmax(1), 1, generator=generator)[:, 0]
    fitted = calibrate(HeadPredictor(Fixed(), C), Retrieved.without_neighbors(features), target, "temperature")
    assert fitted.log_temperature.exp().item() == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("mode", ["head", "temperature"])
def test_a_few_rows_that_are_all_right_leave_a_temperature(mode: str) -> None:
    features, target = torch.eye(C)[[0, 1, 2, 0]] * 2, torch.tensor([0, 1, 2, 0])
    fitted = calibrate(HeadPredictor(Fixed(), C), Retrieved.without_neighbors(features), target, mode)
    assert 0.2 < fitted.log_temperature.exp().item() < 1


def test_a_few_rows_leave_doubt(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    """Rows whose votes are all right: maximum likelihood would be certain of everything, Laplace's rule is not."""
    head, retrieved, _ = fitting
    sure = beside_neighbors(head, "none").of("uniform", calibrated=False).all_scores(retrieved)
    some = (sure.amax(1) == 1).nonzero()[:20, 0]
    predictors = beside_neighbors(head, "head")
    predictors.calibrate(retrieved.subset(some), sure.argmax(1)[some], seed=0)
    doubt = 1 - predictors.log_probs("uniform", retrieved.subset(some), calibrated=True).exp().amax(1)
    assert doubt.min() > 1e-3


class Hilly(Vote):
    """Right the more, the nearer its prior's share is to one half; where shares start, at 5 %, it has a little hill to itself."""

    def __init__(self) -> None:
        super().__init__("uniform", None, C, prior=Prior(C, constant=True))

    def scores(self, block: Block) -> Tensor:
        return block.features

    def log_probs(self, scores: Tensor, context: Any) -> Tensor:
        assert self.prior is not None
        share = self.prior.share_logit
        return F.log_softmax(scores * (2 * (-share.square()).exp() + (-20 * (share + 2.94).square()).exp()), 1)


@pytest.mark.parametrize(("rows", "low", "high"), [(MANY, -1.0, 0.1), (MANY - 1, -3.1, -2.8)])
def test_many_rows_are_fitted_from_a_second_place_and_the_lower_loss_stays(rows: int, low: float, high: float) -> None:
    target = torch.arange(rows) % C
    features = torch.eye(C)[torch.where(torch.arange(rows) % 10 == 0, (target + 1) % C, target)]  # every tenth is wrong
    fitted = calibrate(Hilly(), Retrieved.without_neighbors(features), target, "head")
    assert low < fitted.get_parameter("prior.share_logit").item() < high


def test_many_rows_may_ask_for_more_than_the_widest_of_the_usual_widths() -> None:
    """Rows that are all right: the surer the better, and as far as a fit may go. Of a few such rows it must not believe that."""
    features = torch.randn(MANY + 1, C, generator=torch.Generator().manual_seed(0))
    target = features.argmax(1)
    retrieved = Retrieved.without_neighbors(features)
    assert choose_fit(HeadPredictor(Fixed(), C), retrieved, target, 0)[1] > SPREADS[-1]
    few = torch.arange(MANY - 1)
    assert choose_fit(HeadPredictor(Fixed(), C), retrieved.subset(few), target[few], 0)[1] <= SPREADS[-1]


# ---------------------------------------------------------------- votes


@pytest.mark.parametrize("mode", MODES)
def test_rows_it_was_fitted_to_are_not_predicted_worse(mode: str, fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, target = fitting
    predictors: Any = beside_neighbors(head, mode).raw
    for predictor in predictors.values():
        before = copy.deepcopy(predictor.state_dict())
        fitted = calibrate(predictor, retrieved, target, mode)
        assert nll(fitted, retrieved, target) <= nll(predictor, retrieved, target) + 1e-6
        assert all(torch.equal(before[k], v) for k, v in predictor.state_dict().items())
        if mode == "none":
            assert all(torch.equal(before[k], v) for k, v in fitted.state_dict().items())


def test_held_out_rows_are_predicted_better(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, target = fitting
    rows, truth = clusters(1009, 3)
    with torch.no_grad():
        others = head.retrieve(rows)
    predictors = beside_neighbors(head, "head")
    predictors.calibrate(retrieved, target, seed=0)
    for name in ("uniform", "distance"):
        assert nll(predictors.calibrated[name], others, truth) < 0.7 * nll(predictors.raw[name], others, truth)
    assert nll(predictors.calibrated["attention"], others, truth) < nll(predictors.raw["attention"], others, truth)


def test_the_same_rows_give_the_same_fit(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, target = fitting
    torch.manual_seed(1)
    first = calibrate(head.predictor, retrieved, target, "head", seed=5)
    torch.manual_seed(2)  # the global generator has no part in it
    second = calibrate(head.predictor, retrieved, target, "head", seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))


def test_noise_is_not_learned(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    """Labels that have nothing to do with the rows: on other rows, knowing nothing costs log C, and this may cost little more."""
    head, retrieved, _ = fitting
    generator = torch.Generator().manual_seed(7)
    fitted = calibrate(head.predictor, retrieved, torch.randint(C, (len(retrieved),), generator=generator), "head")
    with torch.no_grad():
        others = head.retrieve(clusters(1009, 3)[0])
    assert nll(fitted, others, torch.randint(C, (1009,), generator=generator)) < math.log(C) + 0.03


def test_epochs_are_chosen_by_rows_left_out(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    """The first neighbor is always right and the others never: an attention that can learn it should be fitted for as long as it may."""
    head, retrieved, _ = fitting
    target = bank_of(head).labels[retrieved.index[:, 0]]
    assert choose_fit(head.predictor, retrieved, target, 0)[0] >= 4


def test_an_interpolation_ends_near_the_better_part(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    """A linear head that knows the answer beside a vote that does not: the share of the vote falls."""
    head, _, _ = fitting
    torch.manual_seed(0)
    both = LinearAttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1).eval()
    both.refresh(bank_of(head))
    rows, target = clusters(307, 4, spread=0.9)
    with torch.no_grad():
        both.linear.fc.weight.copy_(30 * torch.eye(C, D))
        exact = F.normalize(torch.eye(C, D)[target] + 0.05 * torch.randn(307, D, generator=torch.Generator().manual_seed(3)), dim=1)
        found = both.retrieve(rows)
    retrieved = dataclasses.replace(found, features=exact)
    fitted: Any = calibrate(both.predictor, retrieved, target, "head")
    assert fitted.vote_share < 0.35
    fixed = LinearAttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1, interpolation=0.8).eval()
    fixed.refresh(bank_of(head))
    again: Any = calibrate(fixed.predictor, retrieved, target, "head")
    assert again.vote_share == pytest.approx(0.8)


@pytest.mark.parametrize("sure", [0.0, 30.0])
def test_an_interpolation_is_no_worse_than_either_part_on_the_rows_it_was_fitted_to(sure: float, fitting: Any) -> None:
    """Of a linear head that knows nothing, and of one that knows the answer."""
    torch.manual_seed(0)
    both = LinearAttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1).eval()
    both.refresh(bank_of(fitting[0]))
    x, target = clusters(61, 4, spread=0.9)
    with torch.no_grad():
        both.linear.fc.weight.copy_(sure * torch.eye(C, D))
        retrieved = both.retrieve(x)
    predictors = beside_neighbors(both, "head")
    predictors.calibrate(retrieved, target, seed=0)
    of_name = {name: nll(predictors.of(name, calibrated=True), retrieved, target) for name in predictors.names}
    assert of_name["interpolation"] <= min(of_name["linear"], of_name["attention"]) + 1e-5


def test_a_linear_head_gets_a_bias_for_each_class() -> None:
    """Labels drawn from softmax(x / 2 + b), as where classes are more frequent than in training: b is found, but for a constant."""
    bias = torch.arange(C) - (C - 1) / 2
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(5003, C, generator=generator)
    target = torch.multinomial((x / 2 + bias).softmax(1), 1, generator=generator)[:, 0]
    retrieved = Retrieved.without_neighbors(x)
    fitted: Any = calibrate(HeadPredictor(Fixed(), C), retrieved, target, "head")
    found = fitted.class_bias - fitted.class_bias.mean()
    assert torch.allclose(found, bias, atol=0.2)
    assert fitted.log_temperature.exp().item() == pytest.approx(2, rel=0.1)
    one = calibrate(HeadPredictor(Fixed(), C), retrieved, target, "temperature")
    assert nll(fitted, retrieved, target) < nll(one, retrieved, target) - 0.05


def test_the_linear_part_of_an_interpolation_gets_them_too(fitting: Any) -> None:
    head = fitting[0]
    both = LinearAttnKnnHead(D, C, embed_dim=0, k_train=K, attention_heads=1).eval()
    both.refresh(bank_of(head))
    rows, _ = clusters(31, 4)
    with torch.no_grad():
        retrieved = both.retrieve(rows)
    fitted: Any = calibrate(both.predictor, retrieved, torch.zeros(31, dtype=torch.long), "head")  # one class alone
    assert fitted.linear.class_bias[0] > fitted.linear.class_bias[1:].max()


def test_unknown_mode() -> None:
    with pytest.raises(BadOption, match="did you mean 'head'"):
        calibrate(HeadPredictor(Fixed(), C), Retrieved.without_neighbors(torch.eye(C)), torch.arange(C), "heads")


# ---------------------------------------------------------------- the baselines


def test_baselines_look_at_the_same_neighbors(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, _ = fitting
    predictors = beside_neighbors(head, "head")
    assert list(predictors.raw) == ["uniform", "distance", "attention"]
    assert predictors.own == "attention"
    uniform = predictors.log_probs("uniform", retrieved, calibrated=False).exp()
    counts = torch.stack([(bank_of(head).labels[row] == torch.arange(C)[:, None]).sum(1) for row in retrieved.index])
    torch.testing.assert_close(uniform, counts / K, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(predictors.log_probs("attention", retrieved, calibrated=False).exp(), head(retrieved.features).exp())


def test_views_are_averaged_as_probabilities(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, _ = fitting
    with torch.no_grad():
        other = head.retrieve(clusters(len(retrieved), 9)[0])
    predictors = beside_neighbors(head, "none")
    one, two = (predictors.log_probs("attention", view, calibrated=False) for view in (retrieved, other))
    torch.testing.assert_close(averaged([one, two]).exp(), (one.exp() + two.exp()) / 2)
    assert torch.equal(averaged([one]), one)


def test_every_k_from_one_search(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, _ = fitting
    found = beside_neighbors(head, "none").by_k(retrieved, [1, 3, K], calibrated=False)
    for k, log_probs in ((k, found[k]["uniform"]) for k in (1, 3, K)):
        single = KnnHead(D, C, vote="uniform", k_train=k, embed_dim=0).eval()
        predictor: Any = single.predictor
        predictor.prior = None
        single.refresh(bank_of(head))
        torch.testing.assert_close(log_probs, single(retrieved.embedding))


def test_baselines_of_a_head_without_a_bank(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, target = fitting
    retriever = baseline_head(D, C, k_train=K).eval()
    retriever.refresh(bank_of(head))
    start = copy.deepcopy(retriever.vote.state_dict())
    train_attention(retriever.vote, retriever.leave_one_out(bank_of(head).ids), bank_of(head).labels, seed=0)
    assert any(not torch.equal(start[k], v) for k, v in retriever.vote.state_dict().items())
    plain = LinearHead(D, C)
    predictors = beside_features(plain, "linear", retriever, "head")
    assert list(predictors.raw) == ["linear", "uniform", "distance", "attention"]
    assert predictors.own == "linear"
    predictors.calibrate(retrieved, target, 0)
    again = beside_features(plain, "linear", retriever, "head")
    again.load_state_dict(predictors.state_dict())
    for name in predictors.names:
        log_probs = predictors.log_probs(name, retrieved, calibrated=True)
        assert torch.equal(log_probs, again.log_probs(name, retrieved, calibrated=True))
        assert log_probs.exp().sum(1).sub(1).abs().max() < 1e-5
        assert math.isfinite(nll(predictors.calibrated[name], retrieved, target))


def test_a_row_is_the_same_alone_and_in_a_block(fitting: tuple[Any, Retrieved, Tensor]) -> None:
    head, retrieved, _ = fitting
    together = head.predictor.all_scores(retrieved)
    some = torch.tensor([5, 300, 17])
    with torch.no_grad():
        torch.testing.assert_close(head.predictor.scores(retrieved.block(some)), together[some])
    assert Block(retrieved.features, retrieved.embedding, NO_NEIGHBORS, retrieved.class_cosines).neighbors.mask.numel() == 0


@pytest.mark.parametrize("kind", ["linear", "knn"])
def test_a_fit_does_not_depend_on_how_many_rows_are_looked_at_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """601 rows at once, and 100 at a time with one left: loss and gradients of the first step, before rounding has led them apart."""
    torch.manual_seed(0)
    head: Any = LinearHead(D, C) if kind == "linear" else KnnHead(D, C, k_train=K, standardize=False)
    bank = Bank(D)
    bank.add(*clusters(97, 0))
    head.eval().refresh(bank)
    features, target = clusters(N, 1)
    with torch.no_grad():
        predictor, retrieved = head.as_predictor(C), head.retrieve(features)
        rows = Scored.by(predictor, retrieved, target)
    seen: list[list[Tensor]] = []
    whole = torch.optim.LBFGS.step

    def step(optimizer: torch.optim.LBFGS, loss: Any) -> Any:
        value = loss()
        seen.append([value, *(p.grad.clone() for group in optimizer.param_groups for p in group["params"])])
        return whole(optimizer, loss)

    monkeypatch.setattr(torch.optim.LBFGS, "step", step)
    for numbers in (N * C, 100 * C + 1):
        monkeypatch.setattr("classifiers.fit.NUMBERS", numbers)
        fitted = fit_narrower(copy.deepcopy(predictor).requires_grad_(False), rows, spread=1.0)
        assert nll(fitted, retrieved, target) < nll(predictor, retrieved, target)
    at_once, in_parts = seen
    for one, other in zip(at_once, in_parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert max(gradient.abs().max() for gradient in at_once[1:]) > 1e-3  # there is something to be equal
