"""Folders of tensors: what was saved comes back exactly, or one line says why not."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inputs.store import INDEX, load, save, write_atomically
from utils import BadOption


def tensors(offset: float = 0.0) -> dict[str, dict[str, torch.Tensor]]:
    base = torch.arange(15.0).view(3, 5) + offset
    return {
        "model": {"w": base, "w.transposed": base.t(), "half": base.bfloat16(), "scalar": torch.tensor(3 + offset)},
        "training": {"step": torch.arange(7), "mask": torch.tensor([True, False])},
    }


def assert_equal(found: dict[str, dict[str, torch.Tensor]], wanted: dict[str, dict[str, torch.Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for group in wanted:
        assert found[group].keys() == wanted[group].keys()
        for name, value in wanted[group].items():
            assert found[group][name].dtype == value.dtype
            assert torch.equal(found[group][name], value), (group, name)


# ---------------------------------------------------------------- round trip


def test_round_trip(tmp_path):
    facts = {"epoch": 3, "lr": 1 / 3, "none": None, "nested": {"list": [1, 2.5, "é"]}, "huge": 2**70, "inf": float("inf")}
    save(tmp_path / "a" / "best", tensors(), facts)
    found, read = load(tmp_path / "a" / "best")
    assert_equal(found, tensors())
    assert read == facts


def test_facts_with_number_keys_are_not_taken_for_damage(tmp_path):
    """JSON turns the keys 2 and 10 into text, and text sorts the other way round."""
    save(tmp_path, {}, {"counts": {2: "b", 10: "a"}, "pair": (1, 2)})
    assert load(tmp_path)[1] == {"counts": {"2": "b", "10": "a"}, "pair": [1, 2]}


def test_only_the_groups_that_were_asked_for_are_read(tmp_path):
    save(tmp_path, tensors(), {})
    next(tmp_path.glob("training-*")).unlink()
    assert_equal(load(tmp_path, "model")[0], {"model": tensors()["model"]})
    assert load(tmp_path, "none")[0] == {}
    with pytest.raises(BadOption, match="lacks its file training-"):
        load(tmp_path)


def test_tensors_that_share_memory_are_saved_as_their_own(tmp_path):
    base = torch.arange(6.0)
    shared = {"model": {"all": base, "view": base[1:4], "again": base}}
    save(tmp_path, shared, {})
    assert_equal(load(tmp_path)[0], shared)


def test_the_index_names_every_file_with_its_sha256(tmp_path):
    save(tmp_path, tensors(), {})
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["files"].keys() == {"model", "training"}
    for entry in index["files"].values():
        assert hashlib.sha256((tmp_path / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    assert {p.name for p in tmp_path.iterdir()} == {INDEX, *(e["file"] for e in index["files"].values())}


# ---------------------------------------------------------------- stops and leftovers


class Mine:
    """An owner that lists its files."""

    def __init__(self) -> None:
        self.listed: set[Path] = set()

    def claim(self, paths: Iterable[Path]) -> None:
        self.listed |= set(paths)

    def drop(self, paths: Iterable[Path]) -> None:
        self.listed -= set(paths)

    def owned_in(self, folder: Path) -> set[Path]:
        return {path for path in self.listed if path.parent == folder}


def test_a_new_checkpoint_replaces_the_old_and_sweeps_up(tmp_path):
    save(tmp_path, tensors(), {"epoch": 1})
    (tmp_path / ".abc12345.tmp").write_bytes(b"half a file of a killed process")
    os.utime(tmp_path / ".abc12345.tmp", (0, 0))
    (tmp_path / ".abc12346.tmp").write_bytes(b"another process may be writing it")
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, tensors(1), {"epoch": 2})
    found, facts = load(tmp_path)
    assert_equal(found, tensors(1))
    assert facts == {"epoch": 2}
    names = sorted(re.sub(r"-[0-9a-f]{12}", "", p.name) for p in tmp_path.iterdir())
    assert names == [".abc12346.tmp", INDEX, "model.safetensors", "notes.txt", "training.safetensors"]


@pytest.mark.parametrize("survivors", [0, 1, 2])
def test_a_stop_anywhere_leaves_the_old_checkpoint_whole(survivors, tmp_path, monkeypatch):
    """The machine stops when so many files of the new checkpoint (two of tensors, then the index) are in place."""
    mine = Mine()
    save(tmp_path, tensors(), {"epoch": 1}, mine)
    replace, left = os.replace, iter(range(survivors))

    def stopping(source: Any, target: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, tensors(1), {"epoch": 2}, mine)
    found, facts = load(tmp_path)
    assert_equal(found, tensors())
    assert facts == {"epoch": 1}
    assert not list(tmp_path.glob("*.tmp"))

    monkeypatch.setattr(os, "replace", replace)
    (tmp_path / "model-0123456789ab.safetensors").write_bytes(b"somebody's")
    save(tmp_path, tensors(2), {"epoch": 3}, mine)
    assert_equal(load(tmp_path)[0], tensors(2))
    assert len(list(tmp_path.iterdir())) == 4
    assert {path for path in tmp_path.iterdir() if path.name != "model-0123456789ab.safetensors"} == mine.listed


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch):
    save(tmp_path, tensors(), {"epoch": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, tensors(1), {"epoch": 2})
    assert load(tmp_path)[1] == {"epoch": 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_the_content_is_on_disk_before_its_name_is(tmp_path, monkeypatch):
    order: list[str] = []

    def noted(name: str, call: Any) -> Any:
        def noting(*arguments: Any) -> Any:
            order.append(name)
            return call(*arguments)

        return noting

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    write_atomically(tmp_path / "file", b"content")
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder
    assert (tmp_path / "file").read_bytes() == b"content"


def test_saving_the_same_again_mends_a_damaged_file(tmp_path):
    save(tmp_path, tensors(), {})
    file = next(tmp_path.glob("model-*"))
    file.write_bytes(file.read_bytes()[:-1])
    save(tmp_path, tensors(), {})
    assert_equal(load(tmp_path)[0], tensors())


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", [INDEX, "model-*", "training-*"])
@pytest.mark.parametrize("keep", [0.0, 0.5, -1])
def test_a_file_cut_short_is_one_line(name, keep, tmp_path):
    save(tmp_path, tensors(), {"epoch": 1})
    file = next(tmp_path.glob(name))
    content = file.read_bytes()
    file.write_bytes(content.rstrip()[:-1] if keep == -1 else content[: int(len(content) * keep)])
    with pytest.raises(BadOption, match=r"^checkpoint is damaged: "):
        load(tmp_path)


@pytest.mark.parametrize("name", [INDEX, "model-*", "training-*"])
def test_one_flipped_bit_is_one_line(name, tmp_path):
    """Anywhere in the file. In JSON a flip may leave the same content (a blank turned into a tab): then it must load the same."""
    save(tmp_path, tensors(), {"epoch": 1, "text": "aé"})
    file = next(tmp_path.glob(name))
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    accepted = 0
    for place in {0, len(content) - 1, *rng.integers(len(content), size=199).tolist()}:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            found, facts = load(tmp_path)
        except BadOption:
            continue
        else:
            accepted += 1
            assert_equal(found, tensors())
            assert facts == {"epoch": 1, "text": "aé"}
            assert content[place : place + 1].isspace()
    assert accepted <= (20 if name == INDEX else 0)


@pytest.mark.parametrize("name", [INDEX, "model-*"])
def test_a_file_that_is_gone_is_one_line(name, tmp_path):
    save(tmp_path, tensors(), {})
    next(tmp_path.glob(name)).unlink()
    with pytest.raises(BadOption, match=r"^checkpoint (must hold checkpoint.json|lacks its file model-\w+.safetensors) \(No such file"):
        load(tmp_path)


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", '"text"', "7", "null", '{"format": "another", "files": {}}'])
def test_json_of_something_else_is_one_line(text, tmp_path):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(BadOption, match=r"^checkpoint must be a 'neighbor attention checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not JSON", b"\x80\x04\x95pickle", b"{" * 99_999, b"[" * 99_999])
def test_no_json_is_one_line(content, tmp_path):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(BadOption, match=r"^checkpoint is damaged: checkpoint.json is not whole"):
        load(tmp_path)


def test_an_index_edited_by_hand_is_noticed(tmp_path):
    save(tmp_path, tensors(), {"epoch": 1})
    text = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(text.replace('"epoch": 1', '"epoch": 2'))
    with pytest.raises(BadOption, match="does not match its own SHA-256"):
        load(tmp_path)
