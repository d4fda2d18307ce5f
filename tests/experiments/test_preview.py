"""The time that a plan takes."""

from __future__ import annotations

import pytest

from experiments.preview import side_by_side


@pytest.mark.parametrize(
    ("times", "jobs", "wanted"),
    [
        ([], 2, 0),
        ([5], 4, 5),  # one run is not shared out
        ([3, 1, 1, 1], 2, 3),
        ([1, 1, 1, 3], 2, 4),  # in the order in which they begin
        ([2, 2, 2], 2, 4),
        ([2, 3, 4], 1, 9),
    ],
)
def test_runs_side_by_side(times: list[float], jobs: int, wanted: float) -> None:
    assert side_by_side(times, jobs) == wanted
