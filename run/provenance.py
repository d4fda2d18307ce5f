"""Where and with what a run was made."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "timm", "numpy", "faiss-cpu", "natten"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the toolkit's own code and whether it was changed since; None outside a git checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
