"""A run resumed is the run that never stopped; what it writes can be trusted."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from classifiers import HEADS, LinearHead
from config import Action
from inputs import store
from run.directory import look
from run.lock import Lock
from run.run import run
from utils import BadOption, Diverged, Stopped

ROOT = Path(__file__).parent.parent.parent
# Everything that could remember something: dropout, augmentation, MixUp, EMA, accumulation, warm-up, a last batch that is smaller.
# Its confidence is one temperature: to fit all that sets it takes longer than the rest of so small a run, and is for tests that look at it.
TINY: dict[str, Any] = dict(
    dataset="fake(train=97, test=31, size=8, classes=3)",
    num_layers=1, num_heads=1, d_hidden=6, d_mlp=7, patch_size=4, batch_size=16, num_epochs=4, lr=1e-2, dropout=0.1, attention_dropout=0.1,
    augment=True, mixup_alpha=0.3, cutmix_alpha=0.5, ema_decay=0.9, accumulate=2, warmup_epochs=1, deterministic=True, noise=0.01,
    head_epochs=0, calibrate="temperature",
)  # fmt: skip


class Signalling(LinearHead):
    """A linear head that sends its own process a signal at its n-th loss."""

    number, at, count = 0, -1, 0

    def loss(self, features: torch.Tensor, target: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        cls = type(self)
        cls.count += 1
        if cls.count == cls.at:
            os.kill(os.getpid(), cls.number)
        return super().loss(features, target, index)

    @classmethod
    def arm(cls, number: int, at: int) -> None:
        cls.number, cls.at, cls.count = number, at, 0


HEADS.register("signalling")(Signalling)


@pytest.fixture(autouse=True)
def disarmed():
    Signalling.arm(0, -1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few image files of different sizes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("val", 5)):
        for name in ("ant", "bee"):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (11 + i, 13, 3), np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return f"folder:{root}"


def everything(run_dir: Path) -> dict[str, Any]:
    """All that two equal runs must share, bit for bit."""
    found: dict[str, Any] = {}
    for name in ("last", "best"):
        tensors, facts = store.load(run_dir / "checkpoints" / name)
        found |= {f"{name}/{group}/{key}": t.numpy().tobytes() for group, named in tensors.items() for key, t in named.items()}
        if "training" in facts:
            place = {k: v for k, v in facts["training"]["place"].items() if k != "seconds"}
            found[f"{name}/place"] = place
            found[f"{name}/rest"] = {k: v for k, v in facts["training"].items() if k != "place"}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found["lines"] = [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in lines]
    results = json.loads((run_dir / "results.json").read_text())
    found["scores"] = {k: results[k] for k in ("test", "test_calibrated", "val", "val_calibrated") if k in results}
    found["about"] = {k: results["about"][k] for k in ("epoch", "params", "gflops", "data")}
    return found


def assert_same(a: Path, b: Path) -> None:
    first, second = everything(a), everything(b)
    assert first.keys() == second.keys()
    assert [k for k in first if first[k] != second[k]] == []


def values(kind: str, folder: str, out: Path) -> dict[str, Any]:
    if kind == "memory":
        return {**TINY, "calibrate": "head", "output_dir": str(out)}
    return {**TINY, "dataset": folder, "resize": 8, "workers": int(kind[-1]), "output_dir": str(out)}


@pytest.mark.parametrize("kind", ["memory", "files, workers 0", "files, workers 2"])
def test_two_epochs_and_two_more_are_four(kind: str, folder: str, tmp_path: Path) -> None:
    run(values(kind, folder, tmp_path / "whole"), Action())
    with pytest.raises(Stopped, match="after epoch 2 of 4"):
        run(values(kind, folder, tmp_path / "parts"), Action(stop_after=2))
    assert not (tmp_path / "parts" / "results.json").exists()
    torch.rand(7)  # whatever else happened in between
    run({}, Action(resume=str(tmp_path / "parts")))
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_workers_change_nothing(folder: str, tmp_path: Path) -> None:
    for kind in ("files, workers 0", "files, workers 2"):
        run(values(kind, folder, tmp_path / kind[-1]), Action())
    assert_same(tmp_path / "0", tmp_path / "2")


@pytest.mark.parametrize("kind", ["memory", "files, workers 2"])
@pytest.mark.parametrize(("number", "at", "code"), [(signal.SIGTERM, 3, 143), (signal.SIGINT, 8, 130)])
def test_a_signal_in_the_middle_of_an_epoch(kind: str, number: int, at: int, code: int, folder: str, tmp_path: Path) -> None:
    run({**values(kind, folder, tmp_path / "whole"), "head": "signalling"}, Action())
    Signalling.arm(number, at)
    with pytest.raises(Stopped, match="batch") as stop:
        run({**values(kind, folder, tmp_path / "parts"), "head": "signalling"}, Action())
    assert stop.value.exit_code == code
    assert str(stop.value).endswith(f"resume with: python main.py --resume {tmp_path / 'parts'}")
    run({}, Action(resume=str(tmp_path / "parts")))
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_killed_without_warning(tmp_path: Path) -> None:
    """SIGKILL in the middle of epoch 3: the run goes on from the end of epoch 2, and ends the same."""
    plugin = tmp_path / "killer.py"
    plugin.write_text(
        "import os\nfrom classifiers import HEADS, LinearHead\n\n@HEADS.register('killer')\nclass Killer(LinearHead):\n    count = 0\n\n"
        "    def loss(self, *inputs):\n        Killer.count += 1\n        if Killer.count == int(os.environ.get('KILL_AT', 0)):\n"
        "            os.kill(os.getpid(), 9)\n        return super().loss(*inputs)\n"
    )
    wanted = {**TINY, "head": "killer", "plugin": str(plugin)}
    run({**wanted, "output_dir": str(tmp_path / "whole")}, Action())
    words = [f"--{k}={v}" if not isinstance(v, bool) else f"--{k}" for k, v in wanted.items()]
    command = [sys.executable, str(ROOT / "main.py"), *words, "--output_dir", str(tmp_path / "parts")]
    environment = {**os.environ, "KILL_AT": "15", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run({"plugin": str(plugin)}, Action(resume=str(tmp_path / "parts")))
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_same_seed_same_run_other_seed_other_run(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run({**TINY, "num_epochs": 1, "calibrate": "head", "seed": seed, "output_dir": str(tmp_path / name)}, Action())
    assert_same(tmp_path / "a", tmp_path / "b")
    assert everything(tmp_path / "a")["lines"] != everything(tmp_path / "c")["lines"]


def test_results_and_run_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    results = run({**TINY, "num_epochs": 2, "label_noise": "0.5", "imbalance": 0.5, "output_dir": str(out)}, Action())
    assert results == json.loads((out / "results.json").read_text())
    assert list(results) == ["test", "test_calibrated", "predictors", "val", "val_calibrated", "warnings", "about"]
    wanted = "confusion epoch params gflops images_per_second peak_memory_mb seconds load config ignored data versions git threads"
    assert set(wanted.split()) <= set(results["about"])
    assert set(results["val"]) == {"accuracy", "top5", "f1_macro", "nll", "ece", "brier"}
    more = {"ece_equal_mass", "ece_classwise", "aurc", "accuracy_at_80", "accuracy_at_90", "accuracy_at_95", "balanced_accuracy"}
    assert set(results["test"]) == set(results["val"]) | more
    assert results["test"]["top5"] == 1.0  # three classes
    assert results["about"]["config"]["d_hidden"] == 6
    assert results["about"]["threads"] == torch.get_num_threads()
    assert results["about"]["data"]["label_noise_rate"] == pytest.approx(0.5, abs=0.02)
    counts = results["about"]["data"]["class_counts"]
    assert sum(counts) == results["about"]["data"]["train"] < 97
    names = {p.name for p in out.iterdir()}
    files = {"config.yaml", "args.txt", "model.txt", "metrics.jsonl", "train_eval_results.txt", "curves.png", "predictions.safetensors"}
    files |= {"run.json", "results.json", "results.csv", "checkpoints"}
    assert names == files
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[0]["lr"] > 0
    assert "accuracy" in (out / "train_eval_results.txt").read_text()


def test_config_file_repeats_a_run(tmp_path: Path) -> None:
    run({**TINY, "num_epochs": 1, "output_dir": str(tmp_path / "a")}, Action())
    run({"output_dir": str(tmp_path / "b")}, Action(config=str(tmp_path / "a" / "config.yaml")))
    assert_same(tmp_path / "a", tmp_path / "b")


def test_best_epoch_is_the_one_of_validation(tmp_path: Path) -> None:
    """The weights in checkpoints/best score on validation what the best line of metrics.jsonl says, and are the ones tested."""
    out = tmp_path / "run"
    results = run({**TINY, "num_epochs": 5, "ema_decay": 0.0, "val_fraction": 0.3, "output_dir": str(out)}, Action())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda line: (line["val"]["accuracy"], -line["val"]["nll"]))
    assert results["about"]["epoch"] == best["epoch"]
    again = run({}, Action(test_only=True, checkpoint=str(out)))
    assert again["val"] == best["val"] == results["val"]
    assert again["test"] == results["test"]


def test_without_validation_the_last_epoch_counts(tmp_path: Path) -> None:
    given = {name: value for name, value in TINY.items() if name != "calibrate"}  # of which there is none then
    results = run({**given, "num_epochs": 2, "val_fraction": 0.0, "output_dir": str(tmp_path / "run")}, Action())
    assert results["val"] is None
    assert results["about"]["epoch"] == 2


def test_patience_ends_early(tmp_path: Path) -> None:
    results = run({**TINY, "num_epochs": 9, "lr": 1e-12, "ema_decay": 0.0, "patience": 2, "output_dir": str(tmp_path / "run")}, Action())
    assert results["about"]["epoch"] == 1  # nothing is learned, so the first epoch stays the best one
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_test_only_writes_beside_the_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = run({**TINY, "num_epochs": 1, "output_dir": str(out)}, Action())
    before = (out / "results.json").read_bytes()
    tested = run({}, Action(test_only=True, checkpoint=str(out / "checkpoints" / "last")))
    assert (out / "results.json").read_bytes() == before
    assert json.loads((out / "checkpoints" / "last" / "results.json").read_text())["test"] == tested["test"] == trained["test"]
    by_run = run({"noise": 0.5}, Action(test_only=True, checkpoint=str(out)))  # never into the run's own results
    assert (out / "results.json").read_bytes() == before
    assert json.loads((out / "checkpoints" / "best" / "results.json").read_text())["test"] == by_run["test"]
    elsewhere = run({"output_dir": str(tmp_path / "else"), "batch_size": 7}, Action(test_only=True, checkpoint=str(out)))
    assert elsewhere["test"]["accuracy"] == trained["test"]["accuracy"]
    for where in (tmp_path / "else", out / "checkpoints" / "best"):
        (line,) = csv.DictReader(io.StringIO((where / "results.csv").read_text()))
        assert float(line["test/accuracy"]) == json.loads((where / "results.json").read_text())["test"]["accuracy"]
    look(out, overwrite=True)  # all of it is the run's own


def test_a_test_lists_its_table_or_leaves_it(tmp_path: Path) -> None:
    """Of a run that was made before there was one."""
    out = tmp_path / "run"
    run({**TINY, "num_epochs": 1, "output_dir": str(out)}, Action())
    best, marker = out / "checkpoints" / "best", json.loads((out / "run.json").read_text())
    older = {name: sha for name, sha in marker["files"].items() if name != "checkpoints/best/results.csv"}
    assert len(older) == len(marker["files"]) - 1
    (out / "run.json").write_text(json.dumps({**marker, "files": older}))
    (best / "results.csv").write_text("somebody's")
    run({}, Action(test_only=True, checkpoint=str(out)))
    assert (best / "results.csv").read_text() == "somebody's"
    with pytest.raises(BadOption, match=r"not listed checkpoints/best/results\.csv as its own"):
        look(out, overwrite=True)
    (best / "results.csv").unlink()
    run({}, Action(test_only=True, checkpoint=str(out)))
    assert (best / "results.csv").read_text().startswith("test/accuracy,")
    look(out, overwrite=True)


def test_flags_that_contradict_the_checkpoint(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run({**TINY, "num_epochs": 1, "output_dir": out}, Action())
    with pytest.raises(BadOption, match=r"d_hidden contradicts --checkpoint, which has 6, got 12"):
        run({"d_hidden": 12}, Action(test_only=True, checkpoint=out))
    with pytest.raises(BadOption, match="is for 3 classes"):
        run({"dataset": "fake(train=97, test=31, size=8, classes=5)"}, Action(test_only=True, checkpoint=out))
    with pytest.raises(BadOption, match="is for rows of shape"):
        run({"dataset": "fake(train=97, test=31, size=12, classes=3)"}, Action(test_only=True, checkpoint=out))
    with pytest.raises(BadOption, match="seed contradicts --resume"):
        run({"seed": 5}, Action(resume=out))
    with pytest.raises(BadOption, match="names a finished run"):
        run({}, Action(resume=out))


def test_a_finished_run_trains_on_with_more_epochs(tmp_path: Path) -> None:
    constant = {**TINY, "scheduler": "none"}
    run({**constant, "output_dir": str(tmp_path / "whole")}, Action())
    run({**constant, "num_epochs": 2, "output_dir": str(tmp_path / "parts")}, Action())
    run({"num_epochs": 4}, Action(resume=str(tmp_path / "parts")))
    assert (tmp_path / "parts" / "results-epoch2.json").exists()
    first, second = everything(tmp_path / "whole"), everything(tmp_path / "parts")
    assert [k for k in first if first[k] != second[k]] == []


def test_resume_wants_the_rows_it_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data may have moved, and the working directory too; it may not have changed."""
    rng = np.random.default_rng(0)
    lines = ["a,b,kind", *(f"{rng.normal()},{rng.normal()},{'xy'[i % 2]}" for i in range(60))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    wanted = {"dataset": "csv:rows.csv:kind", "num_epochs": 2, "d_hidden": 6, "d_mlp": 7, "output_dir": "run"}
    with pytest.raises(Stopped):
        run(wanted, Action(stop_after=1))
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path / "far")
    (tmp_path / "moved.csv").write_text("\n".join(lines[:1] + lines[:0:-1]))
    with pytest.raises(BadOption, match="resume needs the rows that the run was trained on"):
        run({"dataset": "csv:../moved.csv:kind"}, Action(resume="../run"))
    with pytest.raises(BadOption, match="output_dir contradicts --resume"):
        run({"output_dir": "else"}, Action(resume="../run"))
    results = run({}, Action(resume="../run"))
    assert results["about"]["epoch"] in (1, 2)


def test_one_process_a_directory(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with pytest.raises(Stopped):
        run({**TINY, "output_dir": out}, Action(stop_after=1))
    with Lock(tmp_path / "run"), pytest.raises(BadOption, match="is being written by another process"):
        run({}, Action(resume=out))
    run({}, Action(resume=out))


def test_what_a_model_does_not_use_is_recorded_as_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {"dataset": "iris", "num_epochs": 1, "layer": "Nope", "K": 9, "noise": 0.5, "output_dir": str(tmp_path / "table")}
    results = run(table, Action())
    config, ignored = results["about"]["config"], results["about"]["ignored"]
    assert (config["layer"], config["K"], config["noise"]) == ("Attention", None, 0.0)
    assert ignored["layer"] == ignored["K"] == ignored["noise"] == "--model mlp on table rows"
    assert "ignored because of --model mlp on table rows: --noise, --layer, --K" in capsys.readouterr().err
    small = {"dataset": "fake(train=24, test=8, size=32, classes=3)", "num_epochs": 1, "batch_size": 8, "resize": 32}
    results = run({**small, "model": "timm/test_vit", "num_layers": 99, "output_dir": str(tmp_path / "timm")}, Action())
    config, ignored = results["about"]["config"], results["about"]["ignored"]
    assert (config["num_layers"], config["d_hidden"]) == (6, 96)  # of the kind of rows
    assert ignored["num_layers"] == ignored["d_hidden"] == "--model timm/test_vit on image rows"
    assert "ignored because of --model timm/test_vit on image rows: --num_layers" in capsys.readouterr().err


def test_checkpoints_of_another_version(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run({**TINY, "num_epochs": 1, "output_dir": str(out)}, Action())
    best = out / "checkpoints" / "best"
    tensors, facts = store.load(best)
    missing = {k: v for k, v in facts["config"].items() if k != "imbalance"}
    store.save(best, tensors, {**facts, "config": missing})
    assert run({}, Action(test_only=True, checkpoint=str(out)))["about"]["config"]["imbalance"] == 1.0
    store.save(best, tensors, {**facts, "config": {**missing, "new_option": 1}})
    with pytest.raises(BadOption, match=r"was written by a version with other options \(new_option\)"):
        run({}, Action(test_only=True, checkpoint=str(out)))
    alone = tmp_path / "alone"  # in the run it would not be the best that `last` belongs to
    alone.mkdir()
    store.save(alone, {"model": dict(list(tensors["model"].items())[1:])}, facts)
    with pytest.raises(BadOption, match="does not fit the model that its configuration builds"):
        run({}, Action(test_only=True, checkpoint=str(alone)))


def test_divergence_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    class Poison(LinearHead):
        count = 0

        def loss(self, *inputs: Any) -> dict[str, torch.Tensor]:
            Poison.count += self.training  # not the one row that is tried before
            return {k: v * (float("nan") if Poison.count == 9 else 1) for k, v in super().loss(*inputs).items()}

    HEADS.register("poison")(Poison)
    out = tmp_path / "run"
    line = r"epoch 2, step 5: loss nan.*learning rate.*largest gradient backbone.*not finite.*last good checkpoint is"
    with pytest.raises(Diverged, match=line):
        run({**TINY, "head": "poison", "output_dir": str(out)}, Action())
    tensors, facts = store.load(out / "checkpoints" / "last")
    assert facts["epoch"] == 1
    assert all(bool(t.isfinite().all()) for t in tensors["model"].values())
    assert not (out / "results.json").exists()


@pytest.mark.parametrize(
    "extra", [{"use_amp": True}, {"optimizer": "sgd"}, {"criterion": "MSE"}, {"scheduler": "plateau"}, {"optimizer": "adam"}]
)
def test_other_ways_to_train(extra: dict[str, Any], tmp_path: Path) -> None:
    results = run({**TINY, **extra, "num_epochs": 2, "output_dir": str(tmp_path / "run")}, Action())
    assert 0 <= results["test"]["accuracy"] <= 1
    with pytest.raises(BadOption):
        run({**TINY, **extra, "output_dir": str(tmp_path / "run")}, Action())  # holds a finished run


@pytest.mark.parametrize("name", ["iris", "wine"])
def test_tables_train_well(name: str, tmp_path: Path) -> None:
    results = run({"dataset": name, "num_epochs": 30, "output_dir": str(tmp_path / "run")}, Action())
    assert results["about"]["config"]["model"] == "mlp"
    assert results["test"]["accuracy"] >= 0.9


def test_timm_model_runs(tmp_path: Path) -> None:
    small = {"dataset": "fake(train=24, test=8, size=32, classes=3)", "num_epochs": 1, "batch_size": 8, "output_dir": str(tmp_path / "run")}
    results = run({**small, "model": "timm/test_vit", "resize": 32}, Action())
    again = run({}, Action(test_only=True, checkpoint=str(tmp_path / "run")))
    assert again["test"] == results["test"]
