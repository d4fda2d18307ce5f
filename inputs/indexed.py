"""Folders of files that an index names with the length and SHA-256 of each. Loads without torch; inputs/store.py keeps tensors in them.

checkpoint.json, the index, is replaced last and atomically, and the other files carry their hash in their name: whenever the machine
stops, the folder holds the old content or the new one, whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inputs import files
from utils import BadOption

FORMAT = "neighbor attention checkpoint, version 2"
READABLE = (FORMAT, "neighbor attention checkpoint, version 1")  # the first had other names: training/older.py
INDEX = "checkpoint.json"
MOST_INDEX = 1 << 28  # bytes
HEX = re.compile(r"[0-9a-f]{64}")


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder: files that are plain names in it, and facts; its own digest is checked."""
    try:
        content = files.read_plain(folder / INDEX, MOST_INDEX)
    except files.Unfit as error:
        raise BadOption("checkpoint", f"is damaged: {INDEX} {error.strerror}", str(folder)) from None
    except OSError as error:
        raise BadOption("checkpoint", f"must hold {INDEX} ({error.strerror})", str(folder)) from None
    try:
        index = json.loads(content)
        if not isinstance(index, dict) or index.get("format") not in READABLE:
            raise BadOption("checkpoint", f"must be a '{FORMAT}'", str(folder))
        digest = index.pop("sha256", "")
        if digest != digest_of(index):
            raise BadOption("checkpoint", f"is damaged: {INDEX} does not match its own SHA-256", str(folder))
    except BadOption:
        raise
    except (ValueError, RecursionError):
        raise BadOption("checkpoint", f"is damaged: {INDEX} is not whole", str(folder)) from None
    _require_sane(index, folder)
    return index


def _require_sane(index: Any, folder: Path) -> None:
    entries = index.get("files") if isinstance(index, dict) else None
    if not isinstance(index.get("facts"), dict) or not isinstance(entries, dict):
        raise BadOption("checkpoint", f"is damaged: {INDEX} names no files and facts", str(folder))
    for entry in entries.values():
        whole = isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and HEX.fullmatch(entry["sha256"])
        if not whole or not isinstance(entry.get("size", 0), int):
            raise BadOption("checkpoint", f"is damaged: {INDEX} names a file without its SHA-256", str(folder))
        if not files.is_plain(entry.get("file")):
            raise BadOption("checkpoint", f"must name files of its own folder, and names {str(entry.get('file'))[:80]!r}", str(folder))


def read_file(folder: Path, entry: dict[str, Any]) -> bytes:
    """The content of a file that the index names; its length is checked before it is read, its SHA-256 after."""
    name = entry["file"]
    try:
        content = files.read_plain(folder / name, files.memory(), entry.get("size"))
    except files.Unfit as error:
        raise BadOption("checkpoint", f"is damaged: {name} {error.strerror}", str(folder)) from None
    except OSError as error:
        raise BadOption("checkpoint", f"lacks its file {name} ({error.strerror})", str(folder)) from None
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise BadOption("checkpoint", f"is damaged: {name} does not have the SHA-256 that {INDEX} names", str(folder))
    return content


def verify(folder: Path, index: dict[str, Any] | None = None) -> dict[str, Any]:
    """The index of a folder (or another one for its files) after every byte that it names was checked."""
    if index is None:
        index = read_index(folder)
    else:
        _require_sane(index, folder)
    for entry in index["files"].values():
        verify_file(folder, entry)
    return index


def verify_file(folder: Path, entry: Mapping[str, Any]) -> None:
    """That a file is as the index says; a piece of it at a time."""
    path = folder / entry["file"]
    try:
        size = path.lstat().st_size
        if size != entry.get("size", size) and not path.is_symlink():  # of a link, that it is one says more
            raise files.Unfit(f"has {size:,} bytes, not {entry['size']:,}")
        same = files.sha256_of(path) == entry["sha256"]
    except files.Unfit as error:
        raise BadOption("checkpoint", f"is damaged: {entry['file']} {error.strerror}", str(folder)) from None
    except OSError as error:
        raise BadOption("checkpoint", f"lacks its file {entry['file']} ({error.strerror})", str(folder)) from None
    if not same:
        raise BadOption("checkpoint", f"is damaged: {entry['file']} does not have the SHA-256 that {INDEX} names", str(folder))


def write_index(folder: Path, body: dict[str, Any]) -> None:
    """A line a key. NOTE: with indentation Python's slow encoder would write it, after each epoch; it has what all epochs found."""
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in {**body, "sha256": digest_of(body)}.items())
    files.write_atomically(folder / INDEX, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def digest_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def core_of(index: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a best checkpoint this one; calibration adds to it and leaves this."""
    weights = [index["files"].get(group, {}).get("sha256") for group in ("model", "bank")]
    return *weights, index["facts"].get("run"), index["facts"].get("epoch")
