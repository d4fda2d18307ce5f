"""Options that need something else, a run that is there already, files, a plugin, to a figure that would be noticed if it were bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from config import Action
from inputs import store
from run.run import run
from run.verify import verify_run
from training.progress import TRACKERS, Results, Tracker
from utils import Stopped

WINE: dict[str, Any] = {"dataset": "wine", "calibrate": "temperature", "baselines": False, "num_epochs": 20}
DIGITS: dict[str, Any] = {"num_epochs": 4, "num_layers": 2, "lr": 4e-3, "mixup_alpha": 0.0, "ema_decay": 0.0, "dropout": 0.0}
DIGITS |= {"calibrate": "temperature", "baselines": False}
HARDLY = {"num_epochs": 1, "lr": 1e-6}  # what is good after it was good before


class Others:
    """What an option needs beside itself."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def finished(self, name: str) -> str:
        """A run of the data set of that name, trained once."""
        folder = self.runs / name
        if not folder.exists():
            run({**{"wine": WINE, "digits": DIGITS}[name], "output_dir": str(folder)}, Action())
        return str(folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Others:
    return Others(tmp_path_factory.mktemp("runs"))


Case = Callable[[Others, Path], dict[str, Any]]
CASES: dict[str, Case] = {}


def case(*options: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        CASES.update(dict.fromkeys(options, function))
        return function

    return keep


@case("device", "output_dir")
def placed(others: Others, out: Path) -> dict[str, Any]:
    found = run({**WINE, "device": "cpu", "output_dir": str(out)}, Action())
    assert json.loads((out / "results.json").read_text())["test"] == found["test"]
    return found


@case("data_path", "workers", "skip_broken")
def from_files(others: Others, out: Path) -> dict[str, Any]:
    """Zeros and ones among the digits, as image files that a process of its own reads; one of them is none."""
    digits = load_digits()
    for number, (pixels, label) in enumerate((x, y) for x, y in zip(digits.images, digits.target, strict=True) if y < 2):
        part = "val" if number % 4 == 0 else "train"
        file = out / "data" / part / f"n{label}" / f"{number}.JPEG"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((15 * pixels).astype(np.uint8)).save(file, quality=95)
    (out / "data" / "train" / "n0" / "broken.JPEG").write_bytes(b"no image")
    small = {"resize": 16, "patch_size": 4, "num_layers": 1, "num_heads": 2, "d_hidden": 32, "d_mlp": 32, "augment": False}
    given = {**small, "dataset": "imagenet", "data_path": str(out / "data"), "workers": 1, "num_epochs": 6, "batch_size": 16, "lr": 4e-3}
    return run({**given, "skip_broken": True, "calibrate": "none", "baselines": False, "output_dir": str(out / "run")}, Action())


@case("use_compiled", "compile_mode")
def compiled(others: Others, out: Path) -> dict[str, Any]:
    """As good as eager to the sixth digit, and its weights have the same names."""
    plain = {**DIGITS, "num_layers": 1, "num_epochs": 6, "mixup_alpha": 0.1, "ema_decay": 0.9, "accumulate": 2}
    found = run({**plain, "use_compiled": True, "compile_mode": "default", "output_dir": str(out / "compiled")}, Action())
    eager = run({**plain, "output_dir": str(out / "eager")}, Action())
    assert found["test"]["nll"] == pytest.approx(eager["test"]["nll"], abs=1e-5)
    ours, theirs = (store.load(out / name / "checkpoints" / "best")[0]["model"] for name in ("compiled", "eager"))
    assert ours.keys() == theirs.keys()
    return found


@case("pretrained")
def begun_from_a_run(others: Others, out: Path) -> dict[str, Any]:
    """Its backbone is there, and its head is not: one epoch gives a new one."""
    plain = {**WINE, "num_epochs": 2, "lr": 4e-3, "lr_backbone": 0.0, "warmup_epochs": 0.0}
    return run({**plain, "pretrained": others.finished("wine"), "output_dir": str(out)}, Action())


@case("freeze_backbone", "feature_cache")
def frozen(others: Others, out: Path) -> dict[str, Any]:
    """A vote over the features of a run: nothing is learned but a prior. With their cache once more."""
    given = {**WINE, **HARDLY, "pretrained": others.finished("wine"), "freeze_backbone": True, "head": "knn"}
    given["feature_cache"] = str(out / "cache")
    first = run({**given, "output_dir": str(out / "first")}, Action())
    kept = sorted(path.name for path in (out / "cache").iterdir())
    assert {name.partition("-")[0] for name in kept} == {"train", "val", "test"}
    second = run({**given, "output_dir": str(out / "second")}, Action())
    assert sorted(path.name for path in (out / "cache").iterdir()) == kept
    assert second["test"] == first["test"]
    return first


@case("views")
def frozen_in_views(others: Others, out: Path) -> dict[str, Any]:
    given = {**DIGITS, "pretrained": others.finished("digits"), "freeze_backbone": True, "augment": True, "views": 2, "num_epochs": 8}
    found = run({**given, "lr": 0.05, "output_dir": str(out)}, Action())
    assert len(list((out / "features").glob("train-augmented-*"))) == 2
    return found


@case("plugin")
def of_a_plugin(others: Others, out: Path) -> dict[str, Any]:
    """A nearest-mean head, registered by a file."""
    file = out / "nearest_mean.py"
    file.write_text(
        "import torch\nimport torch.nn.functional as F\nfrom classifiers import HEADS, Head\n\n\n"
        '@HEADS.register("alone-nearest-mean")\nclass NearestMean(Head):\n    """Nearest of the learned means."""\n\n'
        "    def __init__(self, num_features, num_classes):\n        super().__init__()\n"
        "        self.means = torch.nn.Parameter(torch.randn(num_classes, num_features))\n\n"
        "    def forward(self, features):\n        return F.log_softmax(-torch.cdist(features, self.means), 1)\n\n"
        '    def loss(self, features, target, index):\n        return {"nll": F.nll_loss(self(features), target)}\n'
    )
    return run({**WINE, "plugin": str(file), "head": "alone-nearest-mean", "output_dir": str(out / "run")}, Action())


@case("timeout")
def with_little_patience(others: Others, out: Path) -> dict[str, Any]:
    """Of several processes; one alone waits for nobody."""
    return run({**WINE, "output_dir": str(out / "run")}, Action(timeout=10.0))


@case("tracker")
def tracked(others: Others, out: Path) -> dict[str, Any]:
    """A tracker is told what metrics.jsonl has; at the end test scores, options and figures; and what it does then costs no run."""
    told: list[tuple[int, float]] = []
    ended: list[Results] = []

    class Told(Tracker):
        def files(self) -> list[Path]:
            return [out / "events.out.tfevents.0"]

        def log(self, values: Any, epoch: int) -> None:
            told.append((epoch, values["val/accuracy"]))
            self.files()[0].write_text("epochs")

        def results(self, results: Results) -> None:
            ended.append(results)
            self.files()[0].write_text("epochs, and results when the run is written")
            raise ConnectionError("nobody there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRACKERS, "tensorboard", Told)
        found = run({**WINE, "tracker": "tensorboard", "output_dir": str(out)}, Action())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert told == [(line["epoch"], line["val"]["accuracy"]) for line in lines]
    assert max(accuracy for _, accuracy in told) > 0.88
    (end,) = ended
    assert end.scores["test_calibrated/nll"] == found["test_calibrated"]["nll"]
    assert (end.options["dataset"], "layer" in end.options) == ("wine", False)
    assert end.figures == {"curves": (out / "curves.png").read_bytes()}
    assert verify_run(out).state == "whole"
    return found


@case("ood")
def foreign_rows(others: Others, out: Path) -> dict[str, Any]:
    """Ten times as far from the mean as any wine, in columns that have nothing to do with each other."""
    from sklearn.datasets import load_wine

    x = load_wine().data
    far = x.mean(0) + 10 * x.std(0) * np.random.default_rng(0).choice([-1.0, 1.0], (40, 13))
    np.savez(out / "far.npz", x_train=x[:80], y_train=np.arange(80) % 3, x_test=far, y_test=np.arange(40) % 3)
    found = run({**WINE, "head": "knn", "ood": f"npz:{out / 'far.npz'}", "output_dir": str(out / "run")}, Action())
    assert found["about"]["ood"]["auroc_distance"] > 0.9
    return found


@case("config")
def by_a_file(others: Others, out: Path) -> dict[str, Any]:
    (out / "wine.yaml").write_text(yaml.safe_dump(WINE))
    return run({"output_dir": str(out / "run")}, Action(config=str(out / "wine.yaml")))


@case("overwrite")
def in_the_place_of_another(others: Others, out: Path) -> dict[str, Any]:
    worse = run({**WINE, **HARDLY, "output_dir": str(out / "run")}, Action())
    assert worse["test"]["nll"] > 0.9
    return run({**WINE, "output_dir": str(out / "run")}, Action(overwrite=True))


@case("resume", "stop_after")
def stopped_and_resumed(others: Others, out: Path) -> dict[str, Any]:
    with pytest.raises(Stopped, match=r"^stopped after epoch 3 of 20, as asked"):
        run({**WINE, "output_dir": str(out / "run")}, Action(stop_after=3))
    assert len((out / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    return run({}, Action(resume=str(out / "run")))


@case("test_only", "checkpoint")
def scored_again(others: Others, out: Path) -> dict[str, Any]:
    found = run({"output_dir": str(out)}, Action(test_only=True, checkpoint=others.finished("wine")))
    assert found["test"] == json.loads((Path(others.finished("wine")) / "results.json").read_text())["test"]
    return found


@case("recalibrate")
def calibrated_to_noise(others: Others, out: Path) -> dict[str, Any]:
    """With noise on validation rows too, confidence is fitted to it, and the NLL of noisy test rows is lower."""
    action = Action(test_only=True, checkpoint=others.finished("digits"))
    as_it_was = run({"noise": 0.5, "output_dir": str(out / "before")}, action)
    anew = run({"noise": 0.5, "recalibrate": True, "output_dir": str(out / "anew")}, action)
    assert anew["test"] == as_it_was["test"]
    assert anew["test_calibrated"]["nll"] < as_it_was["test_calibrated"]["nll"]
    return run({"recalibrate": True, "output_dir": str(out / "clean")}, action)


@pytest.mark.parametrize("function", list(dict.fromkeys(CASES.values())), ids=lambda function: function.__name__)
def test_alone_with_what_it_needs(function: Case, others: Others, tmp_path: Path) -> None:
    """Chance is 40 % of wine's test rows and 10 % of digits'. A log 3 or log 10 of NLL is that of knowing nothing."""
    results = function(others, tmp_path)
    digits = results["about"]["config"]["dataset"] == "digits"
    for scores in (results[variant] for variant in {"test", "test_calibrated"} & set(results)):
        assert scores["accuracy"] >= (0.7 if digits else 0.88), scores
        assert scores["nll"] <= (1.0 if digits else 0.5), scores
