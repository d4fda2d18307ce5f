"""The directory of a run that several processes train: the first has locked it and writes, the others only read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ranks import here
from run.directory import RunDirectory


class Watched(RunDirectory):
    """A run's directory where another process writes it."""

    writes = False

    def claim(self, paths: Iterable[Path]) -> None: ...

    def write(self, name: str, content: str | bytes) -> None: ...

    def add(self, name: str, line: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def delete(self, name: str) -> None: ...

    def sweep(self) -> None: ...

    def _write_marker(self) -> None: ...


@contextlib.contextmanager
def shared(opening: AbstractContextManager[RunDirectory]) -> Iterator[RunDirectory]:
    """A directory that the first process opens, as each has it."""
    with contextlib.ExitStack() as stack:
        own: list[RunDirectory] = []

        def opened() -> tuple[Path, dict[str, Any]]:
            own.append(stack.enter_context(opening))
            return own[0].path, own[0].marker

        path, marker = here().on_first(opened)
        yield own[0] if own else Watched(path, marker)
