"""One process writes a run: a lock file that names its process, held with flock where there is flock. Loads without torch."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from inputs import files
from utils import BadOption, say

FILE = ".lock"
MOST = 4096  # bytes
BEAT = 20.0  # seconds between signs of life: the holder sets the file's time to now
SILENT = 120.0  # seconds without one, after which a lock of another machine is free
_HELD: set[int] = set()  # handles of this process


def _let_go_in_child() -> None:
    """NOTE: a forked child shares the lock, and would keep it when its parent is killed."""
    for handle in _HELD:
        with contextlib.suppress(OSError):
            os.close(handle)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


class Held(BadOption):
    """Another process has the lock."""


class Lock:
    """Held from `with` to its end. A lock that was left by a process which died is taken over, and said: at once on this machine; on
    another one, of whose processes nothing is known, after `silent` seconds without a sign of life.

    The file is deleted by who holds it; whoever waited for a deleted one sees that it is another file than the one of that name.
    """

    def __init__(self, folder: Path, flag: str = "output_dir", name: str = FILE, silent: float = SILENT) -> None:
        self.folder, self.path, self.flag, self.silent, self.handle = folder, folder / name, flag, silent, -1
        self.let_go = threading.Event()

    def __enter__(self) -> Lock:
        while True:
            try:
                self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | files.NO_FOLLOW, 0o644)
            except OSError as error:
                raise BadOption(self.flag, f"must be a directory that can be written ({error.strerror})", str(self.folder)) from None
            try:
                locks = self._flock()
                if self._is_of_that_name():
                    self._take_over(locks)
                    _HELD.add(self.handle)
                    threading.Thread(target=self._give_signs, daemon=True).start()
                    return self
            except BaseException:
                self._close()
                raise
            self._close()

    def _flock(self) -> bool:
        """Whether this file system has locks; refused if another process has this one."""
        try:
            import fcntl

            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(holder_of(self.folder)) from None
        except (ImportError, OSError):  # Windows; a network drive
            return False
        return True

    def _is_of_that_name(self) -> bool:
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self.handle), there)

    def _take_over(self, locks: bool) -> None:
        before = _parsed(os.read(self.handle, MOST))
        if before is not None and (not is_silent(self.path, self.silent) if is_far(before) else not locks and lives(before)):
            raise self._refusal(before)
        if before is not None:
            say(f"lock: process {before['process']} is gone and left its lock in {self.folder}; taken over")
        own = {"process": os.getpid(), "host": socket.gethostname(), "started": started(os.getpid()), "since": time.strftime("%F %T")}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(self.handle, 0)
            os.lseek(self.handle, 0, os.SEEK_SET)
            os.write(self.handle, json.dumps(own).encode())

    def _give_signs(self) -> None:
        while not self.let_go.wait(BEAT):
            with contextlib.suppress(OSError):  # the network is away for a while
                os.utime(self.path, follow_symlinks=False)

    def _refusal(self, holder: dict[str, Any] | None) -> Held:
        who = ""
        if holder is not None:
            who = f" ({holder['process']} on {holder['host']}, since {holder['since']}"
            who += f"; if it has ended, its lock is free {self.silent:.0f} s after its last sign of life)" if is_far(holder) else ")"
        return Held(self.flag, f"is being written by another process{who}", str(self.folder))

    def __exit__(self, *error: object) -> None:
        self.let_go.set()
        with contextlib.suppress(OSError):  # the directory was deleted
            if self._is_of_that_name():
                os.unlink(self.path)
        self._close()

    def _close(self) -> None:
        _HELD.discard(self.handle)
        os.close(self.handle)


# ---------------------------------------------------------------- who holds it


def holder_of(folder: Path, name: str = FILE) -> dict[str, Any] | None:
    """What the lock file of a directory says, whether its process lives or not; None without one."""
    try:
        return _parsed(files.read_plain(folder / name, MOST))
    except OSError:
        return None


def is_held(folder: Path, name: str = FILE, silent: float = SILENT) -> bool:
    """Whether a process has the lock of this directory; one of another machine is believed as long as it gives signs of life."""
    holder = holder_of(folder, name)
    return holder is not None and (not is_silent(folder / name, silent) if is_far(holder) else lives(holder))


def is_far(holder: dict[str, Any]) -> bool:
    return bool(holder["host"] != socket.gethostname())


def is_silent(path: Path, seconds: float) -> bool:
    """Whether the holder of a lock has given no sign of life for so long. Clocks of machines differ: what counts is the time that the
    file system gives to a new file beside it."""
    try:
        last = path.stat().st_mtime
        if time.time() - last < seconds:
            return False
        new = files.write_temporary(path.parent, b"")
        try:
            return new.stat().st_mtime - last >= seconds
        finally:
            os.unlink(new)
    except OSError:  # it is gone, and free without this; or nothing can be written here
        return False


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        holder = json.loads(content)
        words = {"process": int, "host": str, "started": str, "since": str}
        return holder if all(isinstance(holder[name], kind) for name, kind in words.items()) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def lives(holder: dict[str, Any]) -> bool:
    """Whether a process of this machine is still that one: a later one may have its number."""
    try:
        os.kill(holder["process"], 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    except PermissionError:
        pass
    now = started(holder["process"])
    return now == holder["started"] or not now or not holder["started"]


def started(process: int) -> str:
    """When a process began, and in which boot; "" where the system does not tell. A dead one that nobody has waited for has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""
    return "ended" if fields[0] == "Z" else f"{boot}-{fields[19]}"
