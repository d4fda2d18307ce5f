"""Files that are written whole or not at all, and files of unknown origin that are read with care. Loads without torch.

All goes through the functions of `os`, so that a test can put a layer under it in which any of them fails, or is the last one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r"\.[a-z0-9_]{8}\.tmp")
MANY = 1 << 22  # bytes that are handed over at once
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Unfit(OSError):
    """A file that is there and is not what it should be: a symlink, a device, longer or shorter than it was written."""

    def __init__(self, rule: str) -> None:
        super().__init__(errno.EINVAL, rule)


# ---------------------------------------------------------------- writing


def write_atomically(path: Path, content: bytes) -> None:
    """A temporary name in the same folder, fsync, replace, fsync the folder: never half a file under the real name, and a symlink of
    that name is replaced, not followed."""
    os.makedirs(path.parent, exist_ok=True)
    temporary = write_temporary(path.parent, content)
    try:
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_temporary(folder: Path, content: bytes) -> Path:
    """The content on disk, under a name that `TEMPORARY` tells."""
    temporary = folder / f".{secrets.token_hex(4)}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            _write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def append(path: Path, content: bytes) -> None:
    """At the end of a file, on disk when this returns. A kill may leave a part of it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_FOLLOW, 0o644)
    try:
        _write_all(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left[:MANY]) :]


def sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---------------------------------------------------------------- reading


def read_plain(path: Path, most: int, size: int | None = None) -> bytes:
    """The content of a regular file of at most `most` bytes, exactly `size` where that is known; its length is looked at first, and a
    symlink, a device or a pipe is refused unread."""
    handle = open_plain(path)
    try:
        length = os.fstat(handle).st_size
        if size is not None and length != size:
            raise Unfit(f"has {length:,} bytes, not {size:,}")
        if length > most:
            raise Unfit(f"has {length:,} bytes, and at most {most:,} are read")
        return b"".join(_pieces(handle))
    finally:
        os.close(handle)


def open_plain(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unfit("is a symlink") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unfit("is no regular file")
    return handle


def _pieces(handle: int) -> Iterator[bytes]:
    while piece := os.read(handle, MANY):
        yield piece


def sha256_of(path: Path) -> str:
    """Of a regular file, a piece at a time."""
    digest, handle = hashlib.sha256(), open_plain(path)
    try:
        for piece in _pieces(handle):
            digest.update(piece)
    finally:
        os.close(handle)
    return digest.hexdigest()


def sha256_of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_plain(name: Any) -> bool:
    """Whether a name is that of something in a folder itself, and of nothing elsewhere."""
    return isinstance(name, str) and 0 < len(name) < 256 and name not in (".", "..") and not set(name) & set("/\\\0:")


def memory() -> int:
    """Bytes of the machine's memory: no file that is longer is read into it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 40
