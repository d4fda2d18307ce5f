"""A layer under the functions of `os` through which files are written: it counts them, kills or stops at one of them, fills the disk."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir", "ftruncate")


@contextmanager
def layer(folder: Path, after: Callable[[int, str], None], disk: int | None = None) -> Iterator[list[str]]:
    """Calls `after` with the number and name of each operation that changes something in `folder`, once it is done. `disk`: bytes
    that can be written until there is no space left."""
    inside, done, left = str(folder.resolve()), [], [disk]
    handles: set[int] = set()
    real = {name: getattr(os, name) for name in CALLS}

    def of(name: str) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            ours = words[0] in handles if isinstance(words[0], int) else str(os.path.abspath(os.fspath(words[0]))).startswith(inside)
            changes = ours and (name != "open" or bool(words[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)))
            if name == "write" and ours and left[0] is not None:
                if left[0] <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                words = (words[0], words[1][: left[0]])
                left[0] -= len(words[1])
            found = real[name](*words, **more)
            if name == "open":
                handles.discard(found)
                if changes:
                    handles.add(found)
            if changes:
                done.append(name)
                after(len(done), name)
            return found

        return call

    for name in CALLS:
        setattr(os, name, of(name))
    try:
        yield done
    finally:
        for name, call in real.items():
            setattr(os, name, call)


def killing(at: int) -> Callable[[int, str], None]:
    """SIGKILL after so many operations."""

    def after(number: int, name: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return after


def nothing(number: int, name: str) -> None:
    pass


def in_child(work: Callable[[], object], quiet: bool = True) -> int:
    """A forked process that does the work: its exit code, or minus the signal that ended it. 99: an exception came through."""
    process = os.fork()
    if process == 0:
        code = 99
        try:
            if quiet:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
