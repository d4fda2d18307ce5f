"""Folders of named tensors: safetensors files and one checkpoint.json that names them, with a SHA-256 of each and facts beside.

Checkpoints and cached features are such folders. checkpoint.json is replaced last and atomically, and tensor files carry their
hash in their name: whenever the machine stops, the folder holds the old content or the new one, whole. Nothing in it unpickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from utils import BadOption

FORMAT = "neighbor attention checkpoint, version 2"
READABLE = (FORMAT, "neighbor attention checkpoint, version 1")  # the first had other names: training/older.py
INDEX = "checkpoint.json"


# ---------------------------------------------------------------- files


def write_atomically(path: Path, content: bytes) -> None:
    """A temporary name in the same folder, fsync, replace, fsync the folder: never half a file under the real name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


# ---------------------------------------------------------------- save and load


def save(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:
    """Groups of tensors ("model", "training", ...) and facts that JSON can hold, as the new content of `folder`."""
    files = {}
    for group, named in tensors.items():
        content = tensors_to_bytes({k: v.detach().cpu().contiguous().clone() for k, v in named.items()})
        digest = hashlib.sha256(content).hexdigest()
        files[group] = {"file": f"{group}-{digest[:12]}.safetensors", "sha256": digest}
        write_atomically(folder / files[group]["file"], content)  # also over one of that name: it may have been damaged since
    body = json.loads(json.dumps({"format": FORMAT, "files": files, "facts": facts}))  # as it will be read: keys become text
    write_json(folder / INDEX, {**body, "sha256": _digest(body)})
    kept = {INDEX, *(f["file"] for f in files.values())}
    for stale in folder.iterdir():  # the files of the checkpoint that was replaced, and temporaries of a killed process
        if stale.name not in kept and (stale.suffix == ".tmp" or stale.suffix == ".safetensors"):
            stale.unlink()


def load(folder: Path, *groups: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The named groups (all, if none is named) and the facts; every byte is checked first."""
    index = _read_index(folder)
    tensors = {}
    for group, entry in index["files"].items():
        if groups and group not in groups:
            continue
        try:
            content = (folder / entry["file"]).read_bytes()
        except OSError as error:
            raise BadOption("checkpoint", f"lacks its file {entry['file']} ({error.strerror})", str(folder)) from None
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise BadOption("checkpoint", f"is damaged: {entry['file']} does not have the SHA-256 that {INDEX} names", str(folder))
        tensors[group] = tensors_from_bytes(content)
    return tensors, index["facts"]


def file_of(folder: Path, group: str) -> Path:
    """The file that holds a group."""
    return folder / _read_index(folder)["files"][group]["file"]


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except OSError as error:
        raise BadOption("checkpoint", f"must hold {INDEX} ({error.strerror})", str(folder)) from None
    except (ValueError, RecursionError):
        raise BadOption("checkpoint", f"is damaged: {INDEX} is not whole", str(folder)) from None
    if not isinstance(index, dict) or index.get("format") not in READABLE:
        raise BadOption("checkpoint", f"must be a '{FORMAT}'", str(folder))
    digest = index.pop("sha256", "")
    if digest != _digest(index):
        raise BadOption("checkpoint", f"is damaged: {INDEX} does not match its own SHA-256", str(folder))
    return index


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
