"""Compiling nearest.c, and where the result is kept."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("nearest.c")
COMPILERS = ("cc", "gcc", "clang")
ALWAYS = ("-std=gnu11", "-O3", "-shared", "-fPIC")
# The instructions of this processor, without what GCC 12 believes of its speed: for Intel's with AVX-512 it takes vectors of 16 floats
# apart, lane by lane (attention over lists took twice as long), and what it makes for Zen 3 took 1.3 times as long.
HERE = ("-march=native", "-mtune=generic")
OPTIONAL = ((*HERE, "-fopenmp"), ("-mcpu=native", "-fopenmp"), HERE, ())  # the first that the compiler takes; without OpenMP, one thread
SWITCH = "NEIGHBORS_NATIVE"


class Unbuilt(Exception):
    """Why there is no compiled code."""


def built() -> Path:
    """The compiled file, made now if the cache has none of this source, compiler and processor."""
    if os.environ.get(SWITCH) == "0":
        raise Unbuilt(f"{SWITCH}=0")
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unbuilt("no C compiler found; with one, hard top-K attention and exact search of a bank are faster")
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    known = "\n".join([*sources, *ALWAYS, repr(OPTIONAL), compiler, version_of(compiler), processor()])
    folder = private_folder()
    path = folder / f"nearest-{hashlib.sha256(known.encode()).hexdigest()[:20]}.so"
    if not path.exists():
        compile_to(path, compiler)
    if not only_ours(path):
        raise Unbuilt(f"{path} may be written by others")
    return path


def compile_to(path: Path, compiler: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    said = ""
    try:
        for more in OPTIONAL:
            done = subprocess.run([compiler, *ALWAYS, *more, "-o", temporary, str(SOURCE)], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.chmod(temporary, 0o700)
                os.replace(temporary, path)
                return
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            said = said or next((line for line in lines if "error" in line), lines[-1])
        raise Unbuilt(f"{compiler} failed: {said[:200]}")
    except OSError as error:
        raise Unbuilt(f"{compiler} can't be run: {error.strerror}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def version_of(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise Unbuilt(f"{compiler} can't be run: {error.strerror}") from None


def processor() -> str:
    """What -march=native follows: code for one processor may stop another one that shares the home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def private_folder() -> Path:
    """Where compiled code is kept: nobody else may write there, or their code would run here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neighbor-attention"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if cache.is_symlink() or not only_ours(cache):
            raise Unbuilt(f"{cache} may be written by others")
    except (OSError, RuntimeError):  # no home, or it is not ours to write
        raise Unbuilt(f"{cache} can't be made") from None
    return cache


def only_ours(path: Path) -> bool:
    found = path.stat()
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
