"""Trackers, each with its own package where that is installed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from run.directory import MARKER, new, read_marker
from run.lock import FILE
from training.progress import TRACKERS, Results, Tracker, tell_results, tracked


def png() -> bytes:
    kept = io.BytesIO()
    Image.fromarray(np.full((5, 7, 3), (10, 200, 30), np.uint8)).save(kept, format="png")
    return kept.getvalue()


def results() -> Results:
    options = {"dataset": "wine", "lr": 0.125, "augment": False, "betas": (0.9, 0.99)}
    return Results({"test/accuracy": 0.75, "test/nll": 1.5}, options, {"curves": png()}, "the <table>")


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


class Diary(Tracker):
    """Makes a file when it begins and another when it ends, as TensorBoard does."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.made = [folder / "first.diary", folder / "last.diary"]
        self.made[0].write_text("begun")

    def finish(self) -> None:
        self.made[1].write_text("ended")

    def files(self) -> list[Path]:
        return [path for path in self.made if path.exists()]


@pytest.mark.parametrize("name", ["diary", "tensorboard"])
def test_what_a_tracker_writes_is_the_runs_own_and_goes_with_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "diary", Diary)
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    folder, mine = tmp_path / "run", "events.out.tfevents.1700000000.host.1.0"  # of another process
    with new(folder, "", {"config": {}}, False) as directory:
        (folder / mine).write_text("mine")
        with tracked(name, folder, {}, directory) as tracker:
            first = {path.name for path in folder.iterdir()} - {mine, MARKER, FILE}
            assert first
            assert first <= set((read_marker(folder) or {})["files"])  # listed while it is written: a kill may come
            tell_results(tracker, results())
    made = {path.name for path in folder.iterdir()} - {mine, MARKER}
    assert len(made) == 2
    with new(folder, "", {"config": {}}, True):
        assert {path.name for path in folder.iterdir()} == {mine, MARKER, FILE}


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
