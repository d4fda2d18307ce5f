"""The directory of a run: may it be written, and what is it called?"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from config import Config
from utils import BadOption

RESULTS = "results.json"  # written last: a directory without it holds a run that did not finish


def check_output(folder: Path, overwrite: bool) -> None:
    check_writable(folder)
    if not overwrite and (folder / RESULTS).exists():
        raise BadOption("output_dir", "holds a finished run (--overwrite replaces it)", str(folder))
    if not overwrite and (folder / "checkpoints").exists():
        raise BadOption("output_dir", "holds a run that did not finish (--resume continues it, --overwrite replaces it)", str(folder))


def check_writable(folder: Path) -> None:
    """Without writing: the nearest folder that exists must take new entries."""
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BadOption("output_dir", f"must be a directory that can be written ({there} can't)", str(folder))


def open_folder(config: Config, overwrite: bool) -> Path:
    if config.output_dir:
        folder = Path(config.output_dir)
    else:
        words = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.dataset}-{config.layer}"
        base = Path("runs") / re.sub(r"[^0-9A-Za-z.=,-]+", "_", words).strip("_")[:100]
        folder = next(f for n in range(1, 10_000) if not (f := base if n == 1 else Path(f"{base}-{n}")).exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption("output_dir", f"must be a directory that can be written ({error.strerror})", str(folder)) from None
    if overwrite:  # what an earlier run left must not be taken for this one's
        for stale in [folder / RESULTS, folder / "metrics.jsonl", *(folder / "checkpoints").glob("*/*")]:
            stale.unlink(missing_ok=True)
    return folder
