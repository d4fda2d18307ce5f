"""A stranger's checkpoint: signed again after an edit, it ends in one line or is what it says; it reads and writes nowhere else."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config import Action
from inputs import files, indexed, store
from inputs.indexed import INDEX
from main import main
from run.run import run
from run.saved import require_facts
from tests.run.test_run import TINY
from training.progress import TRACKERS, Tracker
from utils import BadOption, Stopped


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(Stopped):
        run({**TINY, "num_epochs": 2, "head": "linear+knn", "k_train": 3, "output_dir": str(folder)}, Action(stop_after=1))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def sign(folder: Path, body: dict[str, Any]) -> None:
    indexed.write_index(folder, body)


STRANGE: tuple[Any, ...] = (None, True, -1, 0, 7, -0.5, float("nan"), float("inf"), "", "x", "../x", [], [1, "a"], {}, {"a": None})


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested JSON; of a long list, the first two."""
    found = [way] if way else []
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return found + [place for key, item in inside for place in places(item, (*way, key))]


def edited(body: dict[str, Any], draws: random.Random) -> tuple[str, dict[str, Any]]:
    """One value replaced by a strange one, or gone."""
    body = copy.deepcopy(body)
    way = draws.choice(places(body["facts"] if draws.random() < 0.9 else body["files"]))
    owner: Any = body["facts"] if way[0] in body["facts"] else body["files"]
    for key in way[:-1]:
        owner = owner[key]
    value = draws.choice(STRANGE)
    if draws.random() < 0.15:
        del owner[way[-1]]
    else:
        owner[way[-1]] = value
    return f"{'/'.join(map(str, way))} = {value!r}", body


@pytest.mark.parametrize("seed", range(12))
def test_an_edit_that_is_signed_again_is_one_line_or_a_run(seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draws = random.Random(seed)
    name, words = [("best", ["--test_only", "--checkpoint"]), ("last", ["--stop_after", "2", "--resume"])][seed % 2]
    where = folder / "checkpoints" / name
    what, body = edited(indexed.read_index(where), draws)
    sign(where, body)
    code = main([*words, str(folder)])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert code in (0, 2), (what, errors)
    assert len(errors) == (code == 2), what


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("lr", -0.5, "must be above 0"),
        ("dropout", 3, "must be at least 0 and below 1"),
        ("select", "luck", "must be one of accuracy, nll, last"),
        ("batch_size", "many", "must be a whole number"),
    ],
)
def test_a_saved_configuration_is_checked_like_a_typed_one(
    option: str, value: Any, rule: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also an option that the command at hand has no use for."""
    for name, words in (("best", ["--test_only", "--checkpoint"]), ("last", ["--resume"])):
        where = folder / "checkpoints" / name
        body = indexed.read_index(where)
        body["facts"]["config"][option] = value
        sign(where, body)
        assert main([*words, str(folder)]) == 2
        (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
        assert error.startswith(f"error: --{option} {rule}")


@pytest.mark.parametrize(
    "facts", [{"shape": None}, {"shape": [3, "", 8]}, {"config": [1]}, {"bank": []}, {"reading": {}}, {"fitted": {"mean": [0.5]}}]
)
@pytest.mark.parametrize("command", ["predict --input rows.npz", "export --format safetensors", "explain", "probe --K 1"])
def test_whoever_asks_a_model_reads_its_checkpoint_with_care(
    command: str, facts: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = folder / "checkpoints" / "best"
    body = indexed.read_index(best)
    sign(best, {**body, "facts": {**body["facts"], **facts}})
    monkeypatch.chdir(folder.parent)
    np.savez("rows.npz", x=np.zeros((2, 8, 8, 3), np.uint8))
    code = main([*command.split(), "--checkpoint", "run"])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert (code, len(errors)) == (2, 1), errors


OF_A_TABLE = {"mean": [0.5, 7], "std": [1.0, 0.25], "levels": [["p", "q"], []]}


@pytest.mark.parametrize(
    "change",
    [
        {"mean": [0.5, None]},
        {"mean": [0.5, [1.0]]},
        {"mean": [0.5, float("nan")]},
        {"mean": [0.5]},
        {"std": []},
        {"std": [1.0, 0]},
        {"std": [1.0, "x"]},
        {"std": {}},
        {"levels": [["p", "q"], 7]},
        {"levels": [["p", 1], []]},
        {"levels": [["p", "q", "r"], []]},
        {"levels": -0.5},
    ],
)
def test_what_was_fitted_to_the_columns_of_a_table_has_its_form(change: dict[str, Any]) -> None:
    facts = {"config": {}, "classes": ["u", "v"], "shape": [4], "fitted": OF_A_TABLE, "data": {}, "epoch": 1, "threads": 1}
    require_facts(facts)
    with pytest.raises(BadOption, match=r"^checkpoint must say how its rows are read in the form that runs write$"):
        require_facts({**facts, "fitted": {**OF_A_TABLE, **change}})


# ---------------------------------------------------------------- nowhere else


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/dev/zero", "..", "a/b.safetensors", "", 7, None])
def test_an_index_names_files_of_its_own_folder(name: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = folder / "checkpoints" / "best"
    body = indexed.read_index(best)
    shutil.copy(best / body["files"]["model"]["file"], tmp_path / "secret.safetensors")
    body["files"]["model"]["file"] = name
    sign(best, body)
    assert main(["--test_only", "--checkpoint", str(folder)]) == 2
    assert "must name files of its own folder" in capsys.readouterr().err


def test_symlinks_devices_and_pipes_are_not_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = folder / "checkpoints" / "best"
    model = best / indexed.read_index(best)["files"]["model"]["file"]
    model.rename(tmp_path / "moved")
    for make, why in (
        (lambda: model.symlink_to(tmp_path / "moved"), "is a symlink"),
        (lambda: model.symlink_to("/dev/zero"), "is a symlink"),
        (lambda: os.mkfifo(model), "is no regular file"),
        (lambda: model.write_bytes((tmp_path / "moved").read_bytes() + b"x"), "bytes, not "),
    ):
        make()
        assert main(["--test_only", "--checkpoint", str(folder)]) == 2
        assert f"{model.name} " in (said := capsys.readouterr().err)
        assert why in said
        model.unlink()
    (best / INDEX).rename(tmp_path / "index")
    os.mkfifo(best / INDEX)
    assert main(["--test_only", "--checkpoint", str(folder)]) == 2


def test_a_length_is_looked_at_before_a_file_is_read(tmp_path: Path) -> None:
    with (tmp_path / "hollow").open("wb") as file:
        file.truncate(1 << 42)  # four terabytes of nothing
    with pytest.raises(files.Unfit, match=r"has 4,398,046,511,104 bytes, and at most"):
        files.read_plain(tmp_path / "hollow", files.memory())
    with pytest.raises(files.Unfit, match=r"bytes, not 3"):
        files.read_plain(tmp_path / "hollow", 1 << 60, 3)


def test_a_folder_that_a_checkpoint_names_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are data downloaded to it; that it is read from is said."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    np.savez(tmp_path / "rows.npz", x_train=rng.normal(size=(60, 5)), y_train=y, x_test=rng.normal(size=(20, 5)), y_test=y[:20])
    small = {"dataset": f"npz:{tmp_path / 'rows.npz'}", "num_epochs": 1, "freeze_backbone": True, "d_hidden": 6, "d_mlp": 7}
    out = tmp_path / "run"
    run({**small, "output_dir": str(out)}, Action())
    far = tmp_path / "far"
    best = out / "checkpoints" / "best"
    tensors, facts = store.load(best)
    store.save(best, tensors, {**facts, "config": {**facts["config"], "feature_cache": str(far), "output_dir": str(far)}})
    capsys.readouterr()
    assert main(["--test_only", "--checkpoint", str(out), "--noise", "0"]) == 0
    assert not far.exists()
    assert f"feature_cache: {far} is read, as the run names it (nothing is written there)" in capsys.readouterr().err
    store.save(best, tensors, {**facts, "config": {**facts["config"], "dataset": "cifar10", "data_path": str(far)}})
    assert main(["--test_only", "--checkpoint", str(out)]) == 2
    assert "data_path must hold" in capsys.readouterr().err
    assert not far.exists()


def test_a_folder_that_an_unfinished_run_names_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It begins anew, by what its marker says; folders that are typed are another thing."""
    rng, y = np.random.default_rng(0), np.arange(60) % 3
    np.savez(tmp_path / "rows.npz", x_train=rng.normal(size=(60, 5)), y_train=y, x_test=rng.normal(size=(20, 5)), y_test=y[:20])
    small = {"dataset": f"npz:{tmp_path / 'rows.npz'}", "num_epochs": 1, "freeze_backbone": True, "d_hidden": 6, "d_mlp": 7}
    out, far = tmp_path / "run", tmp_path / "far"
    run({**small, "output_dir": str(out)}, Action())
    marker = json.loads((out / "run.json").read_text())

    def unfinished(**named: str) -> None:
        shutil.rmtree(out)
        out.mkdir()
        (out / "run.json").write_text(json.dumps({**marker, "config": {**marker["config"], **named}}))
        capsys.readouterr()

    unfinished(feature_cache=str(far))
    assert main(["--resume", str(out)]) == 0
    assert f"feature_cache: {far} is read, as the run names it (nothing is written there)" in capsys.readouterr().err
    assert not far.exists()
    unfinished(dataset="cifar10", data_path=str(far))
    assert main(["--resume", str(out)]) == 2
    assert "nothing is downloaded to where only a checkpoint says" in capsys.readouterr().err
    assert not far.exists()
    unfinished()
    assert main(["--resume", str(out), "--feature_cache", str(far)]) == 0
    assert far.exists()


def test_weights_of_a_run_are_taken_as_it_wrote_them(folder: Path, tmp_path: Path) -> None:
    """A flipped bit would mostly train on without a word, and a link would read a file elsewhere."""
    best = folder / "checkpoints" / "best"
    whole = indexed.read_index(best)
    model = best / whole["files"]["model"]["file"]
    content = model.read_bytes()
    given = {**TINY, "head": "linear", "num_epochs": 1, "pretrained": str(folder), "output_dir": str(tmp_path / "out")}

    def refused(rule: str) -> None:
        for weights in (str(folder), str(model)):  # as it is typed, and as its config.yaml has it
            with pytest.raises(BadOption, match=f"^pretrained {rule}"):
                run({**given, "pretrained": weights}, Action())
        assert not (tmp_path / "out").exists()

    model.write_bytes(content[:-3] + bytes([content[-3] ^ 16]) + content[-2:])
    refused(f"is damaged: {model.name} does not have the SHA-256")
    model.write_bytes(content)
    for name, value, rule in (
        ("config", [], "must say its config"),
        ("config", {}, "holds what does not fit together"),
        ("fitted", {"mean": [0.0] * 3, "std": [0.0] * 3}, "must say how its rows are read"),
    ):
        sign(best, {**whole, "facts": {**whole["facts"], name: value}})
        refused(rule)
    sign(best, whole)
    run(given, Action())
    shutil.rmtree(tmp_path / "out")
    model.rename(tmp_path / "elsewhere")
    model.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadOption, match=f"^pretrained is damaged: {model.name} is a symlink"):
        run(given, Action())


@pytest.mark.parametrize("typed", [True, False])
def test_numbers_are_sent_where_it_was_typed(
    typed: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Path] = []

    class Sending(Tracker):
        def __init__(self, folder: Path, config: Any) -> None:
            told.append(folder)

    monkeypatch.setitem(TRACKERS, "wandb", Sending)
    last = folder / "checkpoints" / "last"
    body = indexed.read_index(last)
    body["facts"]["config"]["tracker"] = "wandb"
    sign(last, body)
    assert main(["--resume", str(folder), *["--tracker", "wandb"][: 2 * typed]]) == 0
    assert told == [folder][:typed]
    line = "tracker: none; the run had wandb, which gets numbers only where --tracker wandb is typed"
    assert (line in capsys.readouterr().err) == (not typed)


def test_a_damaged_tensor_file_that_is_signed_again_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = folder / "checkpoints" / "best"
    shutil.rmtree(best.with_name("last"))  # which knows another best
    body = indexed.read_index(best)
    content = b"\xff" * 64 + torch.zeros(3).numpy().tobytes()
    entry = body["files"]["model"]
    (best / entry["file"]).write_bytes(content)
    entry |= {"sha256": files.sha256_of_bytes(content), "size": len(content)}
    sign(best, body)
    assert main(["--test_only", "--checkpoint", str(folder)]) == 2
    assert f"{entry['file']} is no safetensors file" in capsys.readouterr().err
    assert json.loads((best / INDEX).read_text())["files"] == body["files"]
