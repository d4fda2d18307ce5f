"""Measured speed: at least seven rounds, their median and quartiles, and how busy the machine was."""

from __future__ import annotations

import os
import time
from itertools import accumulate, chain

import pytest
import torch
from torch import nn

from evaluation import cost

ROWS = 5
MEASURED = True


class Counting(nn.Module):
    """How often it was called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_a_fast_model_is_measured_in_seven_rounds_after_a_warm_up() -> None:
    model = Counting()
    low, median, high = cost.rows_per_second(model, torch.zeros(ROWS, 3), least=0, most=0)
    assert model.calls == 1 + 7
    assert 0 < low <= median <= high


def test_median_and_quartiles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up of 100 seconds that does not count, then rounds of 1 to 7 seconds, not in this order; 10 more between any two."""
    clock = accumulate(chain([0, 100], *([10, seconds] for seconds in (5, 1, 7, 3, 2, 6, 4))))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert cost.rows_per_second(Counting(), torch.zeros(ROWS, 3), least=0, most=0) == (ROWS / 6, ROWS / 4, ROWS / 2)


def test_a_measurement_ends_when_its_quartiles_are_near_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a quarter of a second, all alike: for two seconds. Where every other takes twice as long: for four and a half."""
    for rounds, calls in (([0, 0.25], [0, 0.25]), 1 + 8), (([0, 0.25], [0, 0.5]), 1 + 12):
        clock = accumulate(chain([0, 1], *rounds * 50))
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: next(clock))
        model = Counting()
        cost.rows_per_second(model, torch.zeros(ROWS, 3), least=2, most=4.5)
        assert model.calls == calls


def test_the_load_stands_beside_the_speed() -> None:
    found = cost.speed_of(Counting(), torch.zeros(ROWS, 3))
    low, high = found["images_per_second_quartiles"]
    assert low <= found["images_per_second"] <= high
    assert found["load"] == pytest.approx(os.getloadavg()[0], abs=2)
    assert cost.load_of(1.25) == f"load 1.2 on {os.cpu_count()} cores"
    assert cost.load_of(None) == "load unknown"
