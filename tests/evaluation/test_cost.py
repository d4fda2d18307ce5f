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
    low, median, high = cost.rows_per_second(model, torch.zeros(ROWS, 3), seconds=0)
    assert model.calls == 1 + 7
    assert 0 < low <= median <= high


def test_median_and_quartiles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up of 100 seconds that does not count, then rounds of 1 to 7 seconds, not in this order; 10 more between any two."""
    clock = accumulate(chain([0, 100], *([10, seconds] for seconds in (5, 1, 7, 3, 2, 6, 4))))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert cost.rows_per_second(Counting(), torch.zeros(ROWS, 3), seconds=0) == (ROWS / 6, ROWS / 4, ROWS / 2)


def test_a_slow_model_is_measured_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = accumulate(chain([0, 1], *([0, 0.25] for _ in range(100))))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    model = Counting()
    cost.rows_per_second(model, torch.zeros(ROWS, 3), seconds=3)
    assert model.calls == 1 + 12


def test_the_load_stands_beside_the_speed() -> None:
    found = cost.speed_of(Counting(), torch.zeros(ROWS, 3))
    low, high = found["images_per_second_quartiles"]
    assert low <= found["images_per_second"] <= high
    assert found["load"] == pytest.approx(os.getloadavg()[0], abs=2)
    assert cost.load_of(1.25) == f"load 1.2 on {os.cpu_count()} cores"
    assert cost.load_of(None) == "load unknown"
