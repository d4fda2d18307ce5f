"""Which epoch counts: by validation accuracy, where accuracies that so few rows can't tell apart count as equal."""

from __future__ import annotations

import pytest

from train_eval import better_epoch, better_head
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

LOWER, HIGHER = ({"nll": 0.3}, {"nll": 0.4}), ({"nll": 0.4}, {"nll": 0.3})  # after, before


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (3, 0), (4, 0), (0, 4), (9, 4), (39, 26)])
def test_a_head_has_the_lower_nll_where_chance_explains_which_rows_changed(lost: int, gained: int) -> None:
    """Of four coins all show heads with .5^4 = .0625; of 13 nine or more with .133, of 65 39 or more with .068."""
    assert better_head(*LOWER, lost, gained, "accuracy") is True
    assert better_head(*HIGHER, lost, gained, "accuracy") is False


@pytest.mark.parametrize(("lost", "gained"), [(5, 0), (12, 2), (40, 25)])
def test_more_rows_changed_one_way_than_chance_explains(lost: int, gained: int) -> None:
    """Of five coins .5^5 = .031; of 14 twelve or more .006; of 65 40 or more .041."""
    for pair in (LOWER, HIGHER):
        assert better_head(*pair, lost, gained, "accuracy") is False
        assert better_head(*pair, gained, lost, "accuracy") is True
        assert better_head(*pair, lost, gained, "nll") is (pair is LOWER)
        assert better_head(*pair, lost, gained, "last") is True
