"""How much memory is left, and a refusal of what would not fit, before any of it is taken."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, NamedTuple

from utils import BadOption


class Room(NamedTuple):
    """Memory that an option's value asks for."""

    option: str
    value: Any
    what: str
    size: float  # bytes


def require_room(*asked: Room) -> None:
    """Refuses what memory can't hold, before any of it is taken: the system would end the process, or all others."""
    free, total = free_memory(), sum(room.size for room in asked)
    if total <= free:
        return
    most = max(asked, key=lambda room: room.size)
    of = f" of {in_bytes(total)} in all" if len(asked) > 1 else ""
    rule = f"asks for more memory than the {in_bytes(free)} that are free: {most.what} takes about {in_bytes(most.size)}{of}"
    raise BadOption(most.option, rule, most.value)


def free_memory() -> float:
    """Bytes that can still be taken, by what the system says; infinite where it does not."""
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # of a container; "max" is no number
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found += [float(limit - used)]
    return min(found)


def in_bytes(size: float) -> str:
    """1,234,567,890 as "1.2 GB"."""
    power = min(5, max(0, int(math.log10(max(size, 1)) / 3)))
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"
