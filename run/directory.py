"""The directory of a run: may it be written, and what is it called?"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from config import Config
from evaluation.predictions import FILE as PREDICTIONS
from utils import BadOption, say

RESULTS = "results.json"  # written last: a directory without it holds a run that did not finish


def check_output(folder: Path, overwrite: bool) -> None:
    check_writable(folder)
    if not overwrite and (folder / RESULTS).exists():
        raise BadOption("output_dir", "holds a finished run (--overwrite replaces it)", str(folder))
    if not overwrite and (folder / "checkpoints").exists():
        raise BadOption("output_dir", "holds a run that did not finish (--resume continues it, --overwrite replaces it)", str(folder))


def check_writable(folder: Path, flag: str = "output_dir") -> None:
    """Without writing: the nearest folder that exists must take new entries."""
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BadOption(flag, f"must be a directory that can be written ({there} can't)", str(folder))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """One process writes a run; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        say("lock: this system has none for directories; let one process at a time write a run")
        yield folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadOption("output_dir", "is being written by another process", str(folder)) from None
        except OSError:  # a file system without locks
            pass
        yield folder
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_folder(config: Config, overwrite: bool) -> Iterator[Path]:
    """The directory of a run that begins, made and locked."""
    if config.output.output_dir:
        folder = Path(config.output.output_dir)
    else:
        prefix, colon, path = config.data.dataset.partition(":")
        data = f"{prefix}-{Path(path).name}" if colon else prefix
        words = f"{time.strftime('%Y%m%d-%H%M%S')}-{data}-{config.model.model if 'layer' in config.ignored else config.layers.layer}"
        base = Path("runs") / re.sub(r"[^0-9A-Za-z.=,-]+", "_", words).strip("_")[:100]
        folder = next(f for n in range(1, 10_000) if not (f := base if n == 1 else Path(f"{base}-{n}")).exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption("output_dir", f"must be a directory that can be written ({error.strerror})", str(folder)) from None
    with locked(folder):
        if overwrite:  # what an earlier run left must not be taken for this one's
            for stale in [*(folder / name for name in (RESULTS, "metrics.jsonl", PREDICTIONS)), *(folder / "checkpoints").glob("*/*")]:
                stale.unlink(missing_ok=True)
            for stale in (folder / "checkpoints").glob("*"):
                with contextlib.suppress(OSError):  # a user's own folders in it stay
                    stale.rmdir()
        yield folder
