"""Which epoch counts: by validation accuracy, where accuracies that so few rows can't tell apart count as equal."""

from __future__ import annotations

import pytest

from train_eval import better_epoch
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
