"""The directory of a run: locked first, then looked at, then written; who owns which of its files. Loads without torch.

run.json, the marker, is written first and lists every file before it is made. Only what it lists is ever deleted or replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from config import SENDING
from inputs import files
from inputs.indexed import HEX, INDEX, read_index
from run.lock import Lock, is_held
from utils import BadOption, Halt

MARKER, FORMAT = "run.json", "neighbor attention run, version 1"
RESULTS = "results.json"  # written last: a directory without it holds a run that did not finish
FLAT = "results.csv"  # the same in short. NOTE: not in OWN: in a run that is older than it, a file of this name is somebody's
ERROR = "error.txt"  # what ended a run that failed
METRICS, PREDICTIONS = "metrics.jsonl", "predictions.safetensors"
CHECKPOINTS = tuple(f"checkpoints/{name}" for name in ("last", "best"))
OWN = ("config.yaml", "args.txt", "model.txt", METRICS, "train_eval_results.txt", "curves.png", PREDICTIONS, RESULTS, ERROR)
TESTED = tuple(f"{folder}/{name}" for folder in CHECKPOINTS for name in (RESULTS, PREDICTIONS))  # by --test_only, beside what it tests
TESTED_FLAT = tuple(f"{folder}/{FLAT}" for folder in CHECKPOINTS)  # the same, of runs that have listed it
MOST = 1 << 26  # bytes of a marker


# ---------------------------------------------------------------- what a directory holds


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a run; None where there is none that is whole."""
    try:
        found = json.loads(files.read_plain(folder / MARKER, MOST))
        whole = found["format"] == FORMAT and re.fullmatch(r"[0-9a-f]{32}", found["id"]) and isinstance(found["config"], dict)
        listed = all(_is_inside(name) and (sha is None or HEX.fullmatch(sha)) for name, sha in found["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if whole and listed else None


def _is_inside(name: str) -> bool:
    return all(files.is_plain(part) for part in name.split("/"))


def files_of_old_run(folder: Path) -> set[str] | None:
    """The files of a run that was begun before there were markers, by its checkpoints; None if it is no such run."""
    if not (folder / "config.yaml").is_file():
        return None
    found = {name for name in OWN if (folder / name).is_file()}
    found |= {p.name for p in folder.glob("results-epoch*.json") if re.fullmatch(r"results-epoch\d+\.json", p.name)}
    for checkpoint in CHECKPOINTS:
        with contextlib.suppress(BadOption):
            names = [INDEX, *(entry["file"] for entry in read_index(folder / checkpoint)["files"].values())]
            found |= {f"{checkpoint}/{name}" for name in names}
    begun = {"args.txt", "model.txt"} <= found  # and stopped before its first checkpoint
    return found | set(TESTED) if begun or any(f"{c}/{INDEX}" in found for c in CHECKPOINTS) else None


def files_of(folder: Path) -> set[str] | None:
    """All files that a run has listed as its own; None where there is no run."""
    marker = read_marker(folder)
    return files_of_old_run(folder) if marker is None else {*marker["files"], MARKER}


def first_other(folder: Path, own: set[str]) -> str | None:
    """A thing in a directory that is not a run's own; hidden ones don't count, and stay. Nor do event files of TensorBoard, which
    has made them before a run can list them."""
    try:
        for base, folders, names in os.walk(folder, followlinks=False):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            links = [name for name in folders if os.path.islink(os.path.join(base, name))]
            for name in [*links, *sorted(names)]:
                path = Path(base, name).relative_to(folder).as_posix()
                if path not in own and not name.startswith((".", "events.out.tfevents.")):
                    return path
    except OSError as error:
        raise BadOption("output_dir", f"must be a directory that can be read ({error.strerror})", str(folder)) from None
    return None


def look(folder: Path, overwrite: bool) -> None:
    """May a run begin here? Writes nothing."""
    check_writable(folder)
    if not folder.exists():
        return
    own = files_of(folder)
    if own is not None and not overwrite:
        if (folder / RESULTS).exists():
            raise BadOption("output_dir", "holds a finished run (--overwrite replaces it)", str(folder))
        there = any((folder / c / INDEX).exists() for c in CHECKPOINTS)
        how = "continues it" if there else "begins it anew: it has no checkpoint yet"
        raise BadOption("output_dir", f"holds a run that did not finish (--resume {how}, --overwrite replaces it)", str(folder))
    other = first_other(folder, own or set())
    if other is not None and own is None:
        raise BadOption("output_dir", f"must be empty or hold a run: no run has listed {other} as its own", str(folder))
    if other is not None:
        raise BadOption("output_dir", f"can't be overwritten: the run that it holds has not listed {other} as its own", str(folder))


def state_of(folder: str | Path) -> str:
    """How a run stands, by its directory alone: none, running, done, failed (error.txt says why), stopped (--resume goes on) or
    unfinished (--resume begins it anew). Writes nothing."""
    folder = Path(folder)
    if is_held(folder):
        return "running"
    if (folder / RESULTS).exists():
        return "done"
    if files_of(folder) is None:
        return "none"
    if (folder / ERROR).exists():
        return "failed"
    return "stopped" if (folder / CHECKPOINTS[0] / INDEX).exists() else "unfinished"


def check_writable(folder: Path, flag: str = "output_dir") -> None:
    """Without writing: the nearest folder that exists must take new entries."""
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BadOption(flag, f"must be a directory that can be written ({there} can't)", str(folder))


def again(folder: str, config: Mapping[str, Any]) -> str:
    """The command that goes on with a run. What runs code, or sends numbers elsewhere, has to be typed again."""
    named = {"plugin": config.get("plugin"), "tracker": tracker if (tracker := config.get("tracker")) in SENDING else None}
    typed = "".join(f" --{name} {shlex.quote(value)}" for name, value in named.items() if isinstance(value, str))
    return f"resume with: python main.py --resume {shlex.quote(folder)}{typed}"


# ---------------------------------------------------------------- a directory that is written


class RunDirectory:
    """A run's directory, locked by this process (`opened`, `new`). All that a run writes goes through it."""

    writes = True

    def __init__(self, path: Path, marker: Mapping[str, Any]) -> None:
        self.path = path
        self.marker = dict(marker)
        self.files: dict[str, str | None] = self.marker["files"]
        self.replaced = False  # the marker on disk is another's

    @property
    def id(self) -> str:
        return str(self.marker["id"])

    @property
    def again(self) -> str:
        """The command that goes on; "" where it could not."""
        if (read_marker(self.path) or {}).get("id") != self.id:
            return ""
        return again(str(self.path), self.marker["config"])

    # ------------------------------------------------ its files

    def claim(self, paths: Iterable[Path]) -> None:
        """Lists files before they are made. NOTE: a directory that was deleted meanwhile is not made anew."""
        self._require()
        for path in paths:
            self._require_real(path.parent)
        if new := {self._name(path): None for path in paths if self._name(path) not in self.files}:
            self.files.update(new)
            self._write_marker()

    def drop(self, paths: Iterable[Path]) -> None:
        """Files that are gone; the marker says so when it is written next."""
        for path in paths:
            self.files.pop(self._name(path), None)

    def owned_in(self, folder: Path) -> set[Path]:
        return {path for name in self.files if (path := self.path / name).parent == folder}

    def write(self, name: str, content: str | bytes) -> None:
        self.claim([self.path / name])
        files.write_atomically(self.path / name, content.encode() if isinstance(content, str) else content)

    def add(self, name: str, line: str) -> None:
        """A line more in a file."""
        self.claim([self.path / name])
        files.append(self.path / name, f"{line}\n".encode())

    def rename(self, old: str, new: str) -> None:
        self.claim([self.path / new])
        os.replace(self.path / old, self.path / new)

    def delete(self, name: str) -> None:
        if name in self.files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)

    def finish(self, results: Mapping[str, Any], growing: Iterable[Path] = ()) -> None:
        """The digests of all files, then results.json, last. `growing`: files that others write on."""
        open_still = {self._name(path) for path in growing}
        content = files.json_bytes(results)
        self.claim([self.path / RESULTS])
        for name in [name for name in self.files if not (self.path / name).exists() and name not in (RESULTS, *OWN, *TESTED, *TESTED_FLAT)]:
            del self.files[name]
        for name in self.files:  # an index has the digests of the other files of its folder
            single = ("/" not in name or name.endswith(f"/{INDEX}")) and name not in open_still
            self.files[name] = files.sha256_of(self.path / name) if single and (self.path / name).is_file() else None
        self.files[RESULTS] = files.sha256_of_bytes(content)
        self._write_marker()
        files.write_atomically(self.path / RESULTS, content)

    def forget_digests(self) -> None:
        """Of a run that goes on."""
        self.files.update(dict.fromkeys(self.files))

    def sweep(self) -> None:
        """Temporary files of a process that was killed."""
        for folder in {self.path, *((self.path / name).parent for name in self.files)}:
            for name in os.listdir(folder) if folder.is_dir() and self._link_above(folder) is None else ():
                if files.TEMPORARY.fullmatch(name):
                    os.unlink(folder / name)

    # ------------------------------------------------

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _write_marker(self) -> None:
        files.write_json(self.path / MARKER, {**self.marker, "files": self.files})

    def _require(self) -> None:
        if (read_marker(self.path) or {}).get("id") != self.id:
            raise Halt(f"error: {self.path} was deleted or replaced while the run wrote it; what was not saved is lost", 1)

    def _require_real(self, folder: Path) -> None:
        """NOTE: through a link in the place of a folder, files elsewhere would be written and deleted."""
        if link := self._link_above(folder):
            raise BadOption("output_dir", f"must not hold a symlink in the place of a folder ({self._name(link)})", str(self.path))

    def _link_above(self, folder: Path) -> Path | None:
        inside = (part for part in (folder, *folder.parents) if part != self.path and part.is_relative_to(self.path))
        return next((part for part in inside if part.is_symlink()), None)

    def _delete_own(self) -> None:
        """Everything that the marked run listed; the marker stays until another replaces it."""
        for name in sorted(self.files, key=lambda name: (name != RESULTS, not name.endswith(INDEX))):  # at once, it is no run to go on with
            path = self.path / name
            self._require_real(path.parent)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
        self.sweep()
        for folder in sorted({(self.path / name).parent for name in self.files} - {self.path}, reverse=True):
            for empty in (folder, *folder.parents):
                if empty == self.path or not empty.is_relative_to(self.path):
                    break
                with contextlib.suppress(OSError):
                    os.rmdir(empty)


@contextlib.contextmanager
def opened(folder: Path, flag: str = "resume") -> Iterator[RunDirectory]:
    """A run that is there, locked. One without a marker gets it when something is written."""
    with Lock(folder, flag):
        marker = read_marker(folder)
        directory = RunDirectory(folder, marker or {"format": FORMAT, "id": secrets.token_hex(16), "config": {}, "files": {}})
        yield directory


def list_files(folder: Path, names: Iterable[str]) -> None:
    """Files that a command adds to a run, such as pictures, become the run's own. Not while another process writes it."""
    if read_marker(folder) is None:
        return
    with contextlib.suppress(BadOption, OSError), opened(folder, "output_dir") as directory:
        directory.claim([folder / name for name in names])


def adopt(directory: RunDirectory, config: Mapping[str, Any], run: str | None) -> None:
    """A marker for a run that has none: it was begun before there were any. `run`: its id, if its checkpoint has one."""
    if read_marker(directory.path) is not None:
        return
    found = files_of_old_run(directory.path) or set()
    directory.marker |= {"config": dict(config), **({"id": run} if run else {})}
    directory.files.update(dict.fromkeys([*OWN, *TESTED, *sorted(found)]))
    directory._write_marker()


@contextlib.contextmanager
def new(folder: Path | None, default: str, marker: Mapping[str, Any], overwrite: bool) -> Iterator[RunDirectory]:
    """The directory of a run that begins: made, locked, looked at, emptied of the run that it held, and marked.

    `default` names it where `folder` does not. `marker`: what is needed to begin anew."""
    made = [] if folder is None else [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        if folder is None:
            folder = _unused(default)
            made = [folder]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption("output_dir", f"must be a directory that can be written ({error.strerror})", str(folder)) from None
    begun = False
    try:
        with Lock(folder):
            look(folder, overwrite)
            own = files_of(folder)
            before = read_marker(folder)
            if own is not None:
                RunDirectory(folder, before or {"id": "", "files": dict.fromkeys(own)})._delete_own()
            listed = dict.fromkeys([*OWN, *TESTED, *TESTED_FLAT])
            directory = RunDirectory(folder, {"format": FORMAT, "id": secrets.token_hex(16), **marker, "files": listed})
            directory._write_marker()
            begun = True
            directory.sweep()
            yield directory
    finally:
        if not begun:
            for empty in made:
                with contextlib.suppress(OSError):
                    empty.rmdir()


def _unused(name: str) -> Path:
    """A directory of that name, or with a number, that this process has made."""
    Path("runs").mkdir(exist_ok=True)
    for number in range(1, 10_000):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise BadOption("output_dir", "must be named: there are 10,000 runs of this name today", name)


def default_name(config: Any) -> str:
    prefix, colon, path = config.data.dataset.partition(":")
    data = f"{prefix}-{Path(path).name}" if colon else prefix
    words = f"{time.strftime('%Y%m%d-%H%M%S')}-{data}-{config.model.model if 'layer' in config.ignored else config.layers.layer}"
    return re.sub(r"[^0-9A-Za-z.=,-]+", "_", words).strip("_")[:100]
