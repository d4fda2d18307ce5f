"""Folders of named tensors: safetensors files and one checkpoint.json that names them, with a SHA-256 of each and facts beside.

Checkpoints and cached features are such folders. checkpoint.json is replaced last and atomically, and tensor files carry their
hash in their name: whenever the machine stops, the folder holds the old content or the new one, whole. Nothing in it unpickles.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from inputs import files
from inputs.files import write_atomically, write_json
from inputs.indexed import FORMAT, INDEX, read_file, read_index, write_index
from utils import BadOption

__all__ = ["FORMAT", "INDEX", "Owner", "commit", "file_of", "load", "save", "stage", "write_atomically", "write_json"]
STALE = 24 * 3600.0  # seconds after which a temporary file of nobody's is a killed process's


class Owner(Protocol):
    """Who knows which files are its own: a run that is being written. `claim` comes before a file is made, `drop` before it goes."""

    def claim(self, paths: Iterable[Path]) -> None: ...

    def drop(self, paths: Iterable[Path]) -> None: ...

    def owned_in(self, folder: Path) -> set[Path]: ...


# ---------------------------------------------------------------- save


def save(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any], owner: Owner | None = None) -> None:
    """Groups of tensors ("model", "training", ...) and facts that JSON can hold, as the new content of `folder`."""
    commit(folder, stage(folder, tensors, facts, owner), owner)


def stage(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any], owner: Owner | None = None
) -> dict[str, Any]:
    """The files of a new content, beside those of the old one, which stays; its index, for `commit`."""
    os.makedirs(folder, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    written: dict[Path, Path] = {}
    try:
        for group, named in tensors.items():
            content = tensors_to_bytes({k: v.detach().cpu().contiguous().clone() for k, v in named.items()})
            digest = hashlib.sha256(content).hexdigest()
            entries[group] = {"file": f"{group}-{digest[:12]}.safetensors", "sha256": digest, "size": len(content)}
            written[folder / entries[group]["file"]] = files.write_temporary(folder, content)
        if owner is not None:
            owner.claim([*written, folder / INDEX])
        for path, temporary in written.items():
            os.replace(temporary, path)  # also over one of that name: it may have been damaged since
    except BaseException:
        for temporary in written.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise
    files.sync_folder(folder)
    body: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, "files": entries, "facts": facts}))  # as read: keys become text
    return body


def commit(folder: Path, index: dict[str, Any], owner: Owner | None = None) -> None:
    """The staged content becomes that of the folder; what was replaced is deleted."""
    before: set[Path] = set()
    if owner is None:
        with contextlib.suppress(BadOption):
            before = {folder / entry["file"] for entry in read_index(folder)["files"].values()}
    else:
        owner.claim([folder / INDEX])
    write_index(folder, index)
    kept = {folder / INDEX, *(folder / entry["file"] for entry in index["files"].values())}
    if owner is not None:
        before = {path for path in owner.owned_in(folder) if path.suffix == ".safetensors" and path.name != "predictions.safetensors"}
    for stale in before - kept:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stale)
    if owner is not None:
        owner.drop(before - kept)
    sweep(folder, 0.0 if owner is not None else STALE)


def sweep(folder: Path, age: float) -> None:
    """Temporary files that a killed process left, if they are so old: others may be writing into a folder that no run owns."""
    for name in os.listdir(folder):
        if files.TEMPORARY.fullmatch(name):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(folder / name).st_mtime >= age:
                    os.unlink(folder / name)


# ---------------------------------------------------------------- load


def load(folder: Path, *groups: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The named groups (all, if none is named) and the facts; every byte is checked first."""
    index = read_index(folder)
    tensors = {}
    for group, entry in index["files"].items():
        if not groups or group in groups:
            try:
                tensors[group] = tensors_from_bytes(read_file(folder, entry))
            except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
                if isinstance(error, BadOption):
                    raise
                rule = f"is damaged: {entry['file']} is no safetensors file ({type(error).__name__})"
                raise BadOption("checkpoint", rule, str(folder)) from None
    return tensors, index["facts"]


def file_of(folder: Path, group: str) -> Path:
    """The file that holds a group."""
    try:
        return folder / str(read_index(folder)["files"][group]["file"])
    except KeyError:
        raise BadOption("checkpoint", f"has no group of tensors named {group}", str(folder)) from None
