"""Nobody's files are lost: who may write a directory, what is deleted in it, and what two processes do that meet."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from inputs import store
from run import lock
from run.directory import MARKER, RESULTS, RunDirectory, look, new, opened, read_marker, state_of
from run.lock import FILE, Held, Lock, holder_of, started
from tests.faults import in_child, killing, layer, nothing
from utils import BadOption, Halt


def begun(folder: Path, *names: str, overwrite: bool = False) -> None:
    with new(folder, "", {"config": {"lr": 0.5}}, overwrite) as directory:
        for name in names:
            directory.write(name, name)


def tree(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MARKER}


# ---------------------------------------------------------------- what is deleted


def test_only_what_a_run_has_listed_is_replaced(tmp_path: Path) -> None:
    begun(tmp_path / "run", "config.yaml", "checkpoints/best/model-1.safetensors")
    begun(tmp_path / "run", "args.txt", overwrite=True)
    assert tree(tmp_path / "run") == {"args.txt": "args.txt"}
    (tmp_path / "run" / "checkpoints" / "best").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best" / "model.pt").write_text("mine")
    with pytest.raises(BadOption, match=r"can't be overwritten: the run .* has not listed checkpoints/best/model.pt as its own"):
        begun(tmp_path / "run", overwrite=True)
    assert tree(tmp_path / "run") == {"args.txt": "args.txt", "checkpoints/best/model.pt": "mine"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/best/model.pt", "notes.txt"])
def test_a_directory_of_other_things_is_left_alone(name: str, overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("lr: 1 # mine")
    with pytest.raises(BadOption, match=rf"output_dir must be empty or hold a run: no run has listed {name} as its own"):
        begun(tmp_path, "config.yaml", overwrite=overwrite)
    assert tree(tmp_path) == {name: "lr: 1 # mine"}
    assert not (tmp_path / MARKER).exists()


def test_nothing_is_deleted_or_written_through_a_symlink(tmp_path: Path) -> None:
    far = tmp_path / "far"
    (far / "best").mkdir(parents=True)
    (far / "best" / "model-1.safetensors").write_text("mine")
    (far / "picture.png").write_text("mine")
    begun(tmp_path / "run", "curves.png", "checkpoints/best/model-1.safetensors")
    for link, target in (("curves.png", far / "picture.png"), ("checkpoints/best", far / "best")):
        path = tmp_path / "run" / link
        if path.is_dir():
            (path / "model-1.safetensors").unlink()
            path.rmdir()
        else:
            path.unlink()
        path.symlink_to(target)
    left = far / "best" / ".abcd1234.tmp"
    left.write_text("mine")
    with opened(tmp_path / "run") as directory:
        directory.sweep()
        assert left.exists()
        left.unlink()
        directory.write("curves.png", "new")
        with pytest.raises(BadOption, match=r"must not hold a symlink in the place of a folder \(checkpoints/best\)"):
            directory.write("checkpoints/best/model-2.safetensors", "new")
    with pytest.raises(BadOption, match="has not listed checkpoints/best as its own"):
        begun(tmp_path / "run", overwrite=True)
    assert tree(far) == {"best/model-1.safetensors": "mine", "picture.png": "mine"}
    assert not (tmp_path / "run" / "curves.png").is_symlink()


def test_names_that_lead_elsewhere_make_no_marker(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    (tmp_path / "secret").write_text("mine")
    whole = json.loads((tmp_path / "run" / MARKER).read_text())
    for name in ("../secret", "/etc/passwd", "a/../../secret", ""):
        (tmp_path / "run" / MARKER).write_text(json.dumps({**whole, "files": {name: None}}))
        assert read_marker(tmp_path / "run") is None
        with pytest.raises(BadOption, match=r"no run has listed run\.json"):
            begun(tmp_path / "run", overwrite=True)
    assert (tmp_path / "secret").exists()


def test_a_directory_that_is_deleted_is_not_made_anew(tmp_path: Path) -> None:
    with new(tmp_path / "run", "", {"config": {}}, False) as directory:
        for path in (tmp_path / "run").iterdir():
            path.unlink()
        (tmp_path / "run").rmdir()
        for write in (lambda: directory.write("args.txt", "x"), lambda: store.save(directory.path / "features", {}, {}, directory)):
            with pytest.raises(Halt, match="was deleted or replaced while the run wrote it"):
                write()
        assert directory.again == ""
    assert not (tmp_path / "run" / "args.txt").exists()


@pytest.mark.parametrize("at", range(1, 40))
def test_a_kill_while_overwriting_leaves_a_way_on(at: int, tmp_path: Path) -> None:
    """After each file operation: the directory can be overwritten again, and never counts as finished, or as somebody's."""
    folder = tmp_path / "run"
    begun(folder, "config.yaml", "checkpoints/last/a.safetensors", "curves.png", RESULTS)

    def overwriting() -> None:
        with layer(folder, killing(at)):
            begun(folder, "args.txt", overwrite=True)

    assert in_child(overwriting) in (-9, 0)
    assert state_of(folder) in ("unfinished", "done")
    begun(folder, "args.txt", overwrite=True)
    assert tree(folder) == {"args.txt": "args.txt"}
    assert not (folder / FILE).exists()


# ---------------------------------------------------------------- one process at a time


def test_a_lock_of_a_dead_process_is_taken_over_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def dying() -> None:
        with Lock(tmp_path):
            os.kill(os.getpid(), 9)

    assert in_child(dying) == -9
    holder = holder_of(tmp_path)
    assert holder is not None
    assert state_of(tmp_path) == "none"  # its process is gone
    with Lock(tmp_path):
        now = holder_of(tmp_path)
        assert now is not None
        assert (now["process"], now["started"]) == (os.getpid(), started(os.getpid()))
        assert state_of(tmp_path) == "running"
        with pytest.raises(BadOption, match=rf"is being written by another process \({os.getpid()} on "), Lock(tmp_path):
            pass
    assert f"lock: process {holder['process']} is gone and left its lock in {tmp_path}; taken over" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_machine_is_believed_while_it_gives_signs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).write_text(json.dumps({"process": 1, "host": "far", "started": "", "since": "today"}))
    after = r"; if it has ended, its lock is free 120 s after its last sign of life"
    now = time.time()
    os.utime(tmp_path / FILE, (now - 100, now - 100))
    with pytest.raises(Held, match=rf"\(1 on far, since today{after}\)"), Lock(tmp_path):
        pass
    assert state_of(tmp_path) == "running"
    os.utime(tmp_path / FILE, (now - 130, now - 130))
    assert state_of(tmp_path) == "none"
    with pytest.raises(Held), Lock(tmp_path, silent=160):
        pass
    with Lock(tmp_path):
        assert holder_of(tmp_path) == {**(holder_of(tmp_path) or {}), "process": os.getpid()}
    assert "lock: process 1 is gone" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_who_holds_a_lock_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with Lock(tmp_path):
        os.utime(tmp_path / FILE, (0, 0))
        end = time.monotonic() + 60
        while (tmp_path / FILE).stat().st_mtime == 0:
            assert time.monotonic() < end
    assert not (tmp_path / FILE).exists()


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Of image workers, say. A parent that ends by itself takes the file away, and with it the lock."""
    (there, tell), (wait, go) = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        with Lock(tmp_path):
            if os.fork() == 0:
                os.write(tell, b"x")
                os.read(wait, 1)
                os._exit(0)
            signal.pause()
    os.read(there, 1)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        with Lock(tmp_path):  # though the child lives
            pass
    finally:
        os.write(go, b"x")
        for handle in (there, tell, wait, go):
            os.close(handle)


def meeting(folder: Path, at: int, overwrite: bool) -> tuple[int, int]:
    """Two processes that begin a run in one directory: the first stands still after its `at`-th operation while the second tries."""
    (arrived, tell), (wait, resume) = os.pipe(), os.pipe()

    def standing(number: int, name: str) -> None:
        if number == at:
            os.write(tell, b"x")
            os.read(wait, 1)

    def first() -> None:
        try:
            with layer(folder, standing):
                begun(folder, "config.yaml", RESULTS, overwrite=overwrite)
        except BadOption:
            os._exit(2)
        finally:
            os.write(tell, b"x")

    child = os.fork()
    if child == 0:
        code = 99
        try:
            first()
            code = 0
        finally:
            os._exit(code)
    os.read(arrived, 1)
    second = 0
    try:
        begun(folder, "config.yaml", RESULTS, overwrite=overwrite)
    except BadOption:
        second = 2
    os.write(resume, b"x")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for handle in (arrived, tell, wait, resume):
        os.close(handle)
    return code, second


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("at", [*range(1, 12), 14, 18, 999])
def test_of_two_that_meet_one_writes(at: int, overwrite: bool, tmp_path: Path) -> None:
    """At each step. Without --overwrite exactly one of them begins; with it, one after the other may. The run is whole."""
    codes = meeting(tmp_path / "run", at, overwrite)
    assert set(codes) <= {0, 2}
    assert codes.count(0) == 1 or (overwrite and codes == (0, 0))
    assert tree(tmp_path / "run") == {"config.yaml": "config.yaml", RESULTS: RESULTS}
    marker = read_marker(tmp_path / "run")
    assert marker is not None
    assert state_of(tmp_path / "run") == "done"


# ---------------------------------------------------------------- how it stands


def test_the_state_is_read_from_the_directory_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert state_of(folder) == "none"
    begun(folder, "config.yaml")
    assert state_of(folder) == "unfinished"
    with pytest.raises(BadOption, match=r"did not finish \(--resume begins it anew: it has no checkpoint yet, --overwrite replaces it\)"):
        look(folder, False)
    with opened(folder) as directory:
        assert isinstance(directory, RunDirectory)
        assert state_of(folder) == "running"
        store.save(folder / "checkpoints" / "last", {}, {}, directory)
    assert state_of(folder) == "stopped"
    with opened(folder) as directory:
        directory.write("error.txt", "x")
    assert state_of(folder) == "failed"
    with opened(folder) as directory, layer(folder, nothing) as done:
        before = sorted(folder.rglob("*"))
        assert state_of(folder) == "running"
        assert (sorted(folder.rglob("*")), done) == (before, [])
        directory.finish({"test": 1})
    assert state_of(folder) == "done"
    marker = read_marker(folder)
    assert marker is not None
    assert {name for name, digest in marker["files"].items() if digest} == {
        "config.yaml", "error.txt", "checkpoints/last/checkpoint.json", RESULTS,
    }  # fmt: skip
