"""Trackers, each with its own package where that is installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from training.progress import TRACKERS, Results, Tracker, tell_results, tracked


def png() -> bytes:
    kept = io.BytesIO()
    Image.fromarray(np.full((5, 7, 3), (10, 200, 30), np.uint8)).save(kept, format="png")
    return kept.getvalue()


def results() -> Results:
    options = {"dataset": "wine", "lr": 0.125, "augment": False, "betas": (0.9, 0.99)}
    return Results({"test/accuracy": 0.75, "test/nll": 1.5}, options, {"curves": png()}, "the table")


def test_tensorboard_holds_scores_options_and_figures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tracked("tensorboard", tmp_path, {}) as tracker:
        tracker.log({"val/nll": 2.0}, 1)
        tell_results(tracker, results())
    assert all(path.is_file() and path.name.startswith("events.out.tfevents.") for path in tmp_path.iterdir())
    scalars: dict[str, float] = {}
    images: list[Any] = []
    options: dict[str, Any] = {}
    for path in tmp_path.iterdir():
        found = accumulator.EventAccumulator(str(path))
        found.Reload()
        tags = found.Tags()
        scalars |= {tag: found.Scalars(tag)[0].value for tag in tags["scalars"]}
        images += [found.Images(tag)[0] for tag in tags["images"]]
        if "_hparams_/session_start_info" in found.summary_metadata:
            content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
            options = hparams_of(content)
    assert scalars == {"val/nll": 2.0, "test/accuracy": 0.75, "test/nll": 1.5}
    assert [(image.width, image.height) for image in images] == [(7, 5)]
    assert options == {"dataset": "wine", "lr": 0.125, "augment": False, "betas": "(0.9, 0.99)"}


def hparams_of(content: bytes) -> dict[str, Any]:
    from tensorboard.plugins.hparams import plugin_data_pb2

    data = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in data.items()}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_others_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which is read when the package is imported
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    with tracked(name, tmp_path, {"lr": 0.125}) as tracker:
        tracker.log({"val/nll": 2.0}, 1)
        tracker.results(results())
    assert any(path.is_file() and path.stat().st_size for path in tmp_path.rglob("*"))


def test_a_tracker_is_finished_however_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ends: list[str] = []

    class Poor(Tracker):
        def results(self, results: Results) -> None:
            raise OSError("no network")

        def finish(self) -> None:
            ends.append("finished")

    monkeypatch.setitem(TRACKERS, "none", Poor)
    with tracked("none", tmp_path, {}) as tracker:
        tell_results(tracker, results())
    assert "tracker: the results did not reach it (OSError: no network)" in capsys.readouterr().err
    with pytest.raises(KeyError), tracked("none", tmp_path, {}):
        raise KeyError
    assert ends == ["finished", "finished"]
