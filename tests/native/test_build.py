"""Compiling: where compiled code is kept, and what happens where there is no compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import native
from native import build

ROOT = Path(__file__).parent.parent.parent
needs_compiler = pytest.mark.skipif(not native.available(), reason="no C compiler here")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of its own, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    native.library.cache_clear()
    yield tmp_path / "cache" / "neighbor-attention"
    native.library.cache_clear()


@needs_compiler
def test_it_is_compiled_once_into_a_folder_of_the_user(anew: Path) -> None:
    first = build.built()
    assert first.parent == anew
    assert anew.stat().st_mode & 0o777 == 0o700
    before = first.stat().st_mtime_ns
    assert build.built() == first
    assert first.stat().st_mtime_ns == before
    assert [f.name for f in anew.iterdir()] == [first.name]  # no temporary file is left


@needs_compiler
def test_another_source_compiler_or_processor_is_another_file(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {build.built().name}
    with monkeypatch.context() as patch:
        patch.setattr(build, "processor", lambda: "flags: another")
        names.add(build.built().name)
    with monkeypatch.context() as patch:
        patch.setattr(build, "version_of", lambda _: "cc 99")
        names.add(build.built().name)
    files = ["nearest.c", *re.findall(r'#include "(.+)"', build.SOURCE.read_text())]
    assert len(files) >= 6
    for file in files:
        (tmp_path / file).write_text("int in_place_of_all_of_it;\n")  # compiled in no time
    monkeypatch.setattr(build, "SOURCE", tmp_path / build.SOURCE.name)
    for file in files:
        (tmp_path / file).write_text("int changed;\n")
        names.add(build.built().name)
    assert len(names) == 3 + len(files)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86")
@pytest.mark.parametrize(("processor", "register"), [("skylake-avx512", "zmm"), ("sapphirerapids", "zmm"), ("znver3", "ymm")])
def test_vectors_stay_whole(processor: str, register: str) -> None:
    """Also on processors for which the compiler would rather have shorter ones: a maximum of all lanes is one instruction."""
    compiler = next(found for name in build.COMPILERS if (found := shutil.which(name)))
    flags = [flag.replace("native", processor) for flag in build.HERE]
    done = subprocess.run(
        [compiler, *build.ALWAYS, *flags, "-S", "-o", "-", str(build.SOURCE)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this compiler does not know {processor}")
    assert re.search(rf"vpmaxsd[^\n]*%{register}", done.stdout)
    assert re.search(rf"vfmadd[^\n]*%{register}", done.stdout)


@needs_compiler
def test_what_others_may_write_is_not_loaded(anew: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = build.built()
    path.chmod(0o722)
    assert not native.available()
    assert f"kernels: torch ({path} may be written by others)" in capsys.readouterr().err
    path.chmod(0o700)
    anew.chmod(0o777)
    native.library.cache_clear()
    assert not native.available()
    assert f"kernels: torch ({anew} may be written by others)" in capsys.readouterr().err


def test_a_symlink_is_no_folder_of_ours(anew: Path, tmp_path: Path) -> None:
    anew.parent.mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    anew.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(build.Unbuilt, match=r"may be written by others|no C compiler"):
        build.built()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_without_a_compiler_it_is_said_once(anew: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert not native.available()
    assert not native.available()
    assert capsys.readouterr().err.count("kernels: torch (no C compiler found") == 1


@pytest.mark.parametrize(
    ("said", "kept"), [("warned\ncannot compile", "cannot compile"), ("x.c: error: no vectors\n  1 | x\n    | ^", "x.c: error: no vectors")]
)
def test_a_compiler_that_fails_is_said_with_its_first_error_or_last_word(
    said: str, kept: str, anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setattr(build, "COMPILERS", (str(broken),))
    with pytest.raises(build.Unbuilt, match=f"^{broken} failed: {kept}$"):
        build.built()
    assert not list(anew.iterdir())


def test_it_is_switched_off_by_hand(anew: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert not native.available()
    assert "kernels: torch (NEIGHBORS_NATIVE=0)" in capsys.readouterr().err


WAYS = """
import multiprocessing, os, sys, threading
import torch, native

def found(_=None):
    x = torch.arange(2 * 3 * 17 * 8.0).sin().view(2, 3, 17, 8)
    return native.nearest(x, x, 3, None)[1].tolist()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(found())

if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    first = found()
    if sys.argv[1] == "1":  # torch itself hangs in a raw fork after it computed with more
        child = os.fork()
        if child == 0:
            os._exit(0 if found() == first else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "fork"
    batches = [batch for batch in torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2)]
    assert all(row.tolist() == first for batch in batches for row in batch), "DataLoader"
    said = []
    threads = [threading.Thread(target=lambda: said.append(found())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [first] * 4, "threads"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(found, [0]) == [first], "spawn"
"""


@needs_compiler
@pytest.mark.parametrize("count", ["1", "2"], ids="{0} threads".format)
def test_forked_children_workers_threads_and_spawned_processes_compute_the_same(count: str, tmp_path: Path) -> None:
    (tmp_path / "ways.py").write_text(WAYS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "ways.py", count], env=environment, cwd=tmp_path, timeout=300, check=True)
