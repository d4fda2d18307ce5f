"""Which epoch counts: by validation accuracy, where accuracies that so few rows can't tell apart count as equal."""

from __future__ import annotations

import pytest
import torch

from train_eval import Judged, better_epoch, better_head
from training.state import Place


def chosen(select: str, rows: int, *epochs: tuple[float, float]) -> int:
    """The epoch that counts, of (accuracy, NLL) each."""
    place, best = Place(), 0
    for number, (accuracy, nll) in enumerate(epochs, 1):
        scores = {"accuracy": accuracy, "nll": nll}
        if better_epoch(scores, place, select, rows):
            place.best, best = scores, number
    return best


def test_within_one_standard_error_the_lower_nll_wins() -> None:
    # one standard error of .80 over 601 rows (and four more) is .0163
    epochs = (0.80, 0.923), (0.79, 0.7), (0.783, 0.6), (0.7835, 0.5), (0.785, 0.498)
    assert chosen("accuracy", 601, *epochs) == 5
    assert chosen("accuracy", 601, (0.80, 0.923), (0.7836, 0.498)) == 1  # .7837 would have been within it
    assert chosen("accuracy", 100_000, *epochs) == 1


def test_a_new_highest_accuracy_moves_the_line() -> None:
    """The best so far falls out of the standard error of the new one, whose NLL is higher."""
    assert chosen("accuracy", 601, (0.70, 0.3), (0.80, 0.9)) == 2
    assert chosen("accuracy", 601, (0.70, 0.3), (0.80, 0.9), (0.79, 0.5)) == 3


def test_a_perfect_accuracy_has_a_standard_error_too() -> None:
    """Of 143 rows: sqrt(145/147 * 2/147 / 147) = .0096, so one row wrong (.9930) lies within it, two (.9860) do not."""
    assert chosen("accuracy", 143, (1.0, 0.5), (142 / 143, 0.1), (1.0, 0.4)) == 2
    assert chosen("accuracy", 143, (1.0, 0.5), (141 / 143, 0.1), (1.0, 0.4)) == 3


@pytest.mark.parametrize(("select", "best"), [("nll", 2), ("last", 3)])
def test_other_rules(select: str, best: int) -> None:
    assert chosen(select, 601, (0.9, 0.5), (0.5, 0.3), (0.6, 0.4)) == best


# ---------------------------------------------------------------- a head before and after its own epochs


def head(nll: float, *right: int) -> Judged:
    """Groups of rows that are right or not, in turn."""
    rows = [torch.full((count,), number % 2 == 0) for number, count in enumerate(right)]
    return Judged({"nll": nll}, torch.cat(rows))


def better(after_nll: float, before_nll: float, lost: int, gained: int, select: str) -> bool:
    """Five rows stay right, the next are lost, the last are gained."""
    after, before = head(after_nll, 5, lost, gained), head(before_nll, 5 + lost, gained)
    return better_head(after, before, select)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (3, 0), (4, 0), (0, 4), (9, 4), (39, 26)])
def test_a_head_has_the_lower_nll_where_chance_explains_which_rows_changed(lost: int, gained: int) -> None:
    """Of four coins all show heads with .5^4 = .0625; of 13 nine or more with .133, of 65 39 or more with .068."""
    assert better(0.3, 0.4, lost, gained, "accuracy")
    assert not better(0.4, 0.3, lost, gained, "accuracy")


@pytest.mark.parametrize(("lost", "gained"), [(5, 0), (12, 2), (40, 25)])
def test_more_rows_changed_one_way_than_chance_explains(lost: int, gained: int) -> None:
    """Of five coins .5^5 = .031; of 14 twelve or more .006; of 65 40 or more .041."""
    for pair in ((0.3, 0.4), (0.4, 0.3)):
        assert not better(*pair, lost, gained, "accuracy")
        assert better(*pair, gained, lost, "accuracy")
        assert better(*pair, lost, gained, "nll") is (pair == (0.3, 0.4))
        assert better(*pair, lost, gained, "last")
