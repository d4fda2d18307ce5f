"""The time that a plan takes."""

from __future__ import annotations

import pytest
import torch

from experiments import preview
from experiments.preview import side_by_side
from run.complete import complete
from run.parts import build_model, load_data
from tests.run.test_run import TINY


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


def test_epochs_of_the_head_alone_take_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose steps have no backbone: a step of 8 s with a forward pass of 2 leaves 2 for the head. And features are computed once."""
    seconds, times = [], iter([2.0, 8.0, 2.0, 8.0])
    monkeypatch.setattr(preview, "median_seconds", lambda _: next(times))
    for epochs in (0, 3):
        given = {**TINY, "head": "attn-knn", "embed_dim": 8, "k_train": 5, "batch_size": 8, "head_epochs": epochs}
        data = load_data(given)
        config = complete(given, data)
        seconds.append(preview.seconds_of_run(config, data, build_model(config, data, torch.device("cpu")), torch.device("cpu")))
    assert data.val is not None
    train, val = (-(-len(part) // 8) for part in (data.train, data.val))
    assert seconds[1] - seconds[0] == pytest.approx(2 * train + 2 * val + 3 * 2 * train)
